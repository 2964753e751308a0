"""From measurements to the profile's rows and metadata."""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from hilore_cli.experiments.facts import model_identity, static_bytes
from hilore_cli.experiments.workloads import PreparedWorkload
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.gains import Gain
from hilore_cli.measuring.timing import interleaved, op_times
from hilore_cli.measuring.tracing import Trace
from hilore_cli.measuring.units import UnitRecord
from hilore_cli.tables.profile_table import (
    INPUT_UNIT,
    NO_CODEC,
    Calibration,
    MemoryCurve,
    Profile,
    ProfileMeta,
    ProfileRow,
    StepTiming,
    Workload,
)

CODEC_ROUNDS = 9
SCALES = (0.5, 1.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What the profiler's passes found."""

    workload: PreparedWorkload
    units: tuple[tuple[UnitRecord, ...], ...]
    """Of each class of layers."""
    layer_class: tuple[int, ...]
    gains: tuple[Gain, ...]
    calibration: Calibration
    curve: MemoryCurve
    traces: tuple[Trace, ...]
    timing: StepTiming
    codecs: tuple[str, ...]
    call: str
    """Which tensors the layers are called with."""
    command: str


def assemble(found: Measurements) -> Profile:
    """The profile of these measurements: rows in forward order, codecs after their unit."""
    times = op_times(found.traces, found.layer_class)
    scale = recompute_scale(times, found)
    found = replace(found, timing=replace(found.timing, recompute_scale=scale))
    model = found.workload.actor.model
    device = next(model.parameters()).device
    codec_us = _codec_times(found, device)
    gains = {(gain.layer, gain.unit, gain.codec): gain for gain in found.gains}
    rows: list[ProfileRow] = []
    for layer, kind in enumerate(found.layer_class):
        rows.append(_input_row(layer, found))
        for index, unit in enumerate(found.units[kind]):
            us = scale * times.get((kind, unit.op_index), 0.0) if unit.leaf == 0 else 0.0
            rows.append(_unit_row(layer, index, unit, recompute_us=us))
            for name in found.codecs:
                gain = gains.get((layer, index, name))
                if gain is not None:
                    rows.append(_codec_row(unit, gain, codec_us[name, unit.numel, unit.dtype]))
    rows.append(_head_row(found))
    return Profile(meta=_meta(found, device), rows=tuple(rows))


def recompute_scale(times: Mapping[tuple[int, int], float], found: Measurements) -> float:
    """What makes plain + checkpoints + all replayed ops the fastest GC step; traced ops are slower than bare ones.

    Between 0.5 and 1.5: beyond that the step times are noise, and the traced ones the better guess.
    """
    timing, layers = found.timing, len(found.layer_class)
    traced_us = sum(us * found.layer_class.count(kind) for (kind, _), us in times.items())
    ops_us = timing.gc_fastest_us - timing.plain_fastest_us - layers * timing.checkpoint_us
    scale = ops_us / traced_us if traced_us else 1.0
    return scale if SCALES[0] <= scale <= SCALES[1] else 1.0


def _unit_row(layer: int, index: int, unit: UnitRecord, *, recompute_us: float) -> ProfileRow:
    return ProfileRow(
        shape=0,
        layer=layer,
        unit=index,
        op_index=unit.op_index,
        leaf=unit.leaf,
        module=unit.module,
        op=unit.op,
        occurrence=unit.occurrence,
        codec=NO_CODEC,
        dtype=unit.dtype,
        bytes=unit.bytes,
        flops=unit.flops,
        recompute_us=recompute_us,
        saved=unit.saved,
        keepable=unit.keepable,
        forced=unit.forced,
        reads=unit.reads,
        packed_bytes=unit.bytes,
        codec_us=0.0,
        error=0.0,
        gain=0.0,
    )


def _codec_row(unit: UnitRecord, gain: Gain, codec_us: float) -> ProfileRow:
    return replace(
        _unit_row(gain.layer, gain.unit, unit, recompute_us=0.0),
        codec=gain.codec,
        flops=0,
        packed_bytes=codec(gain.codec).packed_bytes(unit.numel, getattr(torch, unit.dtype)),
        codec_us=codec_us,
        error=gain.error,
        gain=gain.change2**0.5,
    )


def _fixed_row(layer: int, unit: int, *, module: str, op: str, dtype: str, numel_bytes: int) -> ProfileRow:
    """A row that is not an op of the stream: a layer's input, or the LM head."""
    record = UnitRecord(
        op_index=unit,
        leaf=0,
        module=module,
        op=op,
        occurrence=0,
        dtype=dtype,
        numel=0,
        bytes=numel_bytes,
        flops=0,
        reads=(),
        floating=True,
        keepable=False,
        saved=True,
    )
    return _unit_row(layer, unit, record, recompute_us=0.0)


def _input_row(layer: int, found: Measurements) -> ProfileRow:
    shape = found.workload.options.shape
    config = found.workload.actor.model.config
    dtype = found.workload.options.dtype
    hidden = shape.micro_batch * shape.tokens * config.get_text_config().hidden_size
    width = getattr(torch, dtype).itemsize
    return _fixed_row(layer, INPUT_UNIT, module="", op="input", dtype=dtype, numel_bytes=hidden * width)


def _head_row(found: Measurements) -> ProfileRow:
    shape = found.workload.options.shape
    model = found.workload.actor.model
    logits = shape.micro_batch * (shape.response_tokens + 1) * model.config.get_text_config().vocab_size
    dtype = found.workload.options.dtype
    return _fixed_row(
        len(found.layer_class),
        0,
        module="lm_head",
        op="logits",
        dtype=dtype,
        numel_bytes=logits * getattr(torch, dtype).itemsize,
    )


def _codec_times(found: Measurements, device: torch.device) -> dict[tuple[str, int, str], float]:
    """(codec, elements, dtype) -> pack and unpack, in microseconds, median of interleaved rounds."""
    sizes = {
        (unit.numel, unit.dtype)
        for gain in found.gains
        for unit in [found.units[found.layer_class[gain.layer]][gain.unit]]
    }
    times: dict[tuple[str, int, str], float] = {}
    for numel, dtype in sorted(sizes):
        tensor = torch.randn(numel, device=device).to(getattr(torch, dtype))  # time does not depend on the values

        def run(name: str, tensor: torch.Tensor = tensor) -> None:
            coding = codec(name)
            coding.unpack(coding.pack(tensor))

        variants = {name: lambda name=name: run(name) for name in found.codecs}
        for name, rounds in interleaved(variants, rounds=CODEC_ROUNDS, device=device).items():
            times[name, numel, dtype] = median(rounds.wall_us)
    return times


def _meta(found: Measurements, device: torch.device) -> ProfileMeta:
    workload = found.workload
    options, actor, rollouts = workload.options, workload.actor, workload.rollouts
    return ProfileMeta(
        identity=model_identity(actor.model, actor.name, found.call),
        shape=options.shape,
        workload=Workload(
            model=options.model,
            weights=options.weights,
            weights_digest=actor.weights_digest,
            rollouts=rollouts.source if options.rollouts is None else options.rollouts.as_posix(),
            rollouts_digest=rollouts.digest,
            mean_reward=rollouts.mean_reward,
            loss=options.loss.describe(),
            optimizer=options.optimizer,
            seed=options.seed,
            device=device_name(device),
            torch_version=torch.__version__,
            transformers_version=importlib.metadata.version("transformers"),
        ),
        static_bytes=static_bytes(actor.model, options.optimizer),
        timing=found.timing,
        memory=found.curve,
        calibration=found.calibration,
        device_bytes=device_bytes(device),
        command=found.command,
    )


def device_name(device: torch.device) -> str:
    """`cpu`, or the accelerator's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_bytes(device: torch.device) -> int:
    """Memory of the accelerator; on CPU the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
