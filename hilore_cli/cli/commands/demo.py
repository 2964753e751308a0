"""`hilore demo`: the whole job on a small real model, offline."""

# ruff: noqa: PLC0415 - torch is imported once the flags are known to be good

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.commands.verify import hold, show_reports
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import command_line, plan_path, profile_path
from hilore_cli.errors import HiloreError
from hilore_cli.quantities import check_risk, parse_memory

EXAMPLE = "Example: hilore demo --folder my-demo"
MODEL = "smollm2-135m"
PROFILE_ROUNDS = 3  # verification times the same steps again
MICRO_BATCH, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 64, 128


def command(
    *,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where the profile and the plan go.")] = Path("demo"),
    mem: Annotated[str, typer.Option(metavar="SIZE", help="Memory cap, as for `hilore solve`.")] = "1.10gc",
    risk: Annotated[float, typer.Option(metavar="R", help="Relative gradient error allowed.")] = 0.01,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved timing rounds.")] = 5,
    force: flags.Force = False,
    json: flags.Json = False,
) -> None:
    """Profile SmolLM2-135M on the CPU, solve at 1.10x GC's peak, and verify the exact and the chosen rung."""
    from hilore_cli.cli.commands.solve import TIME_LIMIT_S
    from hilore_cli.measuring.options import WorkloadOptions
    from hilore_cli.tables.parquet import check_writable
    from hilore_cli.tables.profile_table import Shape

    output = Output(as_json=json)
    cap = parse_memory(mem)
    check_risk(risk)
    if rounds < 1:
        raise HiloreError(f"--rounds {rounds}", "must be at least 1", "5 is the default")
    profile_file = profile_path(MODEL, folder=folder)
    plan_file = plan_path(profile_file.stem, cap_text=mem.strip(), risk=risk, folder=folder)
    for path in (profile_file, plan_file):
        check_writable(path, force=force)
    shape = Shape(micro_batch=MICRO_BATCH, prompt_tokens=PROMPT_TOKENS, response_tokens=RESPONSE_TOKENS)
    options = WorkloadOptions(model=MODEL, shape=shape)

    from hilore_cli.experiments.calibration import CALIBRATION_BATCHES
    from hilore_cli.experiments.profiling import profile_actor
    from hilore_cli.experiments.verifying import held_out_batches, verify_plan
    from hilore_cli.experiments.workloads import prepare
    from hilore_cli.report.plan_view import margin_line, plan_facts, plan_rungs
    from hilore_cli.report.profile_view import profile_steps
    from hilore_cli.report.verify_view import verify_facts
    from hilore_cli.solving.solve import profile_warnings, solve

    with output.progress() as progress:
        workload = prepare(options, count=CALIBRATION_BATCHES + held_out_batches(shape), skip=0, progress=progress)
        profile = profile_actor(
            options,
            workload=workload,
            codecs=None,
            rounds=PROFILE_ROUNDS,
            command=command_line("profile", {"--model": MODEL, "--response-tokens": str(RESPONSE_TOKENS)}),
            progress=progress,
        )
        profile_digest, _ = profile.save(profile_file, force=force)
        profile = dataclasses.replace(profile, digest=profile_digest)
        for warning in profile_warnings(profile):
            output.note(f"warning: {warning}")
        meta = profile.meta
        gc_peak_bytes = meta.static_bytes.total + meta.memory.gc_peak_bytes
        plan = solve(
            profile,
            cap_bytes=cap.resolve(gc_peak_bytes=gc_peak_bytes, device_bytes=meta.device_bytes),
            risk=risk,
            cap_text=mem.strip(),
            profile_name=profile_file.name,
            command=command_line("solve", {"--profile": profile_file, "--mem": mem.strip(), "--risk": f"{risk:g}"}),
            time_limit_s=TIME_LIMIT_S,
        )
        plan_digest, _ = plan.save(plan_file, force=force)
        plan = dataclasses.replace(plan, digest=plan_digest)
        exact = [rung.rung for rung in plan.meta.rungs if rung.risk == 0 and rung.rung != plan.meta.chosen]
        reports = verify_plan(
            plan,
            options,
            workload=workload,
            name=str(plan_file),
            rungs=[*exact[:1], plan.meta.chosen],
            rounds=rounds,
            progress=progress,
        )
    output.show(profile_steps(profile), plan_rungs(plan), margin_line(plan))
    show_reports(output, *reports)
    output.show(f"wrote {profile_file}", f"wrote {plan_file}")
    output.emit(
        {
            **verify_facts(reports[-1]),
            "profile": str(profile_file),
            "verified": [verify_facts(report) for report in reports],
            "solved": plan_facts(plan),
        }
    )
    hold(str(plan_file), *reports)
