"""The profile: what one run of the actor measured, one row per (shape, layer, unit, codec or none).

Rows of a decoder layer follow its op stream. A row with codec `none` describes the unit itself (bytes, time,
data flow); the rows after it, one a codec, describe what compressing it costs. Two rows are not ops: each
layer's input (unit -1, always held) and the LM head (layer = number of layers).
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hilore_cli.errors import FileError
from hilore_cli.tables.parquet import columns_of, read_table, schema_of, write_table

FORMAT_VERSION = 2
NO_CODEC = "none"
INPUT_UNIT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRow:
    """One unit of one layer, uncompressed (`codec` none) or through one codec."""

    shape: int
    layer: int
    unit: int
    """Position among the layer's op outputs, in the order they are made; what `reads` refers to."""
    op_index: int
    leaf: int
    """Which output of the op this is."""
    module: str
    """Module path inside the layer."""
    op: str
    occurrence: int
    """How many times this op ran in this module before."""
    codec: str
    dtype: str
    bytes: int
    """Of its storage."""
    flops: int
    recompute_us: float
    """Of the whole op; on its leaf 0."""
    saved: bool
    """Autograd saves this storage for backward."""
    keepable: bool
    """False for outputs that are mutated later, that alias another, or that a random op made."""
    forced: bool
    """The op runs in every replay: it draws random numbers, or gives no tensor."""
    reads: tuple[int, ...]
    """Units of the layer that the op reads."""
    packed_bytes: int
    """What the codec keeps; `bytes` for codec none."""
    codec_us: float
    """Pack and unpack together."""
    error: float
    """Relative L2 error of the unit after unpacking."""
    gain: float
    """Risk gain K: gradient error per unit of exposure (DESIGN section 4)."""


SCHEMA = schema_of(ProfileRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a plan must find again in the model it is applied to."""

    model: str
    model_class: str
    config_hash: str
    parameter_hash: str
    layers: int
    dtype: str
    attention: str
    adapter: str
    """`none`, or how the LoRA adapter is shaped."""
    call: str
    """Which tensors each layer is called with: without a padding mask, say, attention runs other ops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The largest micro-batch that the numbers are good for."""

    micro_batch: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of one sequence."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What was run: enough to run it again."""

    model: str
    """As given on the command line."""
    weights: str
    """`pretrained` or `random`; errors measured on random weights mean nothing."""
    weights_digest: str
    rollouts: str
    """A file name, or `builtin` for completions that the actor sampled itself."""
    rollouts_digest: str
    mean_reward: float
    loss: str
    optimizer: str
    seed: int
    device: str
    torch_version: str
    transformers_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """Bytes that stay for the whole step."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        """Everything before the first activation."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Micro-batch times (forward and backward), interleaved: medians, and the fastest round, which is planned with."""

    plain_us: float
    gc_us: float
    plain_fastest_us: float
    gc_fastest_us: float
    rounds: int
    checkpoint_us: float
    """What a replayed layer costs beyond its ops."""
    mode_us: float
    """What a layer that keeps units costs beyond a plain checkpoint."""
    recompute_scale: float
    """By which the ops' traced times were multiplied, so that they add up to the measured GC step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPoint:
    """A moment in one layer's backward: bytes above the layer's base, and the units alive in it."""

    bytes: int
    alive: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerClass:
    """Layers with the same op stream; measured on one of them."""

    plain_extra_bytes: int
    """How far the backward of a plain layer rises above its base with all its states held."""
    points: tuple[ReplayPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes above static over a GC step, measured from allocator events; one entry a layer."""

    layer_class: tuple[int, ...]
    classes: tuple[LayerClass, ...]
    forward_peak_bytes: tuple[int, ...]
    backward_base_bytes: tuple[int, ...]
    head_peak_bytes: int
    tail_peak_bytes: int
    gc_peak_bytes: int
    plain_peak_bytes: int
    plain_peak_measured: bool
    """False: plain would not have fit beside the profiler's limit of 1.1x GC, so it is computed."""
    profiling_peak_bytes: int
    """Highest dynamic use of the profiler itself, above parameters and buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How the risk gains were measured, and what they are worth on other micro-batches (DESIGN section 4)."""

    micro_batches: int
    """Of the workload's first ones, none of which a verification may use again."""
    gamma: float
    """Gradient norm per unit of exposure, of the micro-batch that the gains were measured on."""
    gammas: tuple[float, ...]
    """The same of each micro-batch that they were checked on."""
    ratios: tuple[float, ...]
    """Measured over predicted relative error of each of these: the spread of the gains."""
    quantile: float
    margin: float
    """What the solver multiplies every gain by: the ratio that this share of further updates stays under."""
    measured_codecs: tuple[str, ...]
    """The first in every layer, the others in a few and fitted from the first elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileMeta:
    """Everything about a profile that is not a row."""

    identity: Identity
    shape: Shape
    workload: Workload
    static_bytes: StaticBytes
    timing: StepTiming
    memory: MemoryCurve
    calibration: Calibration
    device_bytes: int
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A profile in memory."""

    meta: ProfileMeta
    rows: tuple[ProfileRow, ...]
    digest: str = ""

    def save(self, path: str | Path, *, force: bool = False) -> tuple[str, bool]:
        """Write it; returns the digest and whether the file changed. Raises FileError."""
        return write_table(
            Path(path),
            columns_of(self.rows, SCHEMA),
            dataclasses.asdict(self.meta),
            kind="profile",
            version=FORMAT_VERSION,
            force=force,
        )


def load_profile(path: str | Path) -> Profile:
    """Read a profile. Raises FileError naming what is wrong with the file and the way out."""
    table, metadata, digest = read_table(Path(path), kind="profile", schema=SCHEMA, version=FORMAT_VERSION)
    try:
        rows = tuple(ProfileRow(**{**row, "reads": tuple(row["reads"])}) for row in table.to_pylist())
        meta = profile_meta_from_dict(metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            str(path), f"has metadata that hilore cannot read ({error})", "run `hilore profile` again"
        ) from error
    for row in rows:
        for name in ("recompute_us", "codec_us", "error", "gain"):
            value = getattr(row, name)
            if not (math.isfinite(value) and value >= 0):
                place = f"layer {row.layer}, {row.module or 'layer'} {row.op}, codec {row.codec}"
                raise FileError(
                    str(path),
                    f"holds {name} = {value} ({place}); it must be finite and not negative",
                    "run `hilore profile` again",
                )
    return Profile(meta=meta, rows=rows, digest=digest)


def profile_meta_from_dict(values: dict[str, Any]) -> ProfileMeta:
    """The typed metadata from its JSON form. Raises KeyError, TypeError or ValueError."""
    memory = values["memory"]
    classes = tuple(
        LayerClass(
            plain_extra_bytes=entry["plain_extra_bytes"],
            points=tuple(ReplayPoint(bytes=point["bytes"], alive=tuple(point["alive"])) for point in entry["points"]),
        )
        for entry in memory["classes"]
    )
    per_layer = {name: tuple(memory[name]) for name in ("layer_class", "forward_peak_bytes", "backward_base_bytes")}
    lists = {name: tuple(values["calibration"][name]) for name in ("gammas", "ratios", "measured_codecs")}
    calibration = {**values["calibration"], **lists}
    for section in ("timing", "calibration"):
        for name, value in values[section].items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{section}.{name} is {value}")
    return ProfileMeta(
        identity=Identity(**values["identity"]),
        shape=Shape(**values["shape"]),
        workload=Workload(**values["workload"]),
        static_bytes=StaticBytes(**values["static_bytes"]),
        timing=StepTiming(**values["timing"]),
        memory=MemoryCurve(**{**memory, **per_layer, "classes": classes}),
        calibration=Calibration(**calibration),
        device_bytes=values["device_bytes"],
        command=values["command"],
    )
