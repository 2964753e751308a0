"""`hilore verify`: run a plan and hold it to its promises."""

# ruff: noqa: PLC0415 - torch is imported once the plan and the flags are known to be good

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

EXAMPLE = "Example: hilore verify plans/qwen3-1.7b-48GB-r0.01.parquet --rounds 10"


def command(
    *,
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="The newest in plans/ if left out.", show_default=False)
    ] = None,
    rung: Annotated[
        int | None, typer.Option(metavar="N", help="Another rung than the one solved for --risk.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved rounds of plain, GC and plan.")] = 5,
    model: flags.OtherModel = None,
    weights: flags.Weights = None,
    rollouts: flags.Rollouts = None,
    micro_batch: flags.MicroBatch = None,
    prompt_tokens: flags.PromptTokens = None,
    response_tokens: flags.ResponseTokens = None,
    dtype: flags.Dtype = None,
    attn: flags.Attention = None,
    device: flags.Device = None,
    loss: flags.Loss = None,
    loss_level: flags.LossLevel = None,
    beta: flags.Beta = None,
    eps_low: flags.EpsLow = None,
    eps_high: flags.EpsHigh = None,
    delta: flags.Delta = None,
    optimizer: flags.Optimizer = None,
    seed: flags.Seed = None,
    json: flags.Json = False,
) -> None:
    """Run the actor plain, under GC and under the plan, interleaved; exit 1 if a promise does not hold.

    The workload is the one of the plan's profile, if that lies in profiles/; flags override it.
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
    given = WorkloadFlags(
        model=model,
        weights=weights,
        rollouts=rollouts,
        micro_batch=micro_batch,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        dtype=dtype,
        attention=attn,
        device=device,
        loss=loss,
        loss_level=loss_level,
        beta=beta,
        eps_low=eps_low,
        eps_high=eps_high,
        delta=delta,
        optimizer=optimizer,
        seed=seed,
    )
    options = _workload(loaded, given, output)

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


def _workload(plan: "Plan", given: "WorkloadFlags", output: Output) -> "WorkloadOptions":
    from hilore_cli.cli.workload import check_rollouts, find_profile, options_from_plan, options_from_profile

    profile = find_profile(plan, PROFILES)
    if profile is not None:
        return check_rollouts(given.over(options_from_profile(profile)))
    options = given.over(options_from_plan(plan))
    output.note(
        f"note: the plan's profile is not in {PROFILES}/, so the workload is guessed from the plan: "
        f"{options.shape.micro_batch} x ({options.shape.prompt_tokens} + {options.shape.response_tokens}) tokens, "
        f"loss {options.loss.kind}"
    )
    return options
