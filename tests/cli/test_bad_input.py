"""Bad input that only shows once the work has begun: still exit 2 and one clear line, whatever is wrong."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen3Config, ViTConfig, XLMConfig

from hilore_cli import solve
from hilore_cli.tables.profile_table import Profile
from tests.cli.conftest import Hilore, Outcome
from tests.cli.test_mistakes import assert_one_clear_line

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
SMALL = ("--micro-batch", "2", "--prompt-tokens", "8", "--response-tokens", "16", "--rounds", "1")


def assert_one_clear_error(outcome: Outcome, *words: str) -> None:
    """As in test_mistakes, but for progress and notes, which may come before."""
    lines = [line for line in outcome.err.splitlines() if line.startswith(("error:", "hint:"))]
    assert_one_clear_line(replace(outcome, err="\n".join(lines)), *words)
    assert outcome.err.endswith("\n".join(lines) + "\n")
    assert "Traceback" not in outcome.err


# a plan and a model that do not belong together


@pytest.fixture
def tiny_plan(folder: Path, tiny_profile: Profile) -> str:
    """A plan for the tiny Llama, its profile beside it."""
    digest, _ = tiny_profile.save(folder / "profiles" / "tiny-llama.parquet")
    plan = solve(replace(tiny_profile, digest=digest), cap_bytes=10**9, risk=0.0)
    plan.save(folder / "plans" / "tiny.parquet")
    return "plans/tiny.parquet"


def verify(hilore: Hilore, plan: str, *flags: str) -> Outcome:
    return hilore("verify", plan, "--rounds", "1", *flags)


def test_another_architecture_is_refused_naming_both(hilore: Hilore, tiny_plan: str, folder: Path) -> None:
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
    )
    config.save_pretrained(folder / "qwen")
    outcome = verify(hilore, tiny_plan, "--model", "qwen")
    assert_one_clear_error(outcome, "plan for tiny-llama", "LlamaForCausalLM", "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "bfloat16"], ["dtype differ", "float32", "bfloat16"]),
        (["--attn", "eager"], ["attention kernel differ", "sdpa", "eager"]),
        (["--response-tokens", "24"], ["2 x 32 tokens", "2 x 24", "--response-tokens"]),
        (["--micro-batch", "3"], ["3 x 24 tokens", "2 x 24", "--micro-batch"]),
        (["--rollouts", "none.jsonl"], ["--rollouts none.jsonl", "is not a file"]),
        (["--model", "gone"], ["gone"]),
    ],
)
def test_a_flag_that_does_not_fit_the_plan_is_refused(
    flags: list[str], words: list[str], hilore: Hilore, tiny_plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hilore_cli.measuring.models._PROBE_SECONDS", 0.01)
    assert_one_clear_error(verify(hilore, tiny_plan, *flags), *words)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 2}, {"intermediate_size": 192}, {"rms_norm_eps": 1e-4}, {"vocab_size": 300}]
)
def test_a_changed_configuration_is_refused(
    change: dict[str, Any], hilore: Hilore, tiny_plan: str, tiny_folder: Path, folder: Path
) -> None:
    config = LlamaConfig.from_pretrained(tiny_folder)
    for name, value in change.items():
        setattr(config, name, value)
    config.save_pretrained(folder / "changed")
    outcome = verify(hilore, tiny_plan, "--model", "changed")
    assert_one_clear_error(outcome, "plan for tiny-llama", "the plan has", "the model has")


def test_a_plan_whose_model_is_gone_says_so(
    hilore: Hilore, tiny_profile: Profile, folder: Path, tiny_plan: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gone = tmp_path_factory.mktemp("gone")
    workload = replace(tiny_profile.meta.workload, model=str(gone / "model"))
    moved = replace(tiny_profile, meta=replace(tiny_profile.meta, workload=workload))
    digest, _ = moved.save(folder / "profiles" / "moved.parquet")
    solve(replace(moved, digest=digest), cap_bytes=10**9, risk=0.0).save(folder / "plans" / "moved.parquet")
    assert_one_clear_error(verify(hilore, "plans/moved.parquet"), str(gone / "model"), "no such folder")


# models that cannot be profiled


def profile(hilore: Hilore, model: str, *flags: str) -> Outcome:
    outcome = hilore("profile", "--model", model, *SMALL, *flags)
    assert not list(Path().glob("profiles/*"))
    return outcome


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=2), "XLMWithLMHeadModel: has no decoder layers"),
        (ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "cannot be built as a causal LM"),
    ],
)
def test_a_model_without_decoder_layers_is_refused(config: Any, rule: str, hilore: Hilore, folder: Path) -> None:
    config.save_pretrained(folder / "other")
    assert_one_clear_error(profile(hilore, "other", "--weights", "random", "--attn", "eager"), rule)


def test_more_tokens_than_the_model_has_positions_is_refused(hilore: Hilore, folder: Path) -> None:
    GPT2Config(
        n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64, bos_token_id=1, eos_token_id=2
    ).save_pretrained(folder / "gpt2")
    assert_one_clear_error(profile(hilore, "gpt2", "--weights", "random"), "16", "24")


def rollouts_file(rewards: list[Any], *, token: int = 5) -> str:
    rows = [
        {"group": 0, "prompt_ids": [1, 2, 3], "completion_ids": [token, 6, number], "reward": reward}
        for number, reward in enumerate(rewards)
    ]
    Path("rollouts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return "rollouts.jsonl"


@pytest.mark.parametrize(
    ("rewards", "token", "words"),
    [
        ([1.0, float("nan"), 0.0, 0.0], 5, ["row 1", "reward nan", "not a finite number"]),
        ([1.0, float("inf"), 0.0, 0.0], 5, ["row 1", "reward inf"]),
        ([1.0, 1.0, 1.0, 1.0], 5, ["nothing to measure"]),
        ([1.0, 0.0, 0.0, 0.0], 999, ["row 0", "id 999", "255"]),
    ],
)
def test_rollouts_that_cannot_be_used_are_named(
    rewards: list[float], token: int, words: list[str], hilore: Hilore, tiny_folder: Path
) -> None:
    name = rollouts_file(rewards, token=token)
    assert_one_clear_error(profile(hilore, str(tiny_folder), "--rollouts", name), name, *words)


def test_weights_that_are_not_finite_are_named(hilore: Hilore, folder: Path, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, folder / "broken")
    weights = load_file(folder / "broken" / "model.safetensors")
    name = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    weights[name] = torch.full_like(weights[name], float("nan"))
    save_file(weights, folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    rollouts = rollouts_file([1.0, 0.0, 0.0, 0.0])
    assert_one_clear_error(profile(hilore, "broken", "--rollouts", rollouts), "not finite", "weights")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--codecs", "int8-g64,zip"], ["zip", "int8-g64"]),
        (["--device", "tpu"], ["--device tpu", "cpu"]),
        (["--out", "/proc/x/p.parquet"], ["/proc/x", "cannot be written", "--out"]),
        (["--out", "/proc/p.parquet"], ["/proc", "cannot be written", "--out"]),
        (["--seed", str(2**70)], ["--seed"]),
        (["--beta", "nan"], ["--beta"]),
    ],
)
def test_a_flag_that_cannot_be_meant_is_named(
    flags: list[str], words: list[str], hilore: Hilore, tiny_folder: Path
) -> None:
    assert_one_clear_error(profile(hilore, str(tiny_folder), "--weights", "random", *flags), *words)


def test_without_network_or_cache_the_three_ways_out_are_named(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hilore_cli", "profile", "--model", "Qwen/Qwen3-1.7B"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(folder / "cache"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = Outcome(code=done.returncode, out=done.stdout, err=done.stderr)
    assert_one_clear_error(outcome, "Qwen/Qwen3-1.7B", "local folder", "HF_HOME", "--weights random")
    assert not list(folder.glob("profiles/*"))


# solve


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "/proc/x/plan.parquet"], ["/proc/x", "cannot be written", "--out"]),
        (["--out", "plans"], ["plans"]),
        (["--out", "profiles/two-layers.parquet"], ["two-layers.parquet"]),
        (["--mem", "infGB"], ["--mem infGB"]),
        (["--mem", "1e3GB"], ["--mem 1e3GB"]),
    ],
)
def test_a_place_or_a_cap_that_solve_cannot_use_is_named(
    flags: list[str], words: list[str], hilore: Hilore, profile_file: Path, folder: Path
) -> None:
    (folder / "plans").mkdir(exist_ok=True)
    before = profile_file.read_bytes()
    mem = [] if "--mem" in flags else ["--mem", "1.2gc"]
    assert_one_clear_error(hilore("solve", *mem, *flags), *words)
    assert profile_file.read_bytes() == before


@pytest.mark.parametrize("name", ["gain", "recompute_us", "error"])
def test_a_profile_with_a_value_that_is_not_finite_is_not_solved(
    name: str, hilore: Hilore, tiny_profile: Profile, folder: Path
) -> None:
    rows = list(tiny_profile.rows)
    place = next(index for index, row in enumerate(rows) if row.codec != "none" and row.layer == 1)
    rows[place] = replace(rows[place], **{name: float("nan")})
    replace(tiny_profile, rows=tuple(rows)).save(folder / "profiles" / "nan.parquet")
    outcome = hilore("solve", "--mem", "1GB")
    assert_one_clear_error(outcome, "profiles/nan.parquet", name, "layer 1", "hilore profile")
    assert not list(folder.glob("plans/*.parquet"))


@pytest.mark.parametrize(
    ("section", "change"), [("timing", {"plain_us": float("nan")}), ("calibration", {"gamma": float("inf")})]
)
def test_metadata_that_is_not_finite_is_not_solved(
    section: str, change: dict[str, float], hilore: Hilore, tiny_profile: Profile, folder: Path
) -> None:
    meta = replace(tiny_profile.meta, **{section: replace(getattr(tiny_profile.meta, section), **change)})
    replace(tiny_profile, meta=meta).save(folder / "profiles" / "nan.parquet")
    assert_one_clear_error(hilore("solve", "--mem", "1GB"), "profiles/nan.parquet", section, "hilore profile")
