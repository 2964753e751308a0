"""A plan for people: its ladder of rungs, the ILP's margin over the greedy, and what becomes of each kind of unit."""

import dataclasses
from collections import Counter, defaultdict
from typing import Any

from hilore_cli.quantities import format_bytes
from hilore_cli.report.grid import Grid, milliseconds, percent
from hilore_cli.tables.plan_table import COMPRESS, RECOMPUTE, STORE, Plan, Rung


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The keys that `hilore solve --json` promises."""
    chosen = chosen_rung(plan)
    return {
        "digest": plan.digest,
        "status": chosen.status,
        "gap": chosen.gap,
        "bound_ms": chosen.bound_us / 1000,
        "cap_bytes": plan.meta.cap_bytes,
        "risk": plan.meta.risk,
        "chosen": plan.meta.chosen,
        "rungs": [rung_facts(rung) for rung in plan.meta.rungs],
    }


def rung_facts(rung: Rung) -> dict[str, Any]:
    """One rung, times in milliseconds."""
    facts = dataclasses.asdict(rung)
    for name in ("step", "bound", "greedy"):
        facts[f"{name}_ms"] = facts.pop(f"{name}_us") / 1000
    return facts


def chosen_rung(plan: Plan) -> Rung:
    """The rung that was solved for the plan's own risk."""
    return next(rung for rung in plan.meta.rungs if rung.rung == plan.meta.chosen)


def plan_summary(plan: Plan) -> tuple[str, ...]:
    """What the plan is for, a fact a line."""
    meta = plan.meta
    return (
        (
            f"model       {meta.model} ({meta.model_class}, {meta.layers} layers, {meta.dtype}, {meta.attention}, "
            f"adapter {meta.adapter})"
        ),
        f"good for    {meta.micro_batch} sequences of at most {meta.tokens} tokens",
        f"profile     {meta.profile_name} {meta.profile_digest[:12]}",
        f"cap         {meta.cap_text} = {format_bytes(meta.cap_bytes)}, {format_bytes(meta.static_bytes)} of it static",
        f"plain       {milliseconds(meta.plain_us)} at {format_bytes(meta.plain_peak_bytes)}",
        f"GC          {milliseconds(meta.gc_us)} at {format_bytes(meta.gc_peak_bytes)}",
        f"solver      {meta.solver}",
        f"digest      {plan.digest}",
        f"made by     {meta.command}",
    )


def plan_rungs(plan: Plan) -> Grid:
    """The ladder; the chosen rung stands out."""
    rows = tuple(
        (
            f"{rung.rung}{' *' if rung.rung == plan.meta.chosen else ''}",
            percent(rung.risk),
            percent(rung.predicted_risk),
            milliseconds(rung.step_us),
            format_bytes(rung.peak_bytes),
            percent(rung.tax_recovered),
            str(rung.stored),
            str(rung.compressed),
            str(rung.recomputed),
            f"{rung.plain_layers}/{plan.meta.layers}",
            milliseconds(rung.greedy_us),
            percent(greedy_margin(rung)),
            f"{rung.status} {percent(rung.gap)}",
        )
        for rung in plan.meta.rungs
    )
    header = (
        "rung",
        "risk <=",
        "risk",
        "step",
        "peak",
        "tax back",
        "store",
        "compress",
        "recompute",
        "plain",
        "greedy",
        "margin",
        "gap",
    )
    chosen = frozenset(position for position, rung in enumerate(plan.meta.rungs) if rung.rung == plan.meta.chosen)
    return Grid(title="rungs (* solved for --risk)", header=header, rows=rows, emphasis=chosen)


def greedy_margin(rung: Rung) -> float:
    """How much of the greedy's step time the ILP saves."""
    return (rung.greedy_us - rung.step_us) / rung.greedy_us if rung.greedy_us > 0 else 0.0


def margin_line(plan: Plan) -> str:
    """The ILP against the greedy at the chosen rung, in one line."""
    rung = chosen_rung(plan)
    saved = milliseconds(rung.greedy_us - rung.step_us)
    return (
        f"the ILP's step is {saved} ({percent(greedy_margin(rung))}) shorter than the greedy's; "
        f"no plan can be below {milliseconds(rung.bound_us)}"
    )


def plan_units(plan: Plan) -> Grid:
    """What becomes of each kind of unit at the chosen rung, most held bytes first."""
    actions: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    codecs: dict[tuple[str, str], set[str]] = defaultdict(set)
    held: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for row in plan.rung_rows(plan.meta.chosen):
        kind = (row.module or "layer", row.op)
        actions[kind][row.action] += 1
        held[kind] += row.held_bytes
        spent[kind] += round(row.recompute_us + row.codec_us)
        if row.action == COMPRESS:
            codecs[kind].add(row.codec)
    rows = tuple(
        (
            *kind,
            ", ".join(sorted(codecs[kind])),
            *(str(actions[kind][action] or "") for action in (STORE, COMPRESS, RECOMPUTE)),
            format_bytes(held[kind]),
            milliseconds(spent[kind]),
        )
        for kind in sorted(actions, key=lambda kind: (-held[kind], kind))
    )
    header = ("module", "op", "codecs", "store", "compress", "recompute", "held", "replay + codec")
    return Grid(title=f"units at rung {plan.meta.chosen}, all layers together", header=header, rows=rows, words=3)
