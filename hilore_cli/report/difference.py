"""What changed between two plans or two profiles: metadata, rows matched by their key, and totals."""

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pandas as pd

from hilore_cli.quantities import format_bytes
from hilore_cli.report.dump import flat_metadata
from hilore_cli.report.grid import Grid, milliseconds
from hilore_cli.tables import plan_table, profile_table
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import NO_CODEC, Profile

PLAN_KEY = ("rung", "layer", "unit")
PROFILE_KEY = ("shape", "layer", "unit", "codec")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowChange:
    """One row that only one file has, or that differs."""

    change: str
    """`added`, `removed` or `changed`."""
    key: dict[str, Any]
    """The row's key columns, and its module and op."""
    fields: dict[str, tuple[Any, Any]]
    """Column -> its two values; empty unless `changed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """All that differs between file A and file B."""

    metadata: dict[str, tuple[str | None, str | None]]
    rows: tuple[RowChange, ...]
    totals: dict[str, tuple[float, float]]
    """Name -> value in A and in B, changed or not."""

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not self.metadata and not self.rows


def difference(a: Profile | Plan, b: Profile | Plan) -> Difference:
    """Compare two files of one kind."""
    before, after = dict(flat_metadata(dataclasses.asdict(a.meta))), dict(flat_metadata(dataclasses.asdict(b.meta)))
    names = sorted(before.keys() | after.keys())
    metadata = {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
    key = PLAN_KEY if isinstance(a, Plan) else PROFILE_KEY
    totals_a, totals_b = _totals(a), _totals(b)
    totals = {name: (totals_a.get(name, 0), totals_b.get(name, 0)) for name in {**totals_a, **totals_b}}
    return Difference(metadata=metadata, rows=_row_changes(_frame(a), _frame(b), key=key), totals=totals)


def _frame(file: Profile | Plan) -> pd.DataFrame:
    columns = plan_table.SCHEMA.names if isinstance(file, Plan) else profile_table.SCHEMA.names
    return pd.DataFrame(list(map(attrgetter(*columns), file.rows)), columns=columns, dtype=object)


def _row_changes(a: pd.DataFrame, b: pd.DataFrame, *, key: tuple[str, ...]) -> tuple[RowChange, ...]:
    names = [name for name in a.columns if name not in key]
    both = a.merge(b, on=list(key), how="outer", suffixes=("_a", "_b"), indicator=True).sort_values(list(key))
    differs = pd.DataFrame(
        {
            name: (both[f"{name}_a"] != both[f"{name}_b"]) & ~(both[f"{name}_a"].isna() & both[f"{name}_b"].isna())
            for name in names
        }
    )
    touched = (both["_merge"] != "both") | differs.any(axis=1)
    changes = []
    for position in both.index[touched]:
        row = both.loc[position]
        side = row["_merge"]
        held = "b" if side == "right_only" else "a"
        changes.append(
            RowChange(
                change={"both": "changed", "left_only": "removed", "right_only": "added"}[str(side)],
                key={**{name: row[name] for name in key}, "module": row[f"module_{held}"], "op": row[f"op_{held}"]},
                fields={
                    name: (row[f"{name}_a"], row[f"{name}_b"])
                    for name in names
                    if side == "both" and differs.loc[position, name]
                },
            )
        )
    return tuple(changes)


def _totals(file: Profile | Plan) -> dict[str, float]:
    if isinstance(file, Plan):
        return {
            f"rung {rung.rung} {name}": getattr(rung, name)
            for rung in file.meta.rungs
            for name in ("step_us", "peak_bytes", "held_bytes", "predicted_risk", "stored", "compressed", "recomputed")
        }
    static, plain = file.meta.static_bytes.total, [row for row in file.rows if row.codec == NO_CODEC]
    return {
        "units": len(plain),
        "static_bytes": static,
        "plain_us": file.meta.timing.plain_us,
        "gc_us": file.meta.timing.gc_us,
        "plain_peak_bytes": static + file.meta.memory.plain_peak_bytes,
        "gc_peak_bytes": static + file.meta.memory.gc_peak_bytes,
        "recompute_us": sum(row.recompute_us for row in plain),
        "saved_bytes": sum(row.bytes for row in plain if row.saved),
    }


def difference_facts(found: Difference) -> dict[str, Any]:
    """The keys that `hilore diff --json` promises."""
    return {
        "same": found.same,
        "changed": [{"change": row.change, **row.key, "fields": row.fields} for row in found.rows],
        "metadata": found.metadata,
        "totals": {
            **{name: {"a": a, "b": b} for name, (a, b) in found.totals.items()},
            "rows_added": sum(row.change == "added" for row in found.rows),
            "rows_removed": sum(row.change == "removed" for row in found.rows),
            "rows_changed": sum(row.change == "changed" for row in found.rows),
        },
    }


def changed_metadata(found: Difference) -> Grid:
    """Metadata that differs; totals have a table of their own."""
    rows = tuple(
        (name, a or "", b or "")
        for name, (a, b) in found.metadata.items()
        if not name.startswith(("rungs[", "memory.", "timing."))
    )
    return Grid(title="metadata" if rows else "no metadata differ", header=("name", "a", "b"), rows=rows, words=3)


def changed_rows(found: Difference, *, limit: int) -> Grid:
    """The first rows that differ."""
    rows = tuple(
        (
            row.change,
            " ".join(f"{name} {value}" for name, value in row.key.items() if value not in ("", "none")),
            ", ".join(f"{name} {_short(a)} -> {_short(b)}" for name, (a, b) in row.fields.items()),
        )
        for row in found.rows[:limit]
    )
    left = len(found.rows) - len(rows)
    title = f"rows: {len(found.rows)} differ" + (f", the first {limit} of them" if left else "")
    return Grid(title=title, header=("change", "row", "what"), rows=rows, words=3)


def changed_totals(found: Difference) -> Grid:
    """Totals that moved, and by how much."""
    rows = tuple(
        (name, _amount(name, a), _amount(name, b), f"{(b - a) / a:+.1%}" if a else "")
        for name, (a, b) in found.totals.items()
        if a != b
    )
    return Grid(title="totals" if rows else "no total moved", header=("", "a", "b", "change"), rows=rows)


def _amount(name: str, value: float) -> str:
    if name.endswith("_us"):
        return milliseconds(value)
    return format_bytes(int(value)) if name.endswith("_bytes") else f"{value:.4g}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
