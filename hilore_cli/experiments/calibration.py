"""Risk gains and what they are worth on other data (DESIGN section 4): the passes of a profile that measure errors.

First every unit's gain, by local VJPs on one micro-batch. Then whole steps on further micro-batches, exact and with the
units of least gain compressed all at once: how far the gains predict those errors says what a plan must multiply them
by. Units of least gain are what a solver picks, so what picking does to the promise (it favours units that happened to
be measured low) is in that factor too.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.facts import static_bytes
from hilore_cli.experiments.progress import Progress
from hilore_cli.experiments.workloads import PreparedWorkload
from hilore_cli.measuring import identity
from hilore_cli.measuring.candidates import Candidate, compressible
from hilore_cli.measuring.gains import Gain, Substitute, fit_codecs, input_gradient, layer_gains, lookup_norm2
from hilore_cli.measuring.layer_calls import CapturedStep, around_layers, capture_step, checkpointed
from hilore_cli.measuring.losses import BatchFacts
from hilore_cli.measuring.step import actor_step, facts_of
from hilore_cli.measuring.tracing import trace
from hilore_cli.measuring.units import UnitRecord
from hilore_cli.tables.profile_table import Calibration

GAIN_BATCHES = 1
CHECK_BATCHES = 5
CALIBRATION_BATCHES = GAIN_BATCHES + CHECK_BATCHES
CHECKED_RISK = 0.01
"""Predicted error of what is compressed together in the checks."""
QUANTILE = 0.95
LAYERS_A_FIT = 4
SAMPLED_ELEMENTS = 2**21
# Student's t at that quantile, one-sided, for 1, 2, ... degrees of freedom; the normal's beyond.
_STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
_NORMAL = 1.645


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One micro-batch run exactly and compressed."""

    gamma: float
    """Gradient norm per exposure."""
    risk: float
    """Norm of the gradient's change by its norm."""


class Calibrator:
    """The passes, on a prepared workload whose first micro-batches are for them."""

    def __init__(
        self,
        workload: PreparedWorkload,
        *,
        units: Sequence[Sequence[UnitRecord]],
        layer_class: Sequence[int],
        codecs: Sequence[str],
        progress: Progress,
    ) -> None:
        self.workload = workload
        self.model: nn.Module = workload.actor.model
        self.layers = identity.decoder_layers(self.model)
        self.device = next(self.model.parameters()).device
        self.layer_class = layer_class
        self.codecs = codecs
        self.progress = progress
        self.candidates = [compressible(units[kind]) for kind in layer_class]
        self.op_of = [{one.unit: one.op_index for one in candidates} for candidates in self.candidates]
        self.peak_bytes = 0
        """Highest dynamic use of these passes, above parameters and buffers."""

    def run(self) -> tuple[list[Gain], Calibration]:
        """Gains per unit of exposure, and what checking them found. Raises HiloreError."""
        gains, exposure, norm = self._measure_gains()
        gamma = norm / exposure
        scaled = [gain.per_exposure(exposure) for gain in gains]
        self.progress.stage("Checking gains on other micro-batches", len(self._check_batches))
        compressed = self._units_of_least_gain(scaled, gamma)
        predicted = math.sqrt(sum(gain.change2 for gain in compressed)) / gamma
        facts = facts_of([self.workload.micro_batches[batch] for batch in self._check_batches])
        checks = [self._check(batch, compressed, facts) for batch in self._check_batches]
        ratios = tuple(check.risk / predicted for check in checks) if predicted else ()
        return scaled, Calibration(
            micro_batches=len(self.workload.micro_batches),
            gamma=gamma,
            gammas=tuple(check.gamma for check in checks),
            ratios=ratios,
            quantile=QUANTILE,
            margin=upper_bound(ratios),
            measured_codecs=tuple(self.codecs),
        )

    @property
    def _check_batches(self) -> list[int]:
        """After those of the gains; a workload of one micro-batch alone is checked on itself."""
        return list(range(GAIN_BATCHES, len(self.workload.micro_batches))) or [0]

    def _measure_gains(self) -> tuple[list[Gain], float, float]:
        self.progress.stage("Measuring compression gains", len(self.layers))
        self.model.zero_grad(set_to_none=True)
        exposure = 0.0

        def step() -> None:
            nonlocal exposure
            exposure = self._step(0)

        captured = capture_step(self.model, step)
        if exposure == 0.0:
            raise HiloreError("rollouts", "give a loss whose coefficients are all zero", "advantages must differ")
        norm = gradient_norm(self.model)
        self._note_peak(captured)
        stride = max(1, len(self.layers) // LAYERS_A_FIT)
        gains = (
            layer_gains(
                self.layers,
                captured,
                self.candidates,
                self.codecs,
                every=frozenset(range(stride // 2, len(self.layers), stride)),
                below2=self._embedding_norm2(captured),
                advance=self.progress.advance,
            )
            if self.codecs
            else []
        )
        return fit_codecs(gains, self.layer_class), exposure, norm

    def _step(self, micro_batch: int, facts: BatchFacts | None = None) -> float:
        batch = self.workload.micro_batches[micro_batch]
        return actor_step(self.model, batch, self.workload.options.loss, facts=facts).exposure

    def _units_of_least_gain(self, gains: Sequence[Gain], gamma: float) -> list[Gain]:
        """One codec a unit, the least gain first, until they are predicted to err as much as is checked."""
        chosen: dict[tuple[int, int], Gain] = {}
        error2 = 0.0
        for gain in sorted(gains, key=lambda gain: (gain.change2, gain.layer, gain.unit, gain.codec)):
            # bf16 and its like err too little to be worth a check while a coarser codec fits
            if gain.codec != self.codecs[0] or (gain.layer, gain.unit) in chosen:
                continue
            error2 += gain.change2
            if chosen and error2 > (CHECKED_RISK * gamma) ** 2:
                break
            chosen[gain.layer, gain.unit] = gain
        return list(chosen.values())

    def _check(self, batch: int, compressed: Sequence[Gain], facts: BatchFacts) -> Check:
        by_layer: list[dict[int, str]] = [{} for _ in self.layers]
        for gain in compressed:
            by_layer[gain.layer][self.op_of[gain.layer][gain.unit]] = gain.codec

        def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return checkpointed(original, args, kwargs, contexts=lambda: (nullcontext(), Substitute(by_layer[index])))

        found = []
        exposure = 0.0
        for around in (checkpointed_layer, run):
            self.model.zero_grad(set_to_none=True)
            with around_layers(self.model, around):
                exposure = self._step(batch, facts)
            found.append(sampled_gradient(self.model))
        exact, changed = found
        self.progress.advance()
        norm = float(exact.norm())
        if not norm:
            raise HiloreError("rollouts", "give a gradient of zero", "advantages must differ")
        return Check(gamma=norm / exposure, risk=float((changed - exact).norm()) / norm)

    def _embedding_norm2(self, captured: CapturedStep) -> float:
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        if not embedding.weight.requires_grad:
            return 0.0
        gradient = input_gradient(self.layers[0], captured.inputs[0], captured.upstream[0])
        return lookup_norm2(self.workload.micro_batches[0].input_ids, gradient)

    def _note_peak(self, captured: CapturedStep) -> None:
        """Peak of the local passes: what was captured, one layer's work, and the samples of the checks."""
        held = sum(tensor.nbytes for tensor in captured.upstream) * 2  # inputs and upstream gradients
        one = CapturedStep(inputs=captured.inputs[:1], upstream=captured.upstream[:1])
        first: list[Sequence[Candidate]] = [self.candidates[0][:1]]

        def local() -> None:
            layer_gains(self.layers[:1], one, first, self.codecs[:1], every=(), below2=0.0, advance=lambda: None)

        gradients = static_bytes(self.model, "none").gradients
        self.peak_bytes = held + trace(local, self.device).peak_bytes + gradients

    @property
    def sample_bytes(self) -> int:
        """What a check keeps besides a GC step: samples of two gradients and of their difference."""
        elements = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return 3 * 4 * min(elements, 2 * SAMPLED_ELEMENTS)


def checkpointed_layer(_: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer under plain checkpointing, for `around_layers`."""
    return checkpointed(original, args, kwargs)


def sampled_gradient(model: nn.Module) -> torch.Tensor:
    """[about 2M] elements of the gradient, evenly spaced over each parameter, on the CPU; small parameters in full."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    stride = max(1, sum(gradient.numel() for gradient in gradients) // SAMPLED_ELEMENTS)
    # an odd stride meets every column of the usual widths
    stride += stride % 2 == 0
    kept = [
        gradient.reshape(-1)[:: 1 if gradient.numel() <= stride * 64 else stride].float().cpu()
        for gradient in gradients
    ]
    weights = [1.0 if gradient.numel() <= stride * 64 else stride**0.5 for gradient in gradients]
    return torch.cat([part * weight for part, weight in zip(kept, weights, strict=True)])


def upper_bound(ratios: Sequence[float]) -> float:
    """What the ratio of another update stays under in 95 of 100 cases, if logarithms of ratios are normal.

    The usual prediction bound for one more observation: mean + t * deviation * sqrt(1 + 1/n). 1 without any ratio; of a
    single one, that ratio.
    """
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    if len(logs) < 2:
        return math.exp(logs[0]) if logs else 1.0
    freedom = len(logs) - 1
    t = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    return math.exp(fmean(logs) + t * stdev(logs) * math.sqrt(1 + 1 / len(logs)))


def gradient_norm(model: nn.Module) -> float:
    """L2 norm over all parameters' gradients."""
    total = sum(
        float(parameter.grad.float().square().sum(dtype=torch.float64))
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    return float(total**0.5)
