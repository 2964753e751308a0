"""Loss coefficients g = dL/d(log-prob) of each completion token, in closed form, and the exposure of a set of them.

The gradient of the loss reaches the model only through the log-probs of the completion tokens, so dL/d(log-prob) says
all that the actor's backward needs to know: the backward of sum(g * logps) with g held fixed gives the same gradients
as that of the loss. On-policy (no old log-probs) the ratio is 1 and g is known before the forward runs. An entropy
bonus and a router's auxiliary loss reach the model by other ways and are not in g.

    token ratio:     g = n * m * H * w * O * c                          + beta * n * m * (slope of the KL estimate)
    sequence ratio:  g_t = m_t / y * c * sum over t' of n * m * H * w * O  + the same

with normaliser n, completion mask m of y tokens, entropy mask H, sampler weights w, off-policy mask O, and the
loss's own slope c (`surrogates`). The tests hold it against autograd of TRL's trainer and of verl's definitions.
"""

import math
from dataclasses import dataclass, replace

import torch

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.options import LossSpec
from hilore_cli.measuring.surrogates import VERL_K3_STEEPEST, Ratios, kl_slope, policy_slope, steepest_slope

_VERL_TOKEN_MEAN_EPSILON = 1e-8
_RATIO_DETACHED = ("cispo", "vespo")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What the normalisers need to know beyond one micro-batch; what is None is taken from the micro-batch."""

    accumulation: int = 1
    """Micro-batches per optimizer step."""
    tokens_in_batch: float | None = None
    """Completion tokens over all micro-batches and processes: TRL's generation batch, verl's mini-batch."""
    sequences_in_batch: int | None = None
    """verl's `global_batch_size`."""
    max_completion: int | None = None
    """The longest completion allowed (dr_grpo), or verl's `loss_scale_factor`; the width R by default."""
    world_size: int = 1
    """Data-parallel processes."""
    steps_per_generation: int | None = None
    """TRL: micro-batches of one process in a generation batch, `accumulation` by default."""


def loss_coefficients(
    spec: LossSpec,
    *,
    logps: torch.Tensor | None,
    old_logps: torch.Tensor | None,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    is_weights: torch.Tensor | None = None,
    entropy_mask: torch.Tensor | None = None,
    off_policy_mask: torch.Tensor | None = None,
    facts: BatchFacts | None = None,
) -> torch.Tensor:
    """g, [B, R], 0 outside the mask. Detached from any graph.

    Args:
        spec: the loss and its options.
        logps: [B, R], of the actor now; needed with old log-probs or a KL term, and otherwise may be None.
        old_logps: [B, R], of the policy that the ratio is taken to; None is on-policy (ratio 1).
        ref_logps: [B, R], of the reference model; needed if `spec.beta` is above 0.
        advantages: [B], or [B, R] as in verl.
        mask: [B, R], 1 on completion tokens (tool outputs left out, if there are any).
        is_weights: [B, R] or [B, 1], importance weights of the sampler that wrote the completions.
        entropy_mask: [B, R], 1 where the policy term counts (TRL's `top_entropy_quantile`).
        off_policy_mask: [B, 1], 0 for sequences that are dropped (TRL's `off_policy_mask_threshold`).
        facts: of the update that the micro-batch belongs to.

    Raises:
        HiloreError: log-probs that the options need are missing, or an advantage is not finite.
    """
    facts = facts or BatchFacts()
    _check_finite(advantages)
    mask = mask.to(advantages.dtype)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratios = Ratios(
        log_ratio=_log_ratio(logps, old_logps, mask),
        mask=mask,
        lengths=lengths,
        advantages=advantages if advantages.dim() == 2 else advantages[:, None],
        is_weights=is_weights,
    )
    weights = mask * _policy_normaliser(spec, mask, facts)
    counted = weights
    for factor in (entropy_mask, off_policy_mask, None if spec.kind == "vespo" else is_weights):
        if factor is not None:
            # a weight may be anything on padding
            counted = (counted * factor).masked_fill(mask == 0, 0.0)
    policy = _spread(spec, counted, policy_slope(spec, ratios), mask)
    if spec.beta == 0.0:
        return policy
    return policy + spec.beta * mask * normaliser(spec, mask, facts) * _kl(spec, ratios, logps, ref_logps)


def exposure(g: torch.Tensor, mask: torch.Tensor) -> float:
    """X: the root of the sum of squared loss coefficients over completion tokens (DESIGN section 4)."""
    return float((g.double() * mask.to(g.device, torch.float64)).square().sum().sqrt().item())


def exposure_bound(
    spec: LossSpec,
    *,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    on_policy: bool,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    is_weights: torch.Tensor | None = None,
    facts: BatchFacts | None = None,
) -> float:
    """What the exposure is at most, from what is known before the forward (DESIGN section 4).

    On-policy the policy term is exact. Otherwise its ratio is taken where the loss is steepest; a negative advantage
    of a clipped loss that bounds no ratio from above counts as a positive one, so refine with `exposure` after the
    forward. The KL term is taken where a ratio inside the clip makes it largest. Without both `old_logps` and
    `ref_logps`, and for TRL's bias correction of a sequence ratio, it counts as `beta` a token: the supremum of k1,
    abs, and k3 where the reference finds a token less likely, and a guess for the others, which have none.

    Raises HiloreError if an advantage is not finite.
    """
    facts = facts or BatchFacts()
    _check_finite(advantages)
    policy = replace(spec, beta=0.0)
    if on_policy:
        g = loss_coefficients(
            policy,
            logps=None,
            old_logps=None,
            ref_logps=None,
            advantages=advantages,
            mask=mask,
            is_weights=is_weights,
            facts=facts,
        ).abs()
    else:
        g = _steepest(policy, advantages=advantages, mask=mask, is_weights=is_weights, facts=facts)
    if spec.beta > 0:
        unit = mask.to(advantages.dtype) * normaliser(spec, mask.to(advantages.dtype), facts)
        g = g + spec.beta * unit * _steepest_kl(spec, old_logps, ref_logps, mask)
    return exposure(g, mask)


def is_skippable(spec: LossSpec, exposure: float, *, entropy_bonus: float = 0.0, auxiliary_loss: float = 0.0) -> bool:
    """Whether a micro-batch's backward would change no gradient: exposure exactly 0, and nothing else in the loss.

    A report, not an action: in a distributed run a process that leaves out a backward leaves the others waiting.
    """
    return spec.beta == 0.0 and entropy_bonus == 0.0 and auxiliary_loss == 0.0 and exposure == 0.0


def normaliser(spec: LossSpec, mask: torch.Tensor, facts: BatchFacts) -> torch.Tensor:
    """n, [B, 1]: the weight of one token of each sequence; `mask` is [B, R]."""
    return _verl_normaliser(spec.aggregation, mask, facts) if spec.verl else _trl_normaliser(spec.kind, mask, facts)


def _policy_normaliser(spec: LossSpec, mask: torch.Tensor, facts: BatchFacts) -> torch.Tensor:
    """Verl averages the policy term of sapo over tokens, then sequences, whatever the aggregation of the rest."""
    if spec.kind == "verl_sapo":
        return _verl_normaliser("seq-mean-token-mean", mask, facts)
    return normaliser(spec, mask, facts)


def _trl_normaliser(kind: str, mask: torch.Tensor, facts: BatchFacts) -> torch.Tensor:
    sequences, width = mask.shape
    each = mask.new_ones((sequences, 1))
    if kind in ("grpo", "sapo"):
        return each / (sequences * mask.sum(dim=1, keepdim=True).clamp(min=1) * facts.accumulation)
    if kind == "bnpo":
        return each / (mask.sum().clamp(min=1) * facts.accumulation)
    if kind == "dr_grpo":
        return each / (sequences * (facts.max_completion or width) * facts.accumulation)
    if kind == "luspo":
        return each / (sequences * facts.accumulation)
    steps = facts.accumulation if facts.steps_per_generation is None else facts.steps_per_generation
    micro_batches = facts.world_size * steps
    if facts.tokens_in_batch is None:
        tokens = mask.sum().clamp(min=1) * micro_batches
    else:
        tokens = torch.as_tensor(facts.tokens_in_batch).to(mask).clamp(min=1)
    return each * micro_batches / (tokens * facts.accumulation)


def _verl_normaliser(aggregation: str, mask: torch.Tensor, facts: BatchFacts) -> torch.Tensor:
    """Verl's `agg_loss`. Counts that are not given are the micro-batch's, and then the accumulation divides."""
    lengths = mask.sum(dim=1, keepdim=True)
    each = mask.new_ones((len(mask), 1)) * facts.world_size
    if aggregation == "token-sum":
        return each
    if aggregation == "token-mean":
        if facts.tokens_in_batch is None:
            return each / (mask.sum().clamp(min=1) * facts.accumulation)
        return each / facts.tokens_in_batch
    if facts.sequences_in_batch is None:
        each = each / ((lengths > 0).sum().clamp(min=1) * facts.accumulation)
    else:
        each = each / facts.sequences_in_batch
    if aggregation == "seq-mean-token-mean":
        return each / (lengths + _VERL_TOKEN_MEAN_EPSILON)
    if aggregation == "seq-mean-token-sum-norm":
        return each / (facts.max_completion or mask.shape[1])
    return each


def _check_finite(advantages: torch.Tensor) -> None:
    if not torch.isfinite(advantages).all():
        raise HiloreError(
            "advantages", "hold a value that is not finite", "check the reward function: a NaN reward spoils its group"
        )


def _spread(spec: LossSpec, counted: torch.Tensor, slope: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Weighted slopes, [B, R]; a sequence's ratio sits in each of its terms and moves with each of its tokens."""
    if spec.level == "token" or spec.kind in _RATIO_DETACHED:
        return counted * slope
    return mask / mask.sum(dim=1, keepdim=True).clamp(min=1) * (counted * slope).sum(dim=1, keepdim=True)


def _log_ratio(logps: torch.Tensor | None, old_logps: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    if old_logps is None:
        return torch.zeros_like(mask)
    if logps is None:
        raise HiloreError("old_logps", "need logps beside them to give a ratio", "leave both out for on-policy data")
    return (logps.detach() - old_logps).masked_fill(mask == 0, 0.0)


def _kl(spec: LossSpec, ratios: Ratios, logps: torch.Tensor | None, ref_logps: torch.Tensor | None) -> torch.Tensor:
    if logps is None or ref_logps is None:
        lacking = "ref_logps" if ref_logps is None else "logps"
        raise HiloreError(
            f"--beta {spec.beta:g}",
            f"needs {lacking}: the KL term compares the actor with its reference",
            "give rollouts with ref_logps, or use --beta 0",
        )
    gap = (ref_logps - logps.detach()).masked_fill(ratios.mask == 0, 0.0)
    if not spec.kl_bias_correction:
        return kl_slope(spec, reference_gap=gap, ratio=None, mean_kl=None)
    if spec.level == "token":
        return kl_slope(spec, reference_gap=gap, ratio=ratios.log_ratio.exp(), mean_kl=None)
    mean_kl = ((torch.expm1(gap) - gap) * ratios.mask).sum(dim=1, keepdim=True) / ratios.lengths
    return kl_slope(spec, reference_gap=gap, ratio=ratios.log_sequence_ratio().exp(), mean_kl=mean_kl)


def _steepest(
    spec: LossSpec,
    *,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    is_weights: torch.Tensor | None,
    facts: BatchFacts,
) -> torch.Tensor:
    mask = mask.to(advantages.dtype)
    slope = steepest_slope(spec, advantages if advantages.dim() == 2 else advantages[:, None])
    counted = mask * _policy_normaliser(spec, mask, facts)
    if is_weights is not None and spec.kind != "vespo":
        counted = (counted * is_weights).masked_fill(mask == 0, 0.0)
    return _spread(spec, counted, slope, mask)


def _steepest_kl(
    spec: LossSpec, old_logps: torch.Tensor | None, ref_logps: torch.Tensor | None, mask: torch.Tensor
) -> torch.Tensor:
    """[B, R]: the largest slope of the KL estimate for a ratio inside the clip; 1 where log-probs are lacking."""
    if old_logps is None or ref_logps is None or (spec.kl_bias_correction and spec.level == "sequence"):
        return torch.ones_like(mask)
    gap = (ref_logps - old_logps).masked_fill(mask == 0, 0.0)
    low, high = math.log1p(-spec.eps_low), math.log1p(spec.eps_high)
    # slopes are monotone in the log-ratio but for two: one is steepest at gap - 1, verl's k3 just before its clamp
    places = [torch.full_like(gap, edge) for edge in (low, high)]
    places.append((gap - 1 if spec.kl_bias_correction else gap - VERL_K3_STEEPEST).clamp(low, high))
    slopes = [
        kl_slope(
            spec, reference_gap=gap - place, ratio=place.exp() if spec.kl_bias_correction else None, mean_kl=None
        ).abs()
        for place in places
    ]
    return torch.stack(slopes).amax(dim=0)
