"""The plan: what to do with each unit, one row per (rung, layer, unit), as the runtime reads it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hilore_cli.errors import FileError
from hilore_cli.tables.parquet import columns_of, read_table, schema_of, write_table

FORMAT_VERSION = 2
STORE, COMPRESS, RECOMPUTE = "store", "compress", "recompute"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One unit's action at one rung."""

    rung: int
    layer: int
    unit: int
    op_index: int
    leaf: int
    module: str
    op: str
    action: str
    """`store`, `compress` or `recompute` (not held: rebuilt if something needs it)."""
    codec: str
    """Of a compressed unit; `none` otherwise."""
    plain: bool
    """The whole layer runs unwrapped."""
    replays: bool
    """The op runs again in backward; False for a dead op, and for a kept output unless a sibling needs the op."""
    held_bytes: int
    recompute_us: float
    """Spent in replay on this op; 0 if it does not run."""
    codec_us: float
    risk2: float
    """Its share of the squared risk."""
    why: str


SCHEMA = schema_of(PlanRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One complete assignment and what it promises."""

    rung: int
    risk: float
    """The budget it was solved under."""
    predicted_risk: float
    peak_bytes: int
    step_us: float
    held_bytes: int
    tax_recovered: float
    stored: int
    compressed: int
    recomputed: int
    """Units not held whose op runs again; the others are dead."""
    plain_layers: int
    status: str
    gap: float
    bound_us: float
    greedy_us: float
    """Step time of the greedy assignment under the same cap and risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMeta:
    """Everything about a plan that is not a row."""

    model: str
    model_class: str
    config_hash: str
    parameter_hash: str
    layers: int
    dtype: str
    attention: str
    adapter: str
    call: str
    """Which tensors a layer is called with; other calls are checkpointed in full."""
    micro_batch: int
    tokens: int
    """The longest sequence (prompt and response) the plan is good for."""
    profile_digest: str
    profile_name: str
    cap_bytes: int
    cap_text: str
    risk: float
    chosen: int
    """The rung solved for `risk`."""
    solver: str
    static_bytes: int
    gamma: float
    """Gradient norm per unit of exposure, as the profile found it."""
    calibration_micro_batches: int
    """Of the profile's workload, its first: a verification leaves them out."""
    plain_us: float
    """Fastest round of the profile; `gc_us` likewise."""
    gc_us: float
    plain_peak_bytes: int
    gc_peak_bytes: int
    rungs: tuple[Rung, ...]
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan in memory: a ladder of rungs."""

    meta: PlanMeta
    rows: tuple[PlanRow, ...]
    digest: str = ""

    def save(self, path: str | Path, *, force: bool = False) -> tuple[str, bool]:
        """Write it; returns the digest and whether the file changed. Raises FileError."""
        table = columns_of(self.rows, SCHEMA)
        return write_table(
            Path(path), table, dataclasses.asdict(self.meta), kind="plan", version=FORMAT_VERSION, force=force
        )

    def rung_rows(self, rung: int) -> Sequence[PlanRow]:
        """Rows of one rung, in forward order."""
        return [row for row in self.rows if row.rung == rung]


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises FileError naming what is wrong with the file and the way out."""
    table, metadata, digest = read_table(Path(path), kind="plan", schema=SCHEMA, version=FORMAT_VERSION)
    try:
        meta = _meta_from_dict(metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            str(path), f"has metadata that hilore cannot read ({error})", "run `hilore solve` again"
        ) from error
    return Plan(meta=meta, rows=tuple(PlanRow(**row) for row in table.to_pylist()), digest=digest)


def _meta_from_dict(values: dict[str, Any]) -> PlanMeta:
    return PlanMeta(**{**values, "rungs": tuple(Rung(**rung) for rung in values["rungs"])})
