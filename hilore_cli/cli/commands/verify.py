"""`hilore verify`: run a plan and hold it to its promises."""

# ruff: noqa: PLC0415 - torch is imported once the plan and the flags are known to be good

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import PROFILES, newest
from hilore_cli.errors import HiloreError, PromiseBroken

if TYPE_CHECKING:
    from hilore_cli.cli.workload import WorkloadFlags
    from hilore_cli.experiments.reports import VerifyReport
    from hilore_cli.measuring.options import WorkloadOptions
    from hilore_cli.tables.plan_table import Plan

UPDATE_SIZE = 8
EXAMPLE = "Example: hilore verify plans/qwen3-1.7b-48GB-r0.01.parquet --rounds 10"


@flags.with_workload
def command(
    *,
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="The newest in plans/ if left out.", show_default=False)
    ] = None,
    rung: Annotated[
        int | None, typer.Option(metavar="N", help="Another rung than the one solved for --risk.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved rounds of plain, GC and plan.")] = 5,
    updates: Annotated[
        int | None,
        typer.Option(metavar="N", help="Measure the risk of N whole held-out updates instead.", show_default=False),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(metavar="M", help="In each of these updates; 8 by default.", show_default=False)
    ] = None,
    by_exposure: Annotated[
        bool, typer.Option("--by-exposure", help="Also choose a rung a micro-batch by its exposure, for --updates.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Predicted against measured risk of --updates.", show_default=False),
    ] = None,
    workload: dict[str, Any],
    force: flags.Force = False,
    json: flags.Json = False,
) -> None:
    """Run the actor plain, under GC and under the plan, interleaved; exit 1 if a promise does not hold.

    The workload is the one of the plan's profile, if that lies in profiles/ or beside the plan; flags override it.
    """
    from hilore_cli.cli.workload import WorkloadFlags
    from hilore_cli.report.verify_view import verify_facts
    from hilore_cli.tables.plan_table import load_plan

    output = Output(as_json=json)
    if plan is None:
        plan, note = newest("plan")
        output.note(note)
    loaded = load_plan(plan)
    check_rung(loaded, rung)
    if rounds < 1:
        raise HiloreError(f"--rounds {rounds}", "must be at least 1", "5 is the default")
    given = WorkloadFlags(**workload)
    if updates is None:
        for flag, is_given in (
            ("--by-exposure", by_exposure),
            ("--plot", plot is not None),
            ("--micro-batches", micro_batches is not None),
        ):
            if is_given:
                raise HiloreError(flag, "goes with --updates", "add --updates 40")
    for flag, count in (("--updates", updates), ("--micro-batches", micro_batches)):
        if count is not None and count < 1:
            raise HiloreError(f"{flag} {count}", "must be at least 1", "an update is often 8 micro-batches")
    if plot is not None:
        from hilore_cli.report.risk_plot import check_plot

        check_plot(plot, force=force)
    options = _workload(plan, loaded, given, output)
    if updates is not None:
        variants = [loaded.meta.chosen if rung is None else rung, *([None] if by_exposure else [])]
        _verify_updates(
            output,
            loaded,
            options,
            name=str(plan),
            variants=variants,
            updates=updates,
            size=micro_batches or UPDATE_SIZE,
            plot=plot,
        )
        return

    from hilore_cli.experiments.verifying import verify_plan

    with output.progress() as progress:
        (report,) = verify_plan(
            loaded,
            options,
            name=str(plan),
            rungs=None if rung is None else [rung],
            rounds=rounds,
            progress=progress,
        )
    show_reports(output, report)
    output.emit(verify_facts(report))
    hold(str(plan), report)


def _verify_updates(
    output: Output,
    plan: "Plan",
    options: "WorkloadOptions",
    *,
    name: str,
    variants: "list[int | None]",
    updates: int,
    size: int,
    plot: Path | None,
) -> None:
    from hilore_cli.experiments.updates import verify_updates
    from hilore_cli.report.verify_view import updates_facts, updates_summary

    with output.progress() as progress:
        reports = verify_updates(
            plan, options, updates=updates, micro_batches=size, rungs=variants, name=name, progress=progress
        )
    broken = [line for report in reports for line in report.broken]
    output.show(updates_summary(*reports))
    variants_facts = [updates_facts(report) for report in reports]
    output.emit({**variants_facts[0], "ok": not broken, "broken": broken, "variants": variants_facts})
    if plot is not None:
        from hilore_cli.report.risk_plot import plot_risk

        plot_risk(plot, reports)
        output.note(f"wrote {plot}")
    if broken:
        hint = "profile again with rollouts of this kind, or solve with a smaller --risk"
        raise PromiseBroken(name, "; ".join(broken), hint)


def check_rung(plan: "Plan", rung: int | None) -> None:
    """A rung that the plan does not have is a mistake of the command line."""
    known = [entry.rung for entry in plan.meta.rungs]
    if rung is not None and rung not in known:
        raise HiloreError(f"--rung {rung}", "is not in the plan", f"it has {', '.join(map(str, known))}")


def show_reports(output: Output, *reports: "VerifyReport") -> None:
    """The steps side by side, then each report's promises."""
    from hilore_cli.report.verify_view import verify_promises, verify_steps

    output.show(verify_steps(*reports), *(verify_promises(report) for report in reports))


def hold(plan: str, *reports: "VerifyReport") -> None:
    """Raise PromiseBroken unless every promise held."""
    broken = [f"rung {report.rung}: {line}" for report in reports for line in report.broken]
    if broken or not all(report.ok for report in reports):
        raise PromiseBroken(
            plan,
            "; ".join(broken) or "does not keep its promises",
            "profile and solve again on this machine, or verify with more --rounds if others use it too",
        )


def _workload(path: Path, plan: "Plan", given: "WorkloadFlags", output: Output) -> "WorkloadOptions":
    from hilore_cli.cli.workload import check_rollouts, find_profile, options_from_plan, options_from_profile

    profile = find_profile(plan, PROFILES, path.parent, path.parent.parent / PROFILES)
    if profile is not None:
        return check_rollouts(given.over(options_from_profile(profile)))
    options = given.over(options_from_plan(plan))
    output.note(
        f"note: the plan's profile is neither in {PROFILES}/ nor beside the plan, so the workload is guessed: "
        f"{options.shape.micro_batch} x ({options.shape.prompt_tokens} + {options.shape.response_tokens}) tokens, "
        f"loss {options.loss.kind}"
    )
    return options
