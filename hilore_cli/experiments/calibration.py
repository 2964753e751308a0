"""Risk gains and what they are worth on other data (DESIGN section 4): the passes of a profile that measure errors.

First every unit's gain, by local VJPs on one micro-batch. Then whole steps on further micro-batches, exact and with the
units of least gain compressed all at once: how far the gains predict those errors says what a plan must multiply them
by. Units of least gain are what a solver picks, so what picking does to the promise (it favours units that happened to
be measured low) is in that factor too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import Any

import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.facts import static_bytes
from hilore_cli.experiments.progress import Progress
from hilore_cli.experiments.workloads import PreparedWorkload
from hilore_cli.measuring import identity
from hilore_cli.measuring.candidates import Candidate, compressible, statistics
from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.gains import (
    Gain,
    Remember,
    Substitute,
    fit_codecs,
    input_gradient,
    layer_gains,
    lookup_norm2,
)
from hilore_cli.measuring.layer_calls import CapturedStep, around_layers, capture_step
from hilore_cli.measuring.losses import BatchFacts
from hilore_cli.measuring.step import actor_step, facts_of, same_random_numbers
from hilore_cli.measuring.tracing import trace
from hilore_cli.measuring.units import UnitRecord
from hilore_cli.tables.profile_table import Calibration

GAIN_BATCHES = 1
CHECK_BATCHES = 5
CALIBRATION_BATCHES = GAIN_BATCHES + CHECK_BATCHES
CHECKED_RISKS = (0.01, 0.03)
"""Predicted errors of what is compressed together in the checks, in turn: by the first codec, and by the one that errs
most. What holds for one need not hold for the other."""
QUANTILE = 0.95
TYPICAL_SPREAD = 0.15
"""Standard deviation of the logarithm of measured over predicted error between micro-batches: 0.14 to 0.17 over 66 of
SmolLM2-135M, one sequence of 64 + 64 tokens each, at predicted errors of 0.3, 1 and 3 %."""
TYPICAL_DEGREES = 6
"""Degrees of freedom that count for it beside those of a profile's own few checks."""
LAYERS_A_FIT = 4
SAMPLED_ELEMENTS, SPARSEST, WHOLE = 2**21, 16, 64
# Student's t at that quantile, one-sided, from those degrees of freedom up; the last one serves beyond.
_STUDENT = (1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761)


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
        self.stored = [statistics(units[kind]) for kind in layer_class]
        self.op_of = [{one.unit: one.op_index for one in candidates} for candidates in self.candidates]
        self.peak_bytes = 0
        """Highest dynamic use of these passes, above parameters and buffers."""

    def run(self) -> tuple[list[Gain], Calibration]:
        """Gains per unit of exposure, and what checking them found. Raises HiloreError."""
        gains, exposure, norm = self._measure_gains()
        gamma = norm / exposure
        scaled = [gain.per_exposure(exposure) for gain in gains]
        self.progress.stage("Checking gains on other micro-batches", len(self._check_batches))
        batches = self._check_batches
        facts = facts_of([self.workload.micro_batches[batch] for batch in batches])
        checks, ratios = [], []
        together = [
            self._units_of_least_gain(scaled, codec, risk * gamma)
            for codec, risk in zip(self._checked_codecs(scaled), CHECKED_RISKS, strict=False)
        ]
        for batch, compressed in zip(batches, cycle(together), strict=False):
            predicted = math.sqrt(sum(gain.change2 for gain in compressed)) / gamma
            check = self._check(batch, compressed, facts)
            if check is not None and predicted:
                checks.append(check)
                ratios.append(check.risk / predicted)
        return scaled, Calibration(
            micro_batches=len(self.workload.micro_batches),
            gamma=gamma,
            gammas=tuple(check.gamma for check in checks),
            ratios=tuple(ratios),
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
            raise HiloreError(
                "rollouts",
                "give a first micro-batch whose loss coefficients are all zero",
                "its advantages must differ from 0, and not every token may be clipped",
            )
        norm = gradient_norm(self.model)
        self._note_peak(captured)
        stride = max(1, len(self.layers) // LAYERS_A_FIT)
        gains = (
            layer_gains(
                self.layers,
                captured,
                self.candidates,
                self.codecs,
                stored=self.stored,
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

    def _checked_codecs(self, gains: Sequence[Gain]) -> tuple[str, ...]:
        """The first codec, and the one of most error over all units; none without codecs."""
        if not self.codecs:
            return ()
        errors = {name: sum(gain.error for gain in gains if gain.codec == name) for name in self.codecs}
        return self.codecs[0], max(errors, key=errors.__getitem__)

    @staticmethod
    def _units_of_least_gain(gains: Sequence[Gain], codec: str, most: float) -> list[Gain]:
        """A codec's units, the least gain first, while the root of their summed squares is within `most`."""
        chosen: list[Gain] = []
        error2 = 0.0
        ranked = sorted(
            (gain for gain in gains if gain.codec == codec), key=lambda gain: (gain.change2, gain.layer, gain.unit)
        )
        for gain in ranked:
            error2 += gain.change2
            if chosen and error2 > most**2:
                break
            chosen.append(gain)
        return chosen

    def _check(self, batch: int, compressed: Sequence[Gain], facts: BatchFacts) -> Check | None:
        """None for a micro-batch without a gradient, as where every token is clipped."""
        by_layer: list[dict[int, str]] = [{} for _ in self.layers]
        for gain in compressed:
            by_layer[gain.layer][self.op_of[gain.layer][gain.unit]] = gain.codec

        def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            exact = Remember(self.stored[index])
            substitute = Substitute(by_layer[index], exact.outputs)
            return checkpointed(original, args, kwargs, contexts=lambda: (exact, substitute))

        found = []
        exposure = 0.0
        for around in (checkpointed_layer, run):
            self.model.zero_grad(set_to_none=True)
            with around_layers(self.model, around), same_random_numbers(self.device):
                exposure = self._step(batch, facts)
            found.append(sampled_gradient(self.model))
        exact, changed = found
        self.progress.advance()
        norm = float(exact.norm())
        return Check(gamma=norm / exposure, risk=float((changed - exact).norm()) / norm) if norm else None

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
            layer_gains(
                self.layers[:1],
                one,
                first,
                self.codecs[:1],
                stored=self.stored[:1],
                every=(),
                below2=0.0,
                advance=lambda: None,
            )

        gradients = static_bytes(self.model, "none").gradients
        self.peak_bytes = held + trace(local, self.device).peak_bytes + gradients

    @property
    def sample_bytes(self) -> int:
        """What a check keeps besides a GC step: samples of two gradients and of their difference."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return 3 * 4 * sum(-(-parameter.numel() // stride) for parameter, stride in _sampled(trained))


def checkpointed_layer(_: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer under plain checkpointing, for `around_layers`."""
    return checkpointed(original, args, kwargs)


def sampled_gradient(model: nn.Module) -> torch.Tensor:
    """[elements] of the gradient, evenly spaced over each parameter and weighted to keep its norm, on the CPU."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(
        [gradient.reshape(-1)[::stride].float().cpu() * stride**0.5 for gradient, stride in _sampled(gradients)]
    )


def _sampled(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Each tensor with the stride of its sample: a sixteenth or two million elements in all, small ones whole."""
    stride = max(SPARSEST, sum(tensor.numel() for tensor in tensors) // SAMPLED_ELEMENTS)
    while any(stride % factor == 0 for factor in range(2, math.isqrt(stride) + 1)):
        stride += 1  # a prime meets every column, whatever the width
    return [(tensor, 1 if tensor.numel() <= stride * WHOLE else stride) for tensor in tensors]


def upper_bound(ratios: Sequence[float]) -> float:
    """What the ratio of another micro-batch stays under in 95 of 100 cases, if logarithms of ratios are normal.

    The prediction bound for one more observation: mean + t * deviation * sqrt(1 + 1/n), with the variance of these few
    pooled with `TYPICAL_SPREAD`, for by themselves they would often agree by chance. An update of several micro-batches
    varies less, but plans of one profile differ by about as much more. 1 without any ratio.
    """
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    if not logs:
        return 1.0
    mean, own = fmean(logs), len(logs) - 1
    degrees = TYPICAL_DEGREES + own
    variance = (TYPICAL_DEGREES * TYPICAL_SPREAD**2 + sum((log - mean) ** 2 for log in logs)) / degrees
    t = _STUDENT[min(own, len(_STUDENT) - 1)]
    return math.exp(mean + t * math.sqrt(variance * (1 + 1 / len(logs))))


def gradient_norm(model: nn.Module) -> float:
    """L2 norm over all parameters' gradients."""
    total = sum(
        float(parameter.grad.float().square().sum(dtype=torch.float64))
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    return float(total**0.5)
