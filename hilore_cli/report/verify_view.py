"""Predicted beside measured: the table that says whether a plan keeps its promises."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hilore_cli.quantities import format_bytes
from hilore_cli.report.grid import Grid, milliseconds, percent

if TYPE_CHECKING:
    from hilore_cli.experiments.reports import Promise, UpdatesReport, VerifyReport


def verify_facts(report: "VerifyReport") -> dict[str, Any]:
    """The keys that `hilore verify --json` promises."""
    return {
        "plan": report.plan,
        "rung": report.rung,
        "rounds": report.rounds,
        "predicted": _promise_facts(report.predicted),
        "measured": _promise_facts(report.measured),
        "gc": _promise_facts(report.gc),
        "plain": _promise_facts(report.plain),
        "tax_recovered": report.tax_recovered,
        "tax_recovered_median": report.tax_recovered_median,
        "time_ratio": report.time_ratio,
        "cap_bytes": report.cap_bytes,
        "risk_budget": report.risk_budget,
        "forward_equal": report.forward_equal,
        "bit_equal": report.bit_equal,
        "held_bytes": {"plan": report.held_plan_bytes, "measured": report.held_measured_bytes},
        "ok": report.ok,
        "broken": list(report.broken),
    }


def verify_steps(*reports: "VerifyReport") -> Grid:
    """Plain, GC and each rung, as measured in one interleaved run."""
    first = reports[0]
    rows = [_step_row("plain", first.plain), _step_row("GC", first.gc)]
    rows += [
        _step_row(f"rung {report.rung}", report.measured, error=_error(report), back=percent(report.tax_recovered))
        for report in reports
    ]
    return Grid(
        title=f"measured, {first.rounds} interleaved rounds",
        header=("", "step", "fastest", "peak", "gradient error", "tax recovered"),
        rows=tuple(rows),
        emphasis=frozenset(range(2, len(rows))),
    )


def verify_promises(report: "VerifyReport") -> Grid:
    """Each promise with a tick or a cross."""
    predicted, measured = report.predicted, report.measured
    ratio = f"{report.time_ratio:.2f}x to plain"
    budget = f"<= {percent(report.risk_budget)}" if report.risk_budget else "bit-equal"
    checks = (
        ("peak", format_bytes(predicted.peak_bytes), format_bytes(measured.peak_bytes), _cap(report)),
        (
            "time",
            milliseconds(predicted.step_us),
            milliseconds(measured.step_us),
            ratio,
        ),
        ("risk", percent(predicted.risk), _error(report), budget),
        ("held bytes", format_bytes(report.held_plan_bytes), format_bytes(report.held_measured_bytes), "equal"),
        ("forward", "bit-equal", "bit-equal" if report.forward_equal else "differs", "bit-equal"),
    )
    rows = tuple((_mark(report, name), name, *cells) for name, *cells in checks)
    return Grid(
        title=f"{report.plan}, rung {report.rung}",
        header=("", "promise", "predicted", "measured", "against"),
        rows=rows,
        words=2,
    )


def _cap(report: "VerifyReport") -> str:
    return f"cap {format_bytes(report.cap_bytes)}"


def _mark(report: "VerifyReport", name: str) -> str:
    return "✗ broken" if any(line.startswith(name) for line in report.broken) else "✓ holds"


def _error(report: "VerifyReport") -> str:
    return "bit-equal" if report.bit_equal else percent(report.measured.risk)


def _step_row(name: str, promise: "Promise", *, error: str = "", back: str = "") -> tuple[str, ...]:
    return (
        name,
        milliseconds(promise.step_us),
        milliseconds(promise.fastest_us),
        format_bytes(promise.peak_bytes),
        error,
        back,
    )


def _promise_facts(promise: "Promise") -> dict[str, Any]:
    facts = dataclasses.asdict(promise)
    return {
        "peak_bytes": facts["peak_bytes"],
        **{f"{name}_ms": facts[f"{name}_us"] / 1000 for name in ("step", "fastest", "cpu")},
        "risk": facts["risk"],
    }


def updates_facts(report: "UpdatesReport") -> dict[str, Any]:
    """What `hilore verify --updates --json` says of one variant: the distribution, and every update."""
    ratios = report.predicted_over_measured
    return {
        "plan": report.plan,
        "rung": report.rung,
        "risk_budget": report.risk_budget,
        "micro_batches": report.micro_batches,
        "share_within": report.share_within,
        "predicted_over_measured": {name: _quantile(ratios, at) for name, at in _QUANTILES} if ratios else None,
        "tax_recovered": report.tax_recovered,
        "skippable": sum(one.skippable for one in report.updates),
        "ok": report.ok,
        "broken": list(report.broken),
        "updates": [dataclasses.asdict(one) for one in report.updates],
    }


def updates_summary(*reports: "UpdatesReport") -> Grid:
    """A line a variant: how often the risk held, and how far predictions were from it."""
    rows = []
    for report in reports:
        measured = sorted(one.measured_risk for one in report.updates)
        ratios = report.predicted_over_measured
        rows.append(
            (
                "\u2713 holds" if report.ok else "\u2717 broken",
                "by exposure" if report.rung is None else str(report.rung),
                f"<= {percent(report.risk_budget)}",
                percent(_quantile(measured, 0.5)),
                percent(_quantile(measured, 0.95)),
                percent(report.share_within),
                " to ".join(f"{_quantile(ratios, at):.2f}" for at in (0.05, 0.5, 0.95))
                if ratios
                else "nothing compressed",
                percent(report.tax_recovered),
                str(sum(one.skippable for one in report.updates)),
            )
        )
    first = reports[0]
    return Grid(
        title=f"risk of {len(first.updates)} held-out updates of {first.micro_batches} micro-batches",
        header=(
            "",
            "rung",
            "promise",
            "median",
            "95 %",
            "within",
            "predicted / measured",
            "tax back (predicted)",
            "skippable",
        ),
        rows=tuple(rows),
    )


_QUANTILES = (("lowest", 0.0), ("p05", 0.05), ("median", 0.5), ("p95", 0.95), ("highest", 1.0))


def _quantile(ascending: Sequence[float], at: float) -> float:
    """Between the two nearest values."""
    place = at * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])
