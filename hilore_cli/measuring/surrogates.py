"""The slope of each loss at one completion token: d(token loss)/d(log-prob), before normaliser and weights.

TRL's losses and verl's, one function each, in the notation of their trainers: l, o are current and old log-probs, A the
advantage, r = exp(l - o), s the ratio of a whole sequence. TRL's clipped losses differ from verl's in detail (an upper
bound `delta` on the ratio against a dual clip, clamped log-ratios), and each is followed to the letter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hilore_cli.measuring.options import LossSpec

_VERL_LOG_RATIO = 20.0
_VERL_LOG_SEQUENCE_RATIO = 10.0
_LARGEST_EXPONENT = 700.0
_VERL_K3 = 10.0
VERL_K3_STEEPEST = 2.6107
"""The gap to the reference just before verl's k3 reaches its clamp: exp(gap) - gap - 1 = 10."""
_VESPO_LOG_LOW, _VESPO_LOG_HIGH = math.log(1e-8), 20.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ratios:
    """What a slope is made of; log-ratios are 0 on padding."""

    log_ratio: torch.Tensor
    """[B, R]: l - o."""
    mask: torch.Tensor
    """[B, R]"""
    lengths: torch.Tensor
    """[B, 1], at least 1."""
    advantages: torch.Tensor
    """[B, 1] or [B, R]"""
    is_weights: torch.Tensor | None
    """[B, R] or [B, 1]"""

    def log_sequence_ratio(self) -> torch.Tensor:
        """[B, 1]: the mean log-ratio of a sequence (GSPO)."""
        return (self.log_ratio * self.mask).sum(dim=1, keepdim=True) / self.lengths


def policy_slope(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    """C of `loss_coefficients`, [B, R], or [B, 1] where it is one for a whole sequence."""
    return _SLOPES[spec.kind](spec, ratios)


def steepest_slope(spec: LossSpec, advantages: torch.Tensor) -> torch.Tensor:
    """At most |c|, whatever the ratio turns out to be, in the form of `advantages`.

    A negative advantage of a clipped loss without `delta` or dual clip has no upper bound on its ratio: there the
    ratio is taken to stay under 1 + eps_high, as the clip does for positive ones.
    """
    up, down = _STEEPEST[spec.kind](spec)
    return advantages.abs() * torch.where(advantages > 0, up, down)


def kl_slope(
    spec: LossSpec, *, reference_gap: torch.Tensor, ratio: torch.Tensor | None, mean_kl: torch.Tensor | None
) -> torch.Tensor:
    """[B, R]: d(KL estimate)/d(log-prob), before beta and normaliser.

    Args:
        spec: names the estimator.
        reference_gap: [B, R], q - l: reference minus current log-prob.
        ratio: [B, R] or [B, 1], where the estimate is multiplied by it (TRL's bias correction), else None.
        mean_kl: [B, 1], the masked mean of the estimates, where that ratio is of sequences, else None.
    """
    if ratio is not None:
        return -ratio * reference_gap if mean_kl is None else ratio * (mean_kl - torch.expm1(reference_gap))
    if spec.kl == "k3":
        return _k3_slope(spec, reference_gap)
    if spec.kl in ("k1", "abs"):
        return torch.ones_like(reference_gap) if spec.kl == "k1" else -reference_gap.sign()
    return -reference_gap  # k2, and the straight-through estimators k1+, k3+ and abs+


def _k3_slope(spec: LossSpec, reference_gap: torch.Tensor) -> torch.Tensor:
    slope = -torch.expm1(reference_gap)
    if not spec.verl:
        return slope
    estimate = torch.expm1(reference_gap) - reference_gap
    return slope.masked_fill((reference_gap.abs() > _VERL_LOG_RATIO) | (estimate > _VERL_K3), 0.0)


def _clipped(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_ratio = ratios.log_sequence_ratio() if spec.level == "sequence" else ratios.log_ratio
    ratio, advantages = log_ratio.exp(), ratios.advantages
    upper, ceiling = 1 + spec.eps_high, torch.inf
    if spec.delta is not None:
        # The loss takes the worse of min(r, delta) * A and clip(r) * A: the smaller ceiling for A > 0, else the larger.
        upper, ceiling = min(upper, spec.delta), max(upper, spec.delta)
    return _inside(ratio, advantages, low=1 - spec.eps_low, high=upper, ceiling=ceiling)


def _sapo(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_ratio = ratios.log_sequence_ratio() if spec.level == "sequence" else ratios.log_ratio
    if spec.verl:
        log_ratio = log_ratio.clamp(-_VERL_LOG_RATIO, _VERL_LOG_RATIO)
    ratio = log_ratio.exp()
    temperature = torch.where(ratios.advantages > 0, spec.tau_pos, spec.tau_neg).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1))
    slope = -ratios.advantages * 4 * gate * (1 - gate) * ratio
    return slope.masked_fill(ratios.log_ratio.abs() > _VERL_LOG_RATIO, 0.0) if spec.verl else slope


def _cispo(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_ratio = ratios.log_sequence_ratio() if spec.level == "sequence" else ratios.log_ratio
    return -ratios.advantages * log_ratio.exp().clamp(max=spec.eps_high)


def _vespo(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_w = (ratios.log_ratio.clamp(-20.0, 20.0) * ratios.mask).sum(dim=1, keepdim=True)
    if ratios.is_weights is not None:
        # TRL sums over padding too, where its weights are 1
        log_w = log_w + ratios.is_weights.log().clamp(_VESPO_LOG_LOW, 20.0).sum(dim=1, keepdim=True)
    log_w = log_w.clamp(_VESPO_LOG_LOW, _VESPO_LOG_HIGH)
    positive = ratios.advantages >= 0
    power = torch.where(positive, spec.vespo_k_pos, spec.vespo_k_neg).to(log_w.dtype)
    decay = torch.where(positive, spec.vespo_lambda_pos, spec.vespo_lambda_neg).to(log_w.dtype).clamp(min=1e-4)
    phi = (decay + power * log_w - decay * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return -ratios.advantages * phi


def _verl_vanilla(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_ratio = ratios.log_ratio.clamp(-_VERL_LOG_RATIO, _VERL_LOG_RATIO)
    slope = _inside(
        log_ratio.exp(), ratios.advantages, low=1 - spec.eps_low, high=1 + spec.eps_high, ceiling=spec.dual_clip
    )
    return slope.masked_fill(ratios.log_ratio.abs() > _VERL_LOG_RATIO, 0.0)


def _verl_clip_cov(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    """As if it dropped no token: which ones it drops is random."""
    ratio = ratios.log_ratio.exp()
    return _inside(ratio, ratios.advantages, low=1 - spec.eps_low, high=1 + spec.eps_high, ceiling=torch.inf)


def _verl_gspo(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    log_ratio = ratios.log_sequence_ratio()
    slope = _inside(
        log_ratio.clamp(max=_VERL_LOG_SEQUENCE_RATIO).exp(),
        ratios.advantages,
        low=1 - spec.eps_low,
        high=1 + spec.eps_high,
        ceiling=torch.inf,
    )
    return slope.masked_fill(log_ratio > _VERL_LOG_SEQUENCE_RATIO, 0.0)


def _verl_cispo(spec: LossSpec, ratios: Ratios) -> torch.Tensor:
    ratio = ratios.log_ratio.clamp(-_VERL_LOG_RATIO, _VERL_LOG_RATIO).exp()
    return -ratios.advantages * ratio.clamp(1 - spec.eps_low, 1 + spec.eps_high)


def _verl_gpg(_: LossSpec, ratios: Ratios) -> torch.Tensor:
    return -ratios.advantages


def _inside(ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, ceiling: float) -> torch.Tensor:
    """-A * r where the clipped surrogate still has a slope, else 0."""
    inside = torch.where(advantages >= 0, ratio <= high, (ratio >= low) & (ratio <= ceiling))
    return torch.where(inside, -advantages * ratio, torch.zeros_like(ratio))


def _clipped_steepest(spec: LossSpec) -> tuple[float, float]:
    upper = 1 + spec.eps_high
    if spec.delta is None:
        return upper, upper
    return min(upper, spec.delta), max(upper, spec.delta)


def _sapo_steepest(spec: LossSpec) -> tuple[float, float]:
    return _steepest_gate(spec.tau_pos), _steepest_gate(spec.tau_neg)


def _steepest_gate(temperature: float) -> float:
    """The maximum of r / cosh^2(tau (r - 1) / 2): where its slope vanishes, 1 = tau r tanh(tau (r - 1) / 2)."""
    low, high = 1.0, 1.0 + 2.0 / temperature + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        rising = temperature * middle * math.tanh(temperature * (middle - 1) / 2) < 1
        low, high = (middle, high) if rising else (low, middle)
    return high / math.cosh(temperature * (high - 1) / 2) ** 2


def _vespo_steepest(spec: LossSpec) -> tuple[float, float]:
    pairs = ((spec.vespo_k_pos, spec.vespo_lambda_pos), (spec.vespo_k_neg, spec.vespo_lambda_neg))
    peaks = (decay + (power * math.log(power / decay) if power else 0.0) - power for power, decay in pairs)
    up, down = (math.exp(min(peak, _LARGEST_EXPONENT)) for peak in peaks)
    return up, down


_SLOPES: dict[str, Callable[[LossSpec, Ratios], torch.Tensor]] = {
    **dict.fromkeys(("dapo", "grpo", "bnpo", "dr_grpo", "luspo"), _clipped),
    "sapo": _sapo,
    "cispo": _cispo,
    "vespo": _vespo,
    "verl_vanilla": _verl_vanilla,
    "verl_gspo": _verl_gspo,
    "verl_cispo": _verl_cispo,
    "verl_sapo": _sapo,
    "verl_gpg": _verl_gpg,
    "verl_clip_cov": _verl_clip_cov,
}
_STEEPEST: dict[str, Callable[[LossSpec], tuple[float, float]]] = {
    **dict.fromkeys(("dapo", "grpo", "bnpo", "dr_grpo", "luspo"), _clipped_steepest),
    "sapo": _sapo_steepest,
    "cispo": lambda spec: (spec.eps_high, spec.eps_high),
    "vespo": _vespo_steepest,
    "verl_vanilla": lambda spec: (1 + spec.eps_high, spec.dual_clip),
    "verl_gspo": lambda spec: (1 + spec.eps_high, 1 + spec.eps_high),
    "verl_cispo": lambda spec: (1 + spec.eps_high, 1 + spec.eps_high),
    "verl_sapo": _sapo_steepest,
    "verl_gpg": lambda _: (1.0, 1.0),
    "verl_clip_cov": lambda spec: (1 + spec.eps_high, 1 + spec.eps_high),
}
