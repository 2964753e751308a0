"""One forward and backward of the actor on one micro-batch, as ordinary trainers do it.

The logits of all completion places are materialised, log-probs are taken in float32, and the backward runs from
sum(g * logps) with the loss coefficients g held fixed: the same gradients as the loss itself (see `losses`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hilore_cli.measuring.losses import BatchFacts, exposure, exposure_bound, loss_coefficients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hilore_cli.measuring.completions import MicroBatch
    from hilore_cli.measuring.options import LossSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What a step leaves besides the gradients in the parameters."""

    loss: torch.Tensor
    """Scalar, detached: the surrogate sum(g * logps), whose gradient is the loss's."""
    logps: torch.Tensor
    """[B, R], float32, detached."""
    exposure: float


def completion_logps(model: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """[B, R] float32 log-probs of the completion tokens, with graph where gradients are enabled.

    Positions count real tokens only, so padding on the left changes nothing.
    """
    response = micro_batch.completion_mask.shape[1]
    mask = micro_batch.attention_mask
    logits = model(
        input_ids=micro_batch.input_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=response + 1,
    ).logits
    # Some models ignore logits_to_keep; the last place predicts a token after the completion.
    logits = logits[:, -(response + 1) : -1].float()
    targets = micro_batch.input_ids[:, -response:]
    chosen = logits.gather(dim=-1, index=targets[..., None])[..., 0]
    logps: torch.Tensor = chosen - logits.logsumexp(dim=-1)
    return logps


def actor_step(
    model: Any,
    micro_batch: MicroBatch,
    spec: LossSpec,
    *,
    facts: BatchFacts | None = None,
    audit: Callable[[float], Any] | None = None,
) -> StepResult:
    """Forward and backward of one micro-batch; gradients are added to the parameters'. The mode is the caller's.

    `facts` are of the update that the micro-batch belongs to; by default it is an update by itself. `audit` hears the
    exact exposure after the forward and before the backward. Raises HiloreError where the loss needs log-probs that
    the micro-batch lacks.
    """
    logps = completion_logps(model, micro_batch)
    mask = micro_batch.completion_mask
    g = loss_coefficients(
        spec,
        logps=logps.detach(),
        old_logps=micro_batch.old_logps,
        ref_logps=micro_batch.ref_logps,
        advantages=micro_batch.advantages,
        mask=mask,
        facts=facts,
    )
    found = exposure(g, mask)
    if audit is not None:
        audit(found)
    loss = (g * logps).sum()
    loss.backward()
    return StepResult(loss=loss.detach(), logps=logps.detach(), exposure=found)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside, random ops (dropout) draw from a fixed seed; outside, torch's random state is as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def facts_of(micro_batches: Sequence[MicroBatch]) -> BatchFacts:
    """What the normalisers need to know where these micro-batches are one update of one process."""
    return BatchFacts(
        accumulation=len(micro_batches),
        tokens_in_batch=float(sum(one.completion_tokens for one in micro_batches)),
        sequences_in_batch=sum(len(one.input_ids) for one in micro_batches),
    )


def exposure_before(micro_batch: MicroBatch, spec: LossSpec, facts: BatchFacts) -> float:
    """What is known of a micro-batch's exposure before its forward: exact on-policy and without a KL term."""
    return exposure_bound(
        spec,
        advantages=micro_batch.advantages,
        mask=micro_batch.completion_mask,
        on_policy=micro_batch.old_logps is None,
        old_logps=micro_batch.old_logps,
        ref_logps=micro_batch.ref_logps,
        facts=facts,
    )
