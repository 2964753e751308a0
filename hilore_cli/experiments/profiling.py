"""`hilore profile`: one actor, measured once (DESIGN sections 4-6).

The order keeps memory within a GC step's: every pass runs under full checkpointing, the local passes hold one layer's
gradients, and a whole plain step is run only where it fits beside that limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hilore_cli.errors import HiloreError
from hilore_cli.experiments.assembly import Measurements, assemble
from hilore_cli.experiments.calibration import CALIBRATION_BATCHES, Calibrator
from hilore_cli.experiments.facts import static_bytes
from hilore_cli.experiments.overheads import Overheads, measure_overheads
from hilore_cli.experiments.progress import Progress, Silent
from hilore_cli.experiments.workloads import PreparedWorkload, prepare
from hilore_cli.measuring import identity
from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.layer_calls import around_layers, capture_inputs
from hilore_cli.measuring.memory import TracedStep, plain_extra_bytes, replay_points, trace_step
from hilore_cli.measuring.options import WorkloadOptions
from hilore_cli.measuring.step import actor_step, completion_logps
from hilore_cli.measuring.timing import Rounds, interleaved
from hilore_cli.measuring.units import UnitRecord, record_layer
from hilore_cli.tables.profile_table import LayerClass, MemoryCurve, Profile, StepTiming

DEFAULT_CODECS = ("int8-g64", "int4-g64", "bf16")
"""The first is measured in every layer."""
TRACES = 2
PROFILING_LIMIT = 1.1
"""Of a GC step's peak: what the profiler itself may use."""


def profile_actor(
    options: WorkloadOptions,
    *,
    workload: PreparedWorkload | None = None,
    codecs: tuple[str, ...] | None = None,
    rounds: int = 5,
    command: str = "",
    progress: Progress | None = None,
) -> Profile:
    """Measure one actor under one workload.

    Args:
        options: the actor, its data and its shape.
        workload: the same made ready already, with micro-batches to calibrate on.
        codecs: names of the codecs to measure; the built-in deterministic ones if None.
        rounds: interleaved timing rounds of plain and GC steps.
        command: recorded in the profile.
        progress: told of every stage.

    Raises:
        HiloreError: the model, the rollouts or a flag cannot be used.
    """
    progress = progress or Silent()
    for name in codecs or ():
        codec(name)  # raises now rather than after sampling
    if workload is None:
        workload = prepare(options, count=CALIBRATION_BATCHES, skip=0, progress=progress)
    workload = replace(workload, micro_batches=workload.micro_batches[:CALIBRATION_BATCHES])
    return Profiler(workload, codecs or DEFAULT_CODECS, progress).measure(rounds=rounds, command=command)


class Profiler:
    """The passes of one profile, in order; each returns plain numbers."""

    def __init__(self, workload: PreparedWorkload, codecs: tuple[str, ...], progress: Progress) -> None:
        self.workload = workload
        self.model: nn.Module = workload.actor.model
        self.layers = identity.decoder_layers(self.model)
        self.device = next(self.model.parameters()).device
        self.dtype = next(self.model.parameters()).dtype
        self.codecs = tuple(name for name in codecs if codec(name).supports(self.dtype))
        self.progress = progress
        self.phase_peaks: list[int] = []

    def measure(self, *, rounds: int, command: str) -> Profile:
        """Run every pass and assemble the profile."""
        self.progress.stage("Recording op streams", len(self.layers))
        units, layer_class, call = self._record()
        calibrator = Calibrator(
            self.workload, units=units, layer_class=layer_class, codecs=self.codecs, progress=self.progress
        )
        gains, calibration = calibrator.run()
        self.phase_peaks.append(calibrator.peak_bytes)
        self.sample_bytes = calibrator.sample_bytes if self.device.type == "cpu" else 0
        curve, traced = self._memory(units, layer_class)
        timing = self._time(units, curve, rounds=rounds)
        return assemble(
            Measurements(
                workload=self.workload,
                units=units,
                layer_class=layer_class,
                gains=tuple(gains),
                calibration=calibration,
                curve=curve,
                traces=tuple(step.trace for step in traced),
                timing=timing,
                codecs=self.codecs,
                call=call,
                command=command,
            )
        )

    def step(self, micro_batch: int = 0) -> Any:
        """One forward and backward; gradients accumulate."""
        return actor_step(self.model, self.workload.micro_batches[micro_batch], self.workload.options.loss)

    def checkpointed_step(self, plain: frozenset[int] = frozenset()) -> None:
        """One step under full checkpointing, but for the layers in `plain`."""

        def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return original(*args, **kwargs) if index in plain else checkpointed(original, args, kwargs)

        with around_layers(self.model, run):
            self.step()

    def _record(self) -> tuple[tuple[tuple[UnitRecord, ...], ...], tuple[int, ...], str]:
        """Units of each class of layers, each layer's class, and what the layers are called with."""
        batch = self.workload.micro_batches[0]
        inputs = capture_inputs(self.model, lambda: completion_logps(self.model, batch))
        classes: dict[tuple[Any, ...], int] = {}
        units: list[tuple[UnitRecord, ...]] = []
        layer_class = []
        for layer, call in zip(self.layers, inputs, strict=True):
            args, kwargs, _ = call.fresh()
            with record_layer(layer, args, kwargs) as recorder:
                layer(*args, **kwargs)
            structure = tuple(unit.structure for unit in recorder.units)
            if structure not in classes:
                classes[structure] = len(classes)
                units.append(tuple(recorder.units))
            layer_class.append(classes[structure])
            self.progress.advance()
        signatures = {identity.call_signature(call.args, call.kwargs) for call in inputs}
        if len(signatures) > 1:
            raise HiloreError(
                type(self.model).__name__,
                f"calls its decoder layers with different tensors ({'; '.join(sorted(signatures))})",
                "hilore plans models whose layers are all called alike",
            )
        return tuple(units), tuple(layer_class), identity.call_signature(inputs[0].args, inputs[0].kwargs)

    def _memory(
        self, units: Sequence[Sequence[UnitRecord]], layer_class: Sequence[int]
    ) -> tuple[MemoryCurve, list[TracedStep]]:
        """The curve of a GC step whose gradients are there already, as in later micro-batches."""
        self.progress.stage("Tracing memory and ops", TRACES + 2)
        traced = []
        for _ in range(TRACES):
            traced.append(trace_step(self.model, self.step, self.device))
            self.progress.advance()
        first = traced[0]
        one_a_class = frozenset(max(i for i, c in enumerate(layer_class) if c == kind) for kind in set(layer_class))
        partly_plain = trace_step(self.model, self.step, self.device, plain=one_a_class)
        self.progress.advance()
        classes = []
        for kind, members in enumerate(units):
            layers = [index for index, other in enumerate(layer_class) if other == kind]
            unit_bytes = {i: unit.bytes for i, unit in enumerate(members) if unit.keepable and unit.bytes}
            classes.append(
                LayerClass(
                    plain_extra_bytes=plain_extra_bytes(partly_plain, max(layers)),
                    points=replay_points(first, layers, unit_bytes),
                )
            )
        everything = frozenset(range(len(self.layers)))
        held = [sum(unit.bytes for unit in units[kind] if unit.saved) for kind in layer_class]
        gc_peak = max(step.trace.peak_bytes for step in traced)
        plain_peak = max(
            first.peak(first.head_window) + sum(held),
            *(
                first.level_at(first.backward_window(i)[0]) + sum(held[: i + 1]) + classes[kind].plain_extra_bytes
                for i, kind in enumerate(layer_class)
            ),
            gc_peak,
        )
        measured = self._fits(plain_peak, gc_peak)
        if measured:
            plain_peak = trace_step(self.model, self.step, self.device, plain=everything).trace.peak_bytes
            self.phase_peaks.append(plain_peak + static_bytes(self.model, "none").gradients)
        self.progress.advance()
        steps = [*traced, partly_plain]
        gradients = static_bytes(self.model, "none").gradients
        self.phase_peaks += [step.trace.peak_bytes + gradients for step in steps]
        self.phase_peaks.append(gc_peak + gradients + self.sample_bytes)  # as the checks ran
        return MemoryCurve(
            layer_class=tuple(layer_class),
            classes=tuple(classes),
            forward_peak_bytes=tuple(first.peak(first.forward_window(i)) for i in range(len(self.layers))),
            backward_base_bytes=tuple(first.level_at(first.backward_window(i)[0]) for i in range(len(self.layers))),
            head_peak_bytes=first.peak(first.head_window),
            tail_peak_bytes=first.tail_peak,
            gc_peak_bytes=gc_peak,
            plain_peak_bytes=plain_peak,
            plain_peak_measured=measured,
            profiling_peak_bytes=max(self.phase_peaks),
        ), traced

    def _fits(self, dynamic_bytes: int, gc_dynamic_bytes: int) -> bool:
        """Whether this much, without optimizer states, stays within the profiler's share of a GC step's peak."""
        full = static_bytes(self.model, self.workload.options.optimizer)
        return full.total - full.optimizer + dynamic_bytes <= PROFILING_LIMIT * (full.total + gc_dynamic_bytes)

    def _time(self, units: Sequence[Sequence[UnitRecord]], curve: MemoryCurve, *, rounds: int) -> StepTiming:
        """Plain and GC steps, interleaved; where a plain step does not fit, as many plain layers as do."""
        self.progress.stage("Timing plain and GC steps", 2 * rounds)
        plain_layers = self._plain_layers_that_fit(units, curve)
        seen = interleaved(
            {
                "plain": lambda: self.checkpointed_step(plain_layers),
                "gc": self.checkpointed_step,
            },
            rounds=rounds,
            device=self.device,
            advance=self.progress.advance,
            warmups=0,  # both have run under the traces
        )
        share = len(self.layers) / len(plain_layers)

        def plain_us(of: Callable[[Rounds], float]) -> float:
            gc_us = of(seen["gc"])
            # GC runs each forward once more, so plain is no less than half of it, whatever noise says times `share`
            return max(gc_us - share * (gc_us - of(seen["plain"])), gc_us / 2)

        overheads = self._overheads(units, curve)
        return StepTiming(
            plain_us=plain_us(lambda rounds: rounds.median_us),
            gc_us=seen["gc"].median_us,
            plain_fastest_us=plain_us(lambda rounds: rounds.fastest_us),
            gc_fastest_us=seen["gc"].fastest_us,
            rounds=rounds,
            checkpoint_us=overheads.checkpoint_us,
            mode_us=overheads.mode_us,
            recompute_scale=1.0,
        )

    def _plain_layers_that_fit(self, units: Sequence[Sequence[UnitRecord]], curve: MemoryCurve) -> frozenset[int]:
        if self._fits(curve.plain_peak_bytes, curve.gc_peak_bytes):
            return frozenset(range(len(self.layers)))
        chosen: list[int] = []
        held = 0
        for index, kind in enumerate(curve.layer_class):
            held += sum(unit.bytes for unit in units[kind] if unit.saved)
            if not self._fits(curve.gc_peak_bytes + held, curve.gc_peak_bytes):
                break
            chosen.append(index)
        return frozenset(chosen or [0])

    def _overheads(self, units: Sequence[Sequence[UnitRecord]], curve: MemoryCurve) -> Overheads:
        """On the commonest class of layers, with two tokens."""
        kind = max(range(len(units)), key=curve.layer_class.count)
        index = curve.layer_class.index(kind)
        ids = self.workload.micro_batches[0].input_ids[:1, -2:]
        mask = torch.ones_like(ids)
        inputs = capture_inputs(self.model, lambda: self.model(input_ids=ids, attention_mask=mask, use_cache=False))
        args, kwargs, _ = inputs[index].fresh()
        with record_layer(self.layers[index], args, kwargs) as recorder:
            self.layers[index](*args, **kwargs)
        return measure_overheads(self.layers[index], inputs[index], tuple(recorder.units))
