"""Completions with advantages, and the micro-batches made of them.

A micro-batch is always padded to the full shape, prompts on the left and completions on the right: that is the worst
case that a plan must hold in.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hilore_cli.errors import HiloreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hilore_cli.tables.profile_table import Shape

NOTHING_TO_MEASURE = (
    "has no completion with an advantage other than 0: there is nothing to measure",
    "give rollouts with groups whose rewards differ",
)
_STD_EPSILON = 1e-4
GROUP_SIZE = 8
SHUFFLE_WINDOW = 4 * GROUP_SIZE
"""Completions; sampling makes whole windows where it can, so that longer lists start with the shorter ones."""


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

    @property
    def useful(self) -> int:
        """Completions with an advantage, which is all that micro-batches are made of."""
        return sum(one.advantage != 0.0 for one in self.completions)

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


def rollouts_of(
    completions: Sequence[Completion], *, source: str, mean_reward: float, criterion: str = "reward"
) -> Rollouts:
    """Rollouts with the digest of their completions."""
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


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-4) within one group, std with ddof 1 as in TRL; zeros if all rewards are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(value - mean) / (deviation + _STD_EPSILON) for value in rewards]


def micro_batches(
    rollouts: Rollouts, shape: Shape, *, pad_id: int, count: int, device: torch.device | str, skip: int = 0
) -> list[MicroBatch]:
    """Micro-batches `skip` to `skip + count - 1` of these rollouts, each of the full shape.

    Completions are shuffled within windows of four groups, as trainers shuffle a generation batch, and dealt out in
    that order, those without advantage left out (they have no policy gradient): so a longer list of rollouts deals the
    same first micro-batches. When all are used up they are dealt again, rotated by one place each time, so that
    repeats pair other sequences. Raises HiloreError if no completion has an advantage.
    """
    size = shape.micro_batch
    shuffled = [rollouts.completions[place] for place in _shuffled_in_windows(len(rollouts.completions))]
    useful = [cut(one, shape) for one in shuffled if one.advantage != 0.0]
    if not useful:
        raise HiloreError(f"rollouts {rollouts.source}", *NOTHING_TO_MEASURE)
    deals = max(1, len(useful) // size)
    batches = []
    for number in range(skip, skip + count):
        rotation, place = divmod(number, deals)
        chosen = [useful[(rotation + place * size + row) % len(useful)] for row in range(size)]
        batches.append(_collate(chosen, shape, pad_id=pad_id, device=device))
    return batches


def _shuffled_in_windows(count: int) -> list[int]:
    draw = random.Random(0)  # noqa: S311 - a fixed order, not a secret
    order: list[int] = []
    for start in range(0, count, SHUFFLE_WINDOW):
        window = list(range(start, min(start + SHUFFLE_WINDOW, count)))
        draw.shuffle(window)
        order += window
    return order


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


def _collate(chosen: Sequence[Completion], shape: Shape, *, pad_id: int, device: torch.device | str) -> MicroBatch:
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


def _padded(rows: Sequence[tuple[float, ...] | None], shape: Shape, device: torch.device | str) -> torch.Tensor | None:
    padded = [list(row) + [0.0] * (shape.response_tokens - len(row)) for row in rows if row is not None]
    return torch.tensor(padded, device=device) if len(padded) == len(rows) else None
