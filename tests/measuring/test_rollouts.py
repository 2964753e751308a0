import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilore_cli.errors import FileError, HiloreError
from hilore_cli.measuring import sampling
from hilore_cli.measuring.models import Actor
from hilore_cli.measuring.options import LossSpec, WorkloadOptions
from hilore_cli.measuring.prompts import problems
from hilore_cli.measuring.rollouts import (
    Completion,
    MicroBatch,
    Rollouts,
    group_advantages,
    micro_batches,
    random_rollouts,
    read_rollouts,
    sample_rollouts,
)
from hilore_cli.measuring.sampling import sample_completions
from hilore_cli.measuring.step import completion_logps
from hilore_cli.tables.profile_table import Shape
from tests.conftest import TinyLlama

SHAPE = Shape(micro_batch=2, prompt_tokens=6, response_tokens=8)
ROWS = (
    {"group": "a", "prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "reward": 1.0},
    {"group": "a", "prompt_ids": [1, 2], "completion_ids": [6], "reward": 0.0},
    {"group": "b", "prompt_ids": [7], "completion_ids": [8, 9], "reward": 0.5},
    {"group": "a", "prompt_ids": [1, 2], "completion_ids": [9, 9], "reward": 0.0},
    {"group": "b", "prompt_ids": [7], "completion_ids": [8], "reward": 0.5},
)


class Bytes:
    """A tokenizer with one token a byte."""

    pad_token_id = 0
    eos_token_id = 10
    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode(errors="replace")


def write(tmp_path: Path, rows: Any, kind: str = "parquet") -> Path:
    path = tmp_path / f"rollouts.{kind}"
    if kind == "parquet":
        pd.DataFrame(list(rows)).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(place: int, **values: Any) -> list[dict[str, Any]]:
    rows = [dict(row) for row in ROWS]
    rows[place] |= values
    return rows


def refused(match: str, path: Path, hint: str = "", tokenizer: Any = None) -> None:
    with pytest.raises(FileError, match=match) as caught:
        read_rollouts(path, tokenizer, vocab_size=256)
    assert hint in caught.value.hint
    assert caught.value.hint
    assert "\n" not in f"{caught.value}{caught.value.hint}"


# --- files


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rewards_are_normalised_within_their_group_as_trl_does(tmp_path: Path, kind: str) -> None:
    rollouts = read_rollouts(write(tmp_path, ROWS, kind), None, vocab_size=256)
    rewards = [1.0, 0.0, 0.0]
    expected = [(value - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for value in rewards]
    assert [one.advantage for one in rollouts.completions if one.group == 0] == pytest.approx(expected)
    assert [one.advantage for one in rollouts.completions if one.group == 1] == [0.0, 0.0]
    assert rollouts.completions[0].prompt_ids == (1, 2)
    assert rollouts.completions[3].completion_ids == (9, 9)
    assert rollouts.mean_reward == pytest.approx(0.4)
    assert rollouts.source == f"rollouts.{kind}"


def test_both_formats_have_the_same_digest(tmp_path: Path) -> None:
    digests = {read_rollouts(write(tmp_path, ROWS, kind), None, vocab_size=256).digest for kind in ("parquet", "jsonl")}
    assert len(digests) == 1
    other = read_rollouts(write(tmp_path, changed(0, reward=2.0)), None, vocab_size=256).digest
    assert other not in digests


def test_an_advantage_column_wins_over_rewards_and_other_columns_are_ignored(tmp_path: Path) -> None:
    rows = [{**row, "advantage": float(place) - 2, "step": 5} for place, row in enumerate(ROWS)]
    rollouts = read_rollouts(write(tmp_path, rows), None, vocab_size=256)
    assert [one.advantage for one in rollouts.completions] == [-2, -1, 0, 1, 2]
    assert rollouts.mean_reward == pytest.approx(0.4)


def test_advantages_without_rewards_have_mean_reward_zero(tmp_path: Path) -> None:
    rows = [{"group": 0, "prompt_ids": [1], "completion_ids": [2], "advantage": 1.0}]
    assert read_rollouts(write(tmp_path, rows), None, vocab_size=256).mean_reward == 0.0


def test_texts_are_tokenised_as_they_stand(tmp_path: Path) -> None:
    rows = [{"group": 1, "prompt": "ab", "completion": "cde", "reward": float(place)} for place in range(2)]
    first = read_rollouts(write(tmp_path, rows), Bytes(), vocab_size=256).completions[0]
    assert (first.prompt_ids, first.completion_ids) == ((97, 98), (99, 100, 101))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_chat_messages_go_through_the_template(tmp_path: Path, kind: str) -> None:
    class Chat(Bytes):
        chat_template = "yes"

        def apply_chat_template(
            self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
        ) -> str:
            assert add_generation_prompt
            assert not tokenize
            return "|".join(message["content"] for message in messages)

    rows = [
        {
            "group": 1,
            "prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}],
            "completion": [{"role": "assistant", "content": "c"}],
            "advantage": 1.0,
        }
    ]
    first = read_rollouts(write(tmp_path, rows, kind), Chat(), vocab_size=256).completions[0]
    assert (bytes(first.prompt_ids), bytes(first.completion_ids)) == (b"x|ab", b"c")


def test_log_probs_come_along(tmp_path: Path) -> None:
    rows = [{**row, "old_logps": [-1.0] * len(row["completion_ids"])} for row in ROWS]
    rollouts = read_rollouts(write(tmp_path, rows), None, vocab_size=256)
    assert rollouts.completions[0].old_logps == (-1.0, -1.0, -1.0)
    assert rollouts.completions[0].ref_logps is None


def test_empty_completions_count_for_the_mean_only(tmp_path: Path) -> None:
    rollouts = read_rollouts(write(tmp_path, changed(1, completion_ids=[])), None, vocab_size=256)
    assert len(rollouts.completions) == 4
    assert rollouts.completions[0].advantage == pytest.approx(1.1545, abs=1e-3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused("does not exist", tmp_path / "none.parquet", "--rollouts")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    refused("is a folder", tmp_path / "x.jsonl")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    refused("neither .parquet nor .jsonl", tmp_path / "x.csv", "convert")


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_garbage_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{\x00garbage\n" * 30)
    refused("cannot be read as", tmp_path / name)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    refused("holds no rows", tmp_path / "x.jsonl")


@pytest.mark.parametrize("line", ["3", '"text"', "[1, 2]", "null"])
def test_lines_that_are_no_objects_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    refused("line 1 is not a JSON object", tmp_path / "x.jsonl")


@pytest.mark.parametrize("column", ["group", "prompt_ids", "completion_ids", "reward"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    rows = [{name: value for name, value in row.items() if name != column} for row in ROWS]
    refused(f"has no column {column if column != 'reward' else 'advantage or reward'}", write(tmp_path, rows))


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    refused("row 2 of completion_ids holds id 256, .* ends at 255", write(tmp_path, changed(2, completion_ids=[256])))
    refused("row 1 of prompt_ids holds id -1", write(tmp_path, changed(1, prompt_ids=[-1])))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high", [1.0]])
@pytest.mark.parametrize("column", ["reward", "advantage"])
def test_rewards_and_advantages_must_be_finite(tmp_path: Path, column: str, value: Any) -> None:
    rows = [{**row, "advantage": 1.0} if column == "advantage" else dict(row) for row in ROWS]
    rows[3][column] = value
    refused(f"row 3 has {column} .*not a finite number", write(tmp_path, rows, "jsonl"), "drop the row")


@pytest.mark.parametrize("value", ["1 2 3", 5, [1.5], ["1"], [True], None, {"a": 1}])
def test_ids_must_be_lists_of_whole_numbers(tmp_path: Path, value: Any) -> None:
    refused("row 1 of completion_ids is not a list", write(tmp_path, changed(1, completion_ids=value), "jsonl"))


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    rows = [{"group": 1, "prompt": "a", "completion": "b", "reward": 1.0}]
    refused("has no tokenizer", write(tmp_path, rows), "prompt_ids")


@pytest.mark.parametrize("value", [None, 3, []])
def test_texts_must_be_texts(tmp_path: Path, value: Any) -> None:
    rows = [{"group": 1, "prompt": "a", "completion": value, "reward": 1.0}]
    refused("row 0 of completion is not a text", write(tmp_path, rows, "jsonl"), tokenizer=Bytes())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([-1.0], "row 0 of old_logps has 1 numbers for 3"),
        ([-1.0, float("nan"), -1.0], "not finite"),
        ("abc", "not a list of numbers"),
        (None, "row 0 has no old_logps, but other rows have"),
    ],
)
def test_broken_log_probs_are_named(tmp_path: Path, value: Any, match: str) -> None:
    rows = [{**row, "old_logps": [-1.0] * len(row["completion_ids"])} for row in ROWS]
    rows[0]["old_logps"] = value
    refused(match, write(tmp_path, rows, "jsonl"))


def test_rows_without_group_or_prompt_are_named(tmp_path: Path) -> None:
    refused("row 2 has no group", write(tmp_path, changed(2, group=None)))
    refused("row 2 has no group", write(tmp_path, changed(2, group=[1]), "jsonl"))
    refused("row 2 has an empty prompt", write(tmp_path, changed(2, prompt_ids=[])))


def test_rollouts_without_any_advantage_have_nothing_to_measure(tmp_path: Path) -> None:
    refused("nothing to measure", write(tmp_path, [{**row, "reward": 1.0} for row in ROWS]), "differ")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16))
def test_advantages_of_a_group_are_centred_and_finite(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert all(math.isfinite(value) for value in advantages)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    assert all(abs(value) <= math.sqrt(len(rewards)) for value in advantages)


def test_one_success_in_eight_gives_the_familiar_advantages() -> None:
    advantages = group_advantages([1.0] + [0.0] * 7)
    assert advantages[0] == pytest.approx(2.474, abs=1e-3)
    assert advantages[1] == pytest.approx(-0.353, abs=1e-3)


# --- micro-batches


def completion(place: int, *, prompt: int = 3, response: int = 5, advantage: float = 1.0, **values: Any) -> Completion:
    return Completion(
        group=0,
        prompt_ids=(place,) * prompt,
        completion_ids=(100 + place,) * response,
        advantage=advantage,
        **values,
    )


def batches(completions: Sequence[Completion], *, shape: Shape = SHAPE, **changes: Any) -> list[MicroBatch]:
    rollouts = Rollouts(completions=tuple(completions), source="test", digest="", mean_reward=0.0)
    return micro_batches(rollouts, shape, **{"pad_id": 0, "device": "cpu", "count": 1, **changes})


def members(batch: MicroBatch) -> tuple[int, ...]:
    return tuple(int(row[SHAPE.prompt_tokens]) - 100 for row in batch.input_ids)


def test_prompts_are_padded_left_and_completions_right_to_the_full_shape() -> None:
    (batch,) = batches([completion(1, old_logps=(-1.0,) * 5), completion(1, old_logps=(-1.0,) * 5)], pad_id=9)
    assert batch.input_ids.tolist() == [[9, 9, 9, 1, 1, 1, 101, 101, 101, 101, 101, 9, 9, 9]] * 2
    assert batch.attention_mask.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert batch.completion_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert batch.old_logps.tolist() == [[-1, -1, -1, -1, -1, 0, 0, 0]] * 2
    assert batch.ref_logps is None
    assert batch.completion_tokens == 10


def test_long_prompts_lose_their_start_and_long_completions_their_end() -> None:
    long = Completion(
        group=0,
        prompt_ids=tuple(range(10)),
        completion_ids=tuple(range(20, 40)),
        advantage=1.0,
        ref_logps=tuple(-float(place) for place in range(20)),
    )
    (batch,) = batches([long], shape=dataclasses.replace(SHAPE, micro_batch=1))
    assert batch.input_ids[0].tolist() == [4, 5, 6, 7, 8, 9, *range(20, 28)]
    assert batch.ref_logps[0].tolist() == [-float(place) for place in range(8)]
    rollouts = Rollouts(completions=(long, completion(1)), source="test", digest="", mean_reward=0.0)
    assert rollouts.cut_count(SHAPE) == 1


def test_every_completion_with_an_advantage_is_dealt_once_before_any_is_dealt_again() -> None:
    useful = [completion(place) for place in range(64)]
    silent = [completion(64 + place, advantage=0.0) for place in range(32)]
    taken = [place for batch in batches(silent + useful, count=32) for place in members(batch)]
    assert sorted(taken) == list(range(64))
    assert taken != sorted(taken)


def test_a_longer_list_of_rollouts_deals_the_same_first_micro_batches() -> None:
    completions = [completion(place, advantage=float(place % 5 != 0)) for place in range(96)]
    few, many = batches(completions[:32], count=12), batches(completions, count=48)
    assert [members(batch) for batch in few] == [members(batch) for batch in many[:16]][: len(few)]


def test_held_out_micro_batches_share_no_sequence_with_the_first_while_there_are_enough() -> None:
    completions = [completion(place) for place in range(16)]
    first, held_out = batches(completions, count=4), batches(completions, count=4, skip=4)
    assert not {one for batch in first for one in members(batch)} & {
        one for batch in held_out for one in members(batch)
    }
    assert [members(one) for one in batches(completions, count=8)] == [members(one) for one in first + held_out]


@given(st.integers(2, 12), st.integers(2, 4))
def test_micro_batches_differ_when_the_pool_is_dealt_twice(count: int, size: int) -> None:
    shape = dataclasses.replace(SHAPE, micro_batch=size)
    dealt = batches([completion(place) for place in range(count)], shape=shape, count=max(1, count // size) * 2)
    assert all(batch.input_ids.shape == (size, 14) for batch in dealt)
    assert len({members(batch) for batch in dealt}) == len(dealt)


def test_micro_batches_of_nothing_but_zero_advantages_are_refused() -> None:
    with pytest.raises(HiloreError, match="nothing to measure"):
        batches([completion(1, advantage=0.0)])


# --- random ids


def test_random_rollouts_fill_the_shape_and_say_what_they_are() -> None:
    options = WorkloadOptions(model="x", shape=SHAPE)
    rollouts = random_rollouts(50, options)
    assert rollouts.source == "random"
    assert rollouts == random_rollouts(50, options)
    assert rollouts != random_rollouts(50, dataclasses.replace(options, seed=1))
    assert {len(one.completion_ids) for one in rollouts.completions} == {8}
    assert max(token for one in rollouts.completions for token in one.prompt_ids) < 50
    assert all(one.advantage != 0 for one in rollouts.completions)


def test_random_rollouts_have_a_reference_where_the_loss_asks_for_one() -> None:
    rollouts = random_rollouts(50, WorkloadOptions(model="x", shape=SHAPE, loss=LossSpec(beta=0.1)))
    assert all(len(one.ref_logps) == 8 for one in rollouts.completions)


# --- sampled by the actor


@pytest.fixture
def talker(tiny_llama: TinyLlama) -> Actor:
    return dataclasses.replace(tiny_llama(eos_token_id=10), tokenizer=Bytes())


def test_sampled_tokens_carry_the_log_probs_that_training_sees(talker: Actor) -> None:
    prompts = [(65,), (66, 67, 68), (69, 70)] * 6
    sampled = sample_completions(talker, prompts, max_tokens=40, generator=torch.Generator().manual_seed(0))
    completions = [
        Completion(group=0, prompt_ids=prompt, completion_ids=ids, advantage=1.0, old_logps=logps)
        for prompt, (ids, logps) in zip(prompts, sampled, strict=True)
    ]
    shape = Shape(micro_batch=18, prompt_tokens=4, response_tokens=40)
    (batch,) = batches(completions, shape=shape)
    with torch.no_grad():
        found = completion_logps(talker.model, batch) * batch.completion_mask
    torch.testing.assert_close(found, batch.old_logps, rtol=1e-4, atol=1e-4)
    lengths = {len(ids) for ids, _ in sampled}
    assert len(lengths) > 1  # rows left the batch on the way


def test_completions_end_with_the_end_token_or_at_the_limit(talker: Actor) -> None:
    sampled = sample_completions(talker, [(65,)] * 64, max_tokens=60, generator=torch.Generator().manual_seed(0))
    for ids, _ in sampled:
        assert 10 not in ids[:-1]
        assert ids[-1] == 10 or len(ids) == 60


def test_samples_follow_the_actor_distribution(talker: Actor) -> None:
    draws = sample_completions(talker, [(65, 66)] * 4000, max_tokens=1, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(256).index_add_(0, torch.tensor([ids[0] for ids, _ in draws]), torch.ones(4000)) / 4000
    with torch.no_grad():
        wanted = talker.model(torch.tensor([[65, 66]])).logits[0, -1].softmax(-1)
    assert (found - wanted).abs().sum() < 0.3


def options(**changes: Any) -> WorkloadOptions:
    return WorkloadOptions(model="tiny", shape=Shape(micro_batch=2, prompt_tokens=40, response_tokens=12), **changes)


def test_an_actor_that_knows_no_answer_is_rewarded_for_not_repeating_itself(
    talker: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "reward", lambda *_: 0.0)
    rollouts = sample_rollouts(talker, options(), groups_wanted=2)
    assert rollouts.source == "builtin"
    assert rollouts.criterion == "repetition"
    assert {one.group for one in rollouts.completions} == {0, 1}
    assert len(rollouts.completions) == 16
    assert any(one.advantage != 0 for one in rollouts.completions)
    assert all(len(one.prompt_ids) == 40 for one in rollouts.completions)


def test_groups_whose_rewards_differ_are_kept(talker: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    same = [[0.0] * 8, [0.5] * 8]
    asked = iter([*same, *same, *same, [1.0] + [0.0] * 7, [0.0] * 5 + [0.5] * 3])
    rewards = iter([value for group in asked for value in group])
    monkeypatch.setattr(sampling, "reward", lambda *_: next(rewards))
    rollouts = sample_rollouts(talker, options(), groups_wanted=2)
    assert rollouts.criterion == "reward"
    assert rollouts.mean_reward == pytest.approx((1 + 1.5) / 16)
    assert rollouts.completions[0].advantage == pytest.approx(2.474, abs=1e-3)


def test_an_actor_that_finds_everything_easy_gets_harder_questions(
    talker: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def always_right(_: object, answer: int) -> float:
        seen.append(answer)
        return 1.0

    monkeypatch.setattr(sampling, "reward", always_right)
    sample_rollouts(talker, options(), groups_wanted=4)
    assert seen[::8] == [problems()[first + place].answer for first in (0, 10, 20, 30) for place in range(4)]


def test_sampling_is_repeatable_and_leaves_random_state_and_mode_alone(talker: Actor) -> None:
    talker.model.train()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    shares = []
    first = sample_rollouts(talker, options(), groups_wanted=1, progress=shares.append)
    assert torch.equal(torch.rand(1), expected)
    assert talker.model.training
    assert first.digest == sample_rollouts(talker, options(), groups_wanted=1).digest
    assert first.digest != sample_rollouts(talker, options(seed=1), groups_wanted=1).digest
    assert 0 < shares[0] < 1
    assert shares[-1] == 1


def test_a_kl_term_gets_the_actor_as_its_reference(talker: Actor) -> None:
    rollouts = sample_rollouts(talker, options(loss=LossSpec(beta=0.1)), groups_wanted=1)
    assert all(len(one.ref_logps) == len(one.completion_ids) for one in rollouts.completions)


def test_an_actor_without_tokenizer_is_told_what_to_give(tiny_llama: TinyLlama) -> None:
    with pytest.raises(HiloreError, match="no tokenizer") as caught:
        sample_rollouts(tiny_llama(), options(), groups_wanted=1)
    assert "--rollouts" in caught.value.hint


def test_an_actor_that_always_says_the_same_is_refused(talker: Actor) -> None:
    with torch.no_grad():
        talker.model.lm_head.weight.zero_()
        talker.model.model.norm.weight.fill_(1.0)
        talker.model.lm_head.weight[10] = 0.0
    talker.model.lm_head.bias = torch.nn.Parameter(torch.full((256,), -100.0).index_fill(0, torch.tensor([10]), 100.0))
    with pytest.raises(HiloreError, match="same completion every time"):
        sample_rollouts(talker, options(), groups_wanted=1)


def test_the_real_actor_gives_groups_that_differ(smollm2: Actor) -> None:
    shape = Shape(micro_batch=2, prompt_tokens=64, response_tokens=24)
    rollouts = sample_rollouts(smollm2, WorkloadOptions(model="smollm2-135m", shape=shape), groups_wanted=1)
    assert rollouts.criterion == "reward"
    assert 0 < rollouts.mean_reward < 1
    text = smollm2.tokenizer.decode(list(rollouts.completions[0].prompt_ids))
    assert "step by step" in text
    assert len(micro_batches(rollouts, shape, pad_id=smollm2.pad_id, count=4, device="cpu")) == 4
