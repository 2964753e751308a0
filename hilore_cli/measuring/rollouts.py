"""Completions with advantages, and the micro-batches made of them.

Three sources: a file of the user's own run, groups that the actor samples on the built-in questions, or random ids
(which only `--weights random` uses, and which say nothing about compression errors). A micro-batch is always padded to
the full shape, prompts on the left and completions on the right: that is the worst case that a plan must hold in.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from hilore_cli.errors import FileError, HiloreError
from hilore_cli.measuring.models import quiet_transformers
from hilore_cli.measuring.prompts import Problem, problems, reward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hilore_cli.measuring.models import Actor
    from hilore_cli.measuring.options import WorkloadOptions
    from hilore_cli.tables.profile_table import Shape

GROUP_SIZE = 8
BUILTIN = "builtin"
RANDOM = "random"
_POOL_MICRO_BATCHES = 16
_GROUPS_AT_ONCE = 4
_TRIES_PER_GROUP = 4
_TOO_EASY = 0.9
_STD_EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled response and what its loss needs."""

    group: int
    """Completions of one prompt share it."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """With the end token, where the response has ended."""
    advantage: float
    old_logps: tuple[float, ...] | None = None
    """One a completion token, under the policy that sampled it; None is on-policy."""
    ref_logps: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """Completions from one source."""

    completions: tuple[Completion, ...]
    source: str
    """A file name, `builtin` (the actor sampled them) or `random`."""
    digest: str
    """SHA-256 over the completions."""
    mean_reward: float
    """0 where a file brings advantages without rewards."""
    criterion: str = "reward"
    """`repetition` if no answer set any group apart, so that non-repetition was rewarded instead."""

    def cut_count(self, shape: Shape) -> int:
        """Completions that do not fit the shape, so that prompt or response is cut."""
        return sum(
            len(one.prompt_ids) > shape.prompt_tokens or len(one.completion_ids) > shape.response_tokens
            for one in self.completions
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """B sequences padded to P prompt and R response tokens."""

    input_ids: torch.Tensor
    """[B, P+R]"""
    attention_mask: torch.Tensor
    """[B, P+R], int64: 1 on real tokens."""
    completion_mask: torch.Tensor
    """[B, R], float32: 1 on completion tokens."""
    advantages: torch.Tensor
    """[B], float32"""
    old_logps: torch.Tensor | None
    """[B, R], float32, 0 on padding; None is on-policy."""
    ref_logps: torch.Tensor | None

    @property
    def completion_tokens(self) -> int:
        """Unpadded completion tokens."""
        return int(self.completion_mask.sum().item())


def micro_batches(
    rollouts: Rollouts, shape: Shape, *, pad_id: int, count: int, device: torch.device | str, skip: int = 0
) -> list[MicroBatch]:
    """Micro-batches `skip` to `skip + count - 1` of these rollouts, each of the full shape.

    Completions without advantage are left out (they have no policy gradient). Of the others the longest, up to
    16 micro-batches' worth, form a pool in a fixed shuffled order, so that the first micro-batches and the held-out
    ones after them are alike. The pool is dealt out in turn; when it is used up it is dealt again, rotated by one place
    each time, so that repeats pair other sequences. Raises HiloreError if no completion has an advantage.
    """
    size = shape.micro_batch
    useful = [cut(one, shape) for one in rollouts.completions if one.advantage != 0.0]
    if not useful:
        raise HiloreError(f"rollouts {rollouts.source}", *_NOTHING_TO_MEASURE)
    longest = sorted(range(len(useful)), key=lambda place: (-len(useful[place].completion_ids), place))
    pool = sorted(longest[: size * _POOL_MICRO_BATCHES])
    random.Random(0).shuffle(pool)  # noqa: S311 - a fixed order, not a secret
    deals = max(1, len(pool) // size)
    batches = []
    for number in range(skip, skip + count):
        rotation, place = divmod(number, deals)
        chosen = [useful[pool[(rotation + place * size + row) % len(pool)]] for row in range(size)]
        batches.append(_collate(chosen, shape, pad_id=pad_id, device=device))
    return batches


def cut(completion: Completion, shape: Shape) -> Completion:
    """The prompt's last P tokens and the response's first R."""
    response = shape.response_tokens
    return Completion(
        group=completion.group,
        prompt_ids=completion.prompt_ids[-shape.prompt_tokens :],
        completion_ids=completion.completion_ids[:response],
        advantage=completion.advantage,
        old_logps=None if completion.old_logps is None else completion.old_logps[:response],
        ref_logps=None if completion.ref_logps is None else completion.ref_logps[:response],
    )


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) within one group, std with ddof 1 as in TRL; zeros if all rewards are equal."""
    series = pd.Series(rewards, dtype="float64")
    if series.nunique() < 2:
        return [0.0] * len(series)
    return [float(value) for value in (series - series.mean()) / (series.std(ddof=1) + _STD_EPSILON)]


def random_rollouts(vocab_size: int, options: WorkloadOptions, *, groups: int = 4) -> Rollouts:
    """Full-length completions of random ids with random advantages: for shapes and times, never for errors."""
    draw = random.Random(options.seed)  # noqa: S311 - test data, not secrets
    shape = options.shape
    with_kl = options.loss.beta > 0
    completions = []
    for group in range(groups):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(shape.prompt_tokens))
        for advantage in group_advantages([draw.random() for _ in range(GROUP_SIZE)]):
            ids = tuple(draw.randrange(vocab_size) for _ in range(shape.response_tokens))
            reference = tuple(draw.gauss(-math.log(vocab_size), 0.1) for _ in ids) if with_kl else None
            completions.append(
                Completion(
                    group=group, prompt_ids=prompt, completion_ids=ids, advantage=advantage, ref_logps=reference
                )
            )
    return _rollouts(completions, source=RANDOM, mean_reward=0.0)


# --- sampled by the actor ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    problem: Problem
    prompt_ids: tuple[int, ...]
    completion_ids: list[tuple[int, ...]]
    logps: list[tuple[float, ...]]
    rewards: list[float]

    @property
    def differs(self) -> bool:
        return len(set(self.rewards)) > 1


def sample_rollouts(
    actor: Actor, options: WorkloadOptions, *, groups_wanted: int, progress: Callable[[float], None] | None = None
) -> Rollouts:
    """Groups of 8 that the actor samples at temperature 1 on the built-in questions, with differing rewards.

    Starts with the easiest questions and jumps a level when nearly all answers are right. At most four times
    `groups_wanted` questions are tried; fewer groups may come back. If no answer sets any group apart, the share of
    distinct tokens in a completion is the reward instead (`criterion` says so). With a KL term the reference is the
    actor itself, as in the first step of a run. The random state of torch is neither used nor changed. `progress`
    hears the share done. Raises HiloreError without a tokenizer.
    """
    if actor.tokenizer is None:
        raise HiloreError(
            f"--model {options.model}",
            "has no tokenizer, so it cannot answer the built-in questions",
            "give --rollouts FILE with prompt_ids and completion_ids, or use --weights random",
        )
    generator = torch.Generator(device="cpu").manual_seed(options.seed)
    tell = progress or (lambda _: None)
    waiting = list(problems())
    groups: list[_Group] = []
    kept: list[_Group] = []
    was_training = actor.model.training
    actor.model.eval()
    try:
        while waiting and len(kept) < groups_wanted and len(groups) < _TRIES_PER_GROUP * groups_wanted:
            batch = waiting[: min(groups_wanted - len(kept), _GROUPS_AT_ONCE)]
            waiting = waiting[len(batch) :]
            done, share = len(kept) / groups_wanted, len(batch) / groups_wanted
            new = _sample_groups(
                actor, options.shape, batch, generator, lambda part, done=done, share=share: tell(done + share * part)
            )
            groups += new
            kept += [group for group in new if group.differs]
            if sum(sum(group.rewards) for group in new) > _TOO_EASY * GROUP_SIZE * len(new):
                waiting = [problem for problem in waiting if problem.level > batch[-1].level]
    finally:
        actor.model.train(was_training)
    tell(1.0)
    criterion = "reward"
    if not kept:
        criterion, kept = "repetition", groups[:groups_wanted]
        for group in kept:
            group.rewards = [len(set(ids)) / len(ids) for ids in group.completion_ids]
    if not any(group.differs for group in kept):
        rule = "gives the same completion every time: there is no advantage to learn from"
        raise HiloreError(f"--model {options.model}", rule, "give --rollouts FILE with completions of your own run")
    completions = [
        Completion(group=number, prompt_ids=group.prompt_ids, completion_ids=ids, advantage=advantage, ref_logps=logps)
        for number, group in enumerate(kept)
        for ids, logps, advantage in zip(
            group.completion_ids,
            group.logps if options.loss.beta > 0 else [None] * len(group.logps),
            group_advantages(group.rewards),
            strict=True,
        )
    ]
    rewards = [value for group in kept for value in group.rewards]
    return _rollouts(completions, source=BUILTIN, mean_reward=sum(rewards) / len(rewards), criterion=criterion)


def _sample_groups(
    actor: Actor,
    shape: Shape,
    batch: Sequence[Problem],
    generator: torch.Generator,
    tell: Callable[[float], None],
) -> list[_Group]:
    prompts = [_prompt_ids(actor, problem)[-shape.prompt_tokens :] for problem in batch]
    rows = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    sampled = sample_completions(actor, rows, max_tokens=shape.response_tokens, generator=generator, tell=tell)
    groups = []
    for number, (problem, prompt) in enumerate(zip(batch, prompts, strict=True)):
        part = sampled[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]
        texts = [_decoded(actor, ids) for ids, _ in part]
        groups.append(
            _Group(
                problem=problem,
                prompt_ids=prompt,
                completion_ids=[ids for ids, _ in part],
                logps=[logps for _, logps in part],
                rewards=[reward(text, problem.answer) for text in texts],
            )
        )
    return groups


def _prompt_ids(actor: Actor, problem: Problem) -> tuple[int, ...]:
    tokenizer: Any = actor.tokenizer
    with quiet_transformers():
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": problem.text}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(tokenizer(f"Question: {problem.text}\nAnswer:")["input_ids"])


def _decoded(actor: Actor, ids: tuple[int, ...]) -> str:
    tokenizer: Any = actor.tokenizer
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def sample_completions(
    actor: Actor,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    generator: torch.Generator,
    tell: Callable[[float], None] = lambda _: None,
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """One completion (ids, log-probs) a prompt, at temperature 1, batched, with the KV cache.

    Rows that have ended leave the batch, so late steps are cheap. Every row has its own draw in every step, so what one
    row samples does not depend on when another ends. No gradient, but no inference mode either: what a model caches
    while sampling must stay usable in training.
    """
    model = actor.model
    device = model.get_input_embeddings().weight.device
    ends = _end_ids(actor)
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[actor.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alive = list(range(len(prompts)))
    tokens: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    cache = None
    with torch.no_grad():
        for step in range(max_tokens):
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            table = output.logits[:, -1].float().log_softmax(-1)
            draws = torch.rand(len(prompts), 1, generator=generator, dtype=torch.float64)[alive].to(device)
            chosen = _inverse_cdf(table, draws)
            for row, token, logp in zip(alive, chosen[:, 0].tolist(), table.gather(1, chosen)[:, 0].tolist(), strict=True):
                tokens[row].append(token)
                logps[row].append(logp)
            places = [place for place, row in enumerate(alive) if tokens[row][-1] not in ends]
            tell((step + 1) / max_tokens)
            if not places:
                break
            ids, positions = chosen, positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            if len(places) < len(alive):
                index = torch.tensor(places, device=device)
                cache.batch_select_indices(index)
                ids, positions, mask = ids[index], positions[index], mask[index]
                alive = [alive[place] for place in places]
    return [(tuple(row), tuple(values)) for row, values in zip(tokens, logps, strict=True)]


def _inverse_cdf(table: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[rows, 1] ids drawn from log-probs [rows, vocab] by uniform draws [rows, 1]."""
    cumulative = table.exp().cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).clamp(max=table.shape[1] - 1)


def _end_ids(actor: Actor) -> set[int]:
    found: set[int] = set()
    generation = getattr(actor.model, "generation_config", None)
    for source in (actor.tokenizer, generation, actor.model.config):
        value = getattr(source, "eos_token_id", None)
        found |= {value} if isinstance(value, int) else set(value or ())
    return found


# --- read from a file ----------------------------------------------------------------------------------------------

_NOTHING_TO_MEASURE = (
    "has no completion with an advantage other than 0: there is nothing to measure",
    "give rollouts with groups whose rewards differ",
)


def read_rollouts(path: Path, tokenizer: Any | None, *, vocab_size: int) -> Rollouts:
    """Completions of a user's run from .parquet or .jsonl, one row each; columns as CLI.md lists them.

    `advantage` wins over `reward`; rewards are normalised within their group. Texts are tokenised as they stand,
    without special tokens; lists of chat messages go through the chat template. Empty completions count for their group's
    mean and are then left out. Raises FileError naming the row (from 0) and the rule.
    """
    frame = _read_frame(path)
    _check_columns(path, frame)
    prompts = _token_column(path, frame, "prompt", tokenizer, vocab_size)
    responses = _token_column(path, frame, "completion", tokenizer, vocab_size)
    advantages = _advantages(path, frame)
    lengths = [len(ids) for ids in responses]
    old = _logps_column(path, frame, "old_logps", lengths)
    reference = _logps_column(path, frame, "ref_logps", lengths)
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise FileError(str(path), f"row {row} has an empty prompt", "give at least one prompt token")
    groups = pd.factorize(frame["group"])[0]
    completions = [
        Completion(
            group=int(groups[row]),
            prompt_ids=prompts[row],
            completion_ids=responses[row],
            advantage=advantages[row],
            old_logps=old[row],
            ref_logps=reference[row],
        )
        for row in range(len(frame))
        if responses[row]
    ]
    if all(one.advantage == 0.0 for one in completions):
        raise FileError(str(path), *_NOTHING_TO_MEASURE)
    mean_reward = _numbers(path, frame, "reward").mean() if "reward" in frame else 0.0
    return _rollouts(completions, source=path.name, mean_reward=float(mean_reward))


def _read_frame(path: Path) -> pd.DataFrame:
    if path.suffix not in (".parquet", ".jsonl"):
        raise FileError(str(path), "is neither .parquet nor .jsonl", "convert it, one row a completion")
    if not path.is_file():
        rule = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise FileError(str(path), rule, "check the path given to --rollouts")
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path, engine="pyarrow")
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            frame = pd.DataFrame([json.loads(line) for line in lines if line.strip()])
    except Exception as error:  # every reader has its own errors
        kind = path.suffix[1:]
        rule = f"cannot be read as {kind} ({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})"
        raise FileError(str(path), rule, "write it again, one row a completion") from error
    if frame.empty:
        raise FileError(str(path), "holds no rows", "give at least one group of completions")
    return frame.reset_index(drop=True)


def _check_columns(path: Path, frame: pd.DataFrame) -> None:
    found = ", ".join(str(name) for name in frame.columns)
    for choices in (("group",), ("prompt_ids", "prompt"), ("completion_ids", "completion"), ("advantage", "reward")):
        if not any(name in frame for name in choices):
            rule = f"has no column {' or '.join(choices)} (it has {found})"
            raise FileError(str(path), rule, "name its columns as `hilore profile --help` lists them")
    missing = frame["group"].isna()
    if missing.any():
        raise FileError(str(path), f"row {int(missing.idxmax())} has no group", "give every completion its group")


def _token_column(
    path: Path, frame: pd.DataFrame, name: str, tokenizer: Any | None, vocab_size: int
) -> list[tuple[int, ...]]:
    column = f"{name}_ids"
    if column in frame:
        rows = [_ids(path, column, row, value) for row, value in enumerate(frame[column])]
    elif tokenizer is None:
        rule = f"has texts (column {name}), but the actor has no tokenizer"
        raise FileError(str(path), rule, f"give {column}, or a model folder with its tokenizer")
    else:
        with quiet_transformers():
            rows = [_tokenised(path, name, row, value, tokenizer) for row, value in enumerate(frame[name])]
    for row, ids in enumerate(rows):
        for token in ids:
            if not 0 <= token < vocab_size:
                rule = f"row {row} of {column} holds id {token}, but the model's vocabulary ends at {vocab_size - 1}"
                raise FileError(str(path), rule, "use rollouts of this model, or its own tokenizer")
    return rows


def _ids(path: Path, column: str, row: int, value: Any) -> tuple[int, ...]:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in values):
        rule = f"row {row} of {column} is not a list of whole numbers"
        raise FileError(str(path), rule, "write token ids as lists of integers")
    return tuple(values)


def _tokenised(path: Path, column: str, row: int, value: Any, tokenizer: Any) -> tuple[int, ...]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        if column == "completion":
            value = "".join(str(one["content"]) for one in value)
        elif getattr(tokenizer, "chat_template", None):
            value = tokenizer.apply_chat_template(value, add_generation_prompt=True, tokenize=False)
    if not isinstance(value, str):
        raise FileError(str(path), f"row {row} of {column} is not a text", f"write texts, or give {column}_ids")
    return tuple(tokenizer(value, add_special_tokens=False)["input_ids"])


def _numbers(path: Path, frame: pd.DataFrame, name: str) -> pd.Series[float]:
    values = pd.to_numeric(frame[name], errors="coerce").astype("float64")
    broken = ~values.map(math.isfinite)
    if broken.any():
        row = int(broken.idxmax())
        rule = f"row {row} has {name} {frame[name].iloc[row]!s}, which is not a finite number"
        raise FileError(str(path), rule, "drop the row, or mend the reward function")
    return values


def _advantages(path: Path, frame: pd.DataFrame) -> list[float]:
    if "advantage" in frame:
        return [float(value) for value in _numbers(path, frame, "advantage")]
    rewards = _numbers(path, frame, "reward")
    normalised = rewards.groupby(frame["group"], sort=False).transform(
        lambda group: pd.Series(group_advantages(group.tolist()), index=group.index)
    )
    return [float(value) for value in normalised]


def _logps_column(
    path: Path, frame: pd.DataFrame, name: str, lengths: Sequence[int]
) -> Sequence[tuple[float, ...] | None]:
    if name not in frame or not (present := frame[name].notna()).any():
        return [None] * len(frame)
    if not present.all():
        rule = f"row {int((~present).idxmax())} has no {name}, but other rows have"
        raise FileError(str(path), rule, f"give {name} for every row, or drop the column")
    rows = []
    for row, (value, length) in enumerate(zip(frame[name], lengths, strict=True)):
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list) or any(not isinstance(one, (int, float)) for one in values):
            raise FileError(str(path), f"row {row} of {name} is not a list of numbers", "write one a completion token")
        if len(values) != length:
            rule = f"row {row} of {name} has {len(values)} numbers for {length} completion tokens"
            raise FileError(str(path), rule, "give completion_ids beside them, one log-probability a token")
        if not all(math.isfinite(one) for one in values):
            rule = f"row {row} of {name} holds a number that is not finite"
            raise FileError(str(path), rule, "drop the row, or score it again")
        rows.append(tuple(float(one) for one in values))
    return rows


# --- shared --------------------------------------------------------------------------------------------------------


def _rollouts(
    completions: Sequence[Completion], *, source: str, mean_reward: float, criterion: str = "reward"
) -> Rollouts:
    digest = hashlib.sha256()
    for one in completions:
        entry = [one.group, one.prompt_ids, one.completion_ids, one.advantage, one.old_logps, one.ref_logps]
        digest.update(json.dumps(entry).encode() + b"\n")
    return Rollouts(
        completions=tuple(completions),
        source=source,
        digest=digest.hexdigest(),
        mean_reward=mean_reward,
        criterion=criterion,
    )


def _collate(
    chosen: Sequence[Completion], shape: Shape, *, pad_id: int, device: torch.device | str
) -> MicroBatch:
    ids, mask, completion_mask = [], [], []
    for one in chosen:
        left, right = shape.prompt_tokens - len(one.prompt_ids), shape.response_tokens - len(one.completion_ids)
        real = len(one.prompt_ids) + len(one.completion_ids)
        ids.append([pad_id] * left + list(one.prompt_ids) + list(one.completion_ids) + [pad_id] * right)
        mask.append([0] * left + [1] * real + [0] * right)
        completion_mask.append([1.0] * len(one.completion_ids) + [0.0] * right)
    return MicroBatch(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        completion_mask=torch.tensor(completion_mask, device=device),
        advantages=torch.tensor([one.advantage for one in chosen], device=device),
        old_logps=_padded([one.old_logps for one in chosen], shape, device),
        ref_logps=_padded([one.ref_logps for one in chosen], shape, device),
    )


def _padded(
    rows: Sequence[tuple[float, ...] | None], shape: Shape, device: torch.device | str
) -> torch.Tensor | None:
    padded = [list(row) + [0.0] * (shape.response_tokens - len(row)) for row in rows if row is not None]
    return torch.tensor(padded, device=device) if len(padded) == len(rows) else None
