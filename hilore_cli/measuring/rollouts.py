"""Rollouts from a file of the user's own run; the other sources are re-exported from here.

Trainers log completions in many ways, so the file is read leniently (either of two formats, ids or texts, rewards or
advantages) and checked strictly: every error names the row and the rule.
"""

from __future__ import annotations

import json
import math
from numbers import Number
from typing import TYPE_CHECKING, Any

import pandas as pd

from hilore_cli.errors import FileError
from hilore_cli.measuring.completions import (
    GROUP_SIZE,
    NOTHING_TO_MEASURE,
    SHUFFLE_WINDOW,
    Completion,
    MicroBatch,
    Rollouts,
    group_advantages,
    micro_batches,
    rollouts_of,
)
from hilore_cli.measuring.models import quiet_transformers
from hilore_cli.measuring.sampling import BUILTIN, RANDOM, random_rollouts, sample_rollouts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "BUILTIN",
    "GROUP_SIZE",
    "RANDOM",
    "SHUFFLE_WINDOW",
    "Completion",
    "MicroBatch",
    "Rollouts",
    "group_advantages",
    "micro_batches",
    "random_rollouts",
    "read_rollouts",
    "sample_rollouts",
]


def read_rollouts(path: Path, tokenizer: Any | None, *, vocab_size: int) -> Rollouts:
    """Completions of a user's run from .parquet or .jsonl, one row each; columns as CLI.md lists them.

    `advantage` wins over `reward`; rewards are normalised within their group. Texts are tokenised as they stand,
    without special tokens; lists of chat messages go through the chat template. Empty completions count for their
    group's mean and are then left out. Raises FileError naming the row (from 0) and the rule.
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
        raise FileError(str(path), *NOTHING_TO_MEASURE)
    mean_reward = _numbers(path, frame, "reward").mean() if "reward" in frame else 0.0
    return rollouts_of(completions, source=path.name, mean_reward=float(mean_reward))


def _read_frame(path: Path) -> pd.DataFrame:
    if path.suffix not in (".parquet", ".jsonl"):
        raise FileError(str(path), "is neither .parquet nor .jsonl", "convert it, one row a completion")
    if not path.is_file():
        rule = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise FileError(str(path), rule, "check the path given to --rollouts")
    try:
        parquet = path.suffix == ".parquet"
        frame = pd.read_parquet(path, engine="pyarrow") if parquet else pd.DataFrame(_json_rows(path))
    except FileError:
        raise
    except Exception as error:  # every reader has its own errors
        kind = path.suffix[1:]
        rule = f"cannot be read as {kind} ({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})"
        raise FileError(str(path), rule, "write it again, one row a completion") from error
    if frame.empty:
        raise FileError(str(path), "holds no rows", "give at least one group of completions")
    return frame.reset_index(drop=True)


def _json_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            rule = f"line {number} is not a JSON object"
            raise FileError(str(path), rule, "write one object a line, one line a completion")
        rows.append(row)
    return rows


def _check_columns(path: Path, frame: pd.DataFrame) -> None:
    found = ", ".join(str(name) for name in frame.columns)
    for choices in (("group",), ("prompt_ids", "prompt"), ("completion_ids", "completion"), ("advantage", "reward")):
        if not any(name in frame for name in choices):
            rule = f"has no column {' or '.join(choices)} (it has {found})"
            raise FileError(str(path), rule, "name its columns as `hilore profile --help` lists them")
    for row, group in enumerate(frame["group"]):
        if not isinstance(group, (str, Number)) or group != group:  # noqa: PLR0124 - nan is no group
            raise FileError(str(path), f"row {row} has no group", "give every completion its group")


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
    values = pd.Series([_number(value) for value in frame[name]], dtype="float64")
    broken = ~values.map(math.isfinite)
    if broken.any():
        row = broken.tolist().index(True)
        rule = f"row {row} has {name} {frame[name].iloc[row]!s}, which is not a finite number"
        raise FileError(str(path), rule, "drop the row, or mend the reward function")
    return values


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


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
        rule = f"row {present.tolist().index(False)} has no {name}, but other rows have"
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
