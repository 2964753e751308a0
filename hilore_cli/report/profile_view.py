"""A profile for people: what was run, what it took, and what its units cost, summed over layers."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from hilore_cli.quantities import format_bytes
from hilore_cli.report.grid import Grid, milliseconds, percent
from hilore_cli.tables.profile_table import INPUT_UNIT, NO_CODEC, Calibration, Profile, ProfileRow


def profile_facts(profile: Profile) -> dict[str, Any]:
    """The keys that `hilore profile --json` promises."""
    meta = profile.meta
    static = meta.static_bytes
    return {
        "digest": profile.digest,
        "model": meta.identity.model,
        "layers": meta.identity.layers,
        "units": len(_units(profile)),
        "shape": dataclasses.asdict(meta.shape),
        "static_bytes": {**dataclasses.asdict(static), "total": static.total},
        "plain": {"step_ms": meta.timing.plain_us / 1000, "peak_bytes": static.total + meta.memory.plain_peak_bytes},
        "gc": {"step_ms": meta.timing.gc_us / 1000, "peak_bytes": static.total + meta.memory.gc_peak_bytes},
    }


def profile_summary(profile: Profile) -> tuple[str, ...]:
    """What was run, a fact a line."""
    meta, work, shape = profile.meta, profile.meta.workload, profile.meta.shape
    static = meta.static_bytes
    return (
        (
            f"model       {meta.identity.model} ({meta.identity.model_class}, {meta.identity.layers} layers, "
            f"{meta.identity.dtype}, {meta.identity.attention}, adapter {meta.identity.adapter})"
        ),
        f"weights     {work.weights} {work.weights_digest[:12]}",
        f"micro-batch {shape.micro_batch} x ({shape.prompt_tokens} prompt + {shape.response_tokens} response) tokens",
        f"rollouts    {work.rollouts} {work.rollouts_digest[:12]}, mean reward {work.mean_reward:.3g}",
        f"loss        {work.loss}",
        (
            f"machine     {work.device}, {format_bytes(meta.device_bytes)}; torch {work.torch_version}, "
            f"transformers {work.transformers_version}"
        ),
        (
            f"static      {format_bytes(static.total)}: parameters {format_bytes(static.parameters)}, gradients "
            f"{format_bytes(static.gradients)}, {work.optimizer} {format_bytes(static.optimizer)}, "
            f"buffers {format_bytes(static.buffers)}"
        ),
        (
            f"calibration {meta.calibration.micro_batches} micro-batches, gradient norm per exposure "
            f"{meta.calibration.gamma:.4g}; {_spread(meta.calibration)}; codecs measured: "
            f"{', '.join(meta.calibration.measured_codecs) or 'none'}"
        ),
        f"digest      {profile.digest}",
        f"made by     {meta.command}",
    )


def profile_steps(profile: Profile) -> Grid:
    """Plain beside gradient checkpointing."""
    meta = profile.meta
    static, timing, memory = meta.static_bytes.total, meta.timing, meta.memory
    measured = "" if memory.plain_peak_measured else " (computed)"
    return Grid(
        title="micro-batch",
        header=("", "step", "fastest", "peak"),
        rows=(
            (
                "plain",
                milliseconds(timing.plain_us),
                milliseconds(timing.plain_fastest_us),
                format_bytes(static + memory.plain_peak_bytes) + measured,
            ),
            (
                "GC",
                milliseconds(timing.gc_us),
                milliseconds(timing.gc_fastest_us),
                format_bytes(static + memory.gc_peak_bytes),
            ),
        ),
    )


def profile_units(profile: Profile) -> Grid:
    """Units of all layers by what they are, dearest replay first; the best codec by its gain."""
    groups: dict[tuple[str, str, int, int], list[ProfileRow]] = defaultdict(list)
    for row in profile.rows:
        if row.unit != INPUT_UNIT and row.layer < profile.meta.identity.layers:
            groups[row.module, row.op, row.occurrence, row.leaf].append(row)
    rows = []
    for (module, op, occurrence, leaf), members in groups.items():
        plain = [row for row in members if row.codec == NO_CODEC]
        spent = sum(row.recompute_us for row in plain)
        name = op + (f" #{occurrence}" if occurrence else "") + (f" .{leaf}" if leaf else "")
        cells = (
            module or "layer",
            name,
            "yes" if any(row.saved for row in plain) else "no",
            str(len(plain)),
            format_bytes(max((row.bytes for row in plain), default=0)),
            milliseconds(spent),
            *_best_codec(members),
        )
        rows.append((spent, cells))
    rows.sort(key=lambda entry: -entry[0])
    return Grid(
        title="units of the decoder layers, all layers together, dearest to recompute first",
        header=("module", "op", "saved", "layers", "bytes each", "recompute", "least error", "codec"),
        rows=tuple(cells for _, cells in rows),
        words=3,
    )


def _best_codec(rows: Iterable[ProfileRow]) -> tuple[str, str]:
    by_codec: dict[str, list[ProfileRow]] = defaultdict(list)
    for row in rows:
        if row.codec != NO_CODEC:
            by_codec[row.codec].append(row)
    if not by_codec:
        return "", ""
    codec, best = min(by_codec.items(), key=lambda entry: max(row.error for row in entry[1]))
    return percent(max(row.error for row in best)), codec


def _units(profile: Profile) -> set[tuple[int, int]]:
    return {(row.layer, row.unit) for row in profile.rows if row.unit != INPUT_UNIT and row.codec == NO_CODEC}


def _spread(calibration: Calibration) -> str:
    if not calibration.ratios:
        return "gains not checked"
    low, high = min(calibration.ratios), max(calibration.ratios)
    return (
        f"errors {low:.2f} to {high:.2f} times those predicted on {len(calibration.ratios)} other micro-batches, "
        f"margin {calibration.margin:.2f}"
    )
