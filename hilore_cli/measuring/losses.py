"""Loss coefficients g = dL/d(log-prob) of each completion token, in closed form, and the exposure of a set of them.

The gradient of the loss reaches the model only through the log-probs of the completion tokens, so dL/d(log-prob) says
all that the actor's backward needs to know: the backward of sum(g * logps) with g held fixed gives the same gradients
as that of the loss. On-policy (no old log-probs) the ratio is 1 and g is known before the forward runs.

The forms are those of TRL's GRPO losses `grpo`, `bnpo`, `dr_grpo` and `dapo`, with importance ratios of tokens or of
whole sequences (GSPO), two-sided clipping, an upper bound `delta` on the ratio, and a k3 KL term. The tests hold them
against autograd of the losses written out from their definitions.
"""

import torch

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.options import LossSpec


def loss_coefficients(
    spec: LossSpec,
    *,
    logps: torch.Tensor | None,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    tokens_in_batch: float | None = None,
    accumulation: int = 1,
    max_completion: int | None = None,
    world_size: int = 1,
    steps_per_generation: int | None = None,
) -> torch.Tensor:
    """g, [B, R], 0 outside the mask. Detached from any graph.

    Args:
        spec: the loss and its options.
        logps: [B, R], of the actor now; needed with old log-probs or a KL term, and otherwise may be None.
        old_logps: [B, R], of the policy that sampled; None is on-policy (ratio 1).
        ref_logps: [B, R], of the reference model; needed if `spec.beta` is above 0.
        advantages: [B].
        mask: [B, R], 1 on completion tokens.
        tokens_in_batch: completion tokens of the whole generation batch, over all its micro-batches and processes;
            dapo only. By default every micro-batch is taken to have as many as this one.
        accumulation: micro-batches per optimizer step.
        max_completion: the longest completion allowed, R by default; dr_grpo only.
        world_size: processes; dapo only.
        steps_per_generation: micro-batches of one process in a generation batch, `accumulation` by default; dapo only.

    Raises:
        HiloreError: log-probs that the options need are missing.
    """
    mask = mask.to(advantages.dtype)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    normaliser = _normaliser(
        spec,
        mask,
        lengths,
        tokens_in_batch=tokens_in_batch,
        accumulation=accumulation,
        max_completion=max_completion,
        world_size=world_size,
        steps_per_generation=steps_per_generation,
    )
    log_ratio = _log_ratio(logps, old_logps, mask)
    weights = normaliser * mask
    if spec.level == "sequence":
        ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp()
        # The ratio of the sequence sits in each of its terms and moves with each of its tokens.
        policy = mask / lengths * _clipped(spec, ratio, advantages) * weights.sum(dim=1, keepdim=True)
    else:
        policy = weights * _clipped(spec, log_ratio.exp(), advantages)
    if spec.beta == 0.0:
        return policy
    if logps is None or ref_logps is None:
        lacking = "ref_logps" if ref_logps is None else "logps"
        raise HiloreError(
            f"--beta {spec.beta:g}",
            f"needs {lacking}: the KL term compares the actor with its reference",
            "give rollouts with ref_logps, or use --beta 0",
        )
    divergence = (ref_logps - logps.detach()).masked_fill(mask == 0, 0.0)
    return policy + spec.beta * weights * -torch.expm1(divergence)


def exposure(g: torch.Tensor, mask: torch.Tensor) -> float:
    """X: the root of the sum of squared loss coefficients over completion tokens (DESIGN section 4)."""
    return float((g.double() * mask.to(g.device, torch.float64)).square().sum().sqrt().item())


def exposure_bound(
    spec: LossSpec,
    *,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    on_policy: bool,
    tokens_in_batch: float | None = None,
    accumulation: int = 1,
    max_completion: int | None = None,
    world_size: int = 1,
    steps_per_generation: int | None = None,
) -> float:
    """What the exposure is at most, from what is known before the forward.

    On-policy the policy term is exact. Otherwise its ratio is taken as 1 + eps_high, or `delta` where that is larger;
    a negative advantage without `delta` has no upper bound on its ratio, so refine with `exposure` after the
    forward. The KL term counts as its supremum for tokens that the reference finds less likely, `beta` a token.
    """
    g = loss_coefficients(
        LossSpec(kind=spec.kind, level=spec.level),
        logps=None,
        old_logps=None,
        ref_logps=None,
        advantages=advantages.abs(),
        mask=mask,
        tokens_in_batch=tokens_in_batch,
        accumulation=accumulation,
        max_completion=max_completion,
        world_size=world_size,
        steps_per_generation=steps_per_generation,
    ).abs()
    if not on_policy:
        g = g * max(1 + spec.eps_high, spec.delta or 0.0)
    if spec.beta > 0:
        unit = loss_coefficients(
            LossSpec(kind=spec.kind),
            logps=None,
            old_logps=None,
            ref_logps=None,
            advantages=torch.ones_like(advantages),
            mask=mask,
            tokens_in_batch=tokens_in_batch,
            accumulation=accumulation,
            max_completion=max_completion,
            world_size=world_size,
            steps_per_generation=steps_per_generation,
        ).abs()
        g = g + spec.beta * unit
    return exposure(g, mask)


def _normaliser(
    spec: LossSpec,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    tokens_in_batch: float | None,
    accumulation: int,
    max_completion: int | None,
    world_size: int,
    steps_per_generation: int | None,
) -> torch.Tensor:
    """n, [B, 1]: the weight of one token of each sequence."""
    sequences, width = mask.shape
    if spec.kind == "grpo":
        return 1.0 / (sequences * lengths * accumulation)
    if spec.kind == "bnpo":
        return (1.0 / (mask.sum().clamp(min=1) * accumulation)).expand(sequences, 1)
    if spec.kind == "dr_grpo":
        return torch.full_like(lengths, 1.0 / (sequences * (max_completion or width) * accumulation))
    micro_batches = world_size * (accumulation if steps_per_generation is None else steps_per_generation)
    if tokens_in_batch is None:
        tokens = mask.sum().clamp(min=1) * micro_batches
    else:
        tokens = torch.as_tensor(tokens_in_batch).to(mask)
    return (micro_batches / (tokens * accumulation)).expand(sequences, 1)


def _log_ratio(logps: torch.Tensor | None, old_logps: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    if old_logps is None:
        return torch.zeros_like(mask)
    if logps is None:
        raise HiloreError("old_logps", "need logps beside them to give a ratio", "leave both out for on-policy data")
    return (logps.detach() - old_logps).masked_fill(mask == 0, 0.0)


def _clipped(spec: LossSpec, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-A * r where the clipped surrogate still has a slope, else 0; [B, R] or, for sequence ratios, [B, 1]."""
    advantage = advantages[:, None]
    upper, ceiling = 1 + spec.eps_high, torch.inf
    if spec.delta is not None:
        # The loss takes the worse of min(r, delta) * A and clip(r) * A: the smaller ceiling for A > 0, else the larger.
        upper, ceiling = min(upper, spec.delta), max(upper, spec.delta)
    inside = torch.where(advantage >= 0, ratio <= upper, (ratio >= 1 - spec.eps_low) & (ratio <= ceiling))
    return torch.where(inside, -advantage * ratio, torch.zeros_like(ratio))
