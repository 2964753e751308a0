"""`hilore solve`: compile a profile into a plan."""

# ruff: noqa: PLC0415 - Parquet and the solver are imported once the flags are known to be good

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import command_line, newest, plan_path
from hilore_cli.errors import HiloreError
from hilore_cli.quantities import check_risk, format_bytes, parse_memory

EXAMPLE = (
    "Example: hilore solve --mem 48GB --risk 0.01\n\n"
    "Example: hilore solve --profile profiles/qwen3-1.7b.parquet --mem 1.10gc --json"
)
TIME_LIMIT_S = 120.0


def command(
    *,
    mem: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory cap: 48GB, 44.7GiB, 0.9x (of the device), 1.10gc (of GC's peak)."),
    ],
    risk: Annotated[float, typer.Option(metavar="R", help="Relative gradient error allowed; 0 is exact.")] = 0.0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The newest in profiles/ if left out.", show_default=False)
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="S", help="Seconds for the solver, all rungs together.")
    ] = TIME_LIMIT_S,
    out: flags.Out = None,
    force: flags.Force = False,
    json: flags.Json = False,
) -> None:
    """Solve what to store, compress or recompute under a cap and a risk -> plans/<model>-<mem>-r<risk>.parquet."""
    started = time.perf_counter()
    output = Output(as_json=json)
    cap = parse_memory(mem)
    check_risk(risk)
    if not time_limit > 0:
        raise HiloreError(f"--time-limit {time_limit:g}", "must be above zero", f"{TIME_LIMIT_S:g} is the default")
    if profile is None:
        profile, note = newest("profile")
        output.note(note)

    from hilore_cli.report.plan_view import margin_line, plan_facts, plan_rungs
    from hilore_cli.tables.parquet import check_writable
    from hilore_cli.tables.profile_table import load_profile

    measured = load_profile(profile)
    path = out or plan_path(profile.stem, cap_text=mem.strip(), risk=risk)
    check_writable(path, force=True)  # a folder that cannot be written is known before the solving

    from hilore_cli.solving.solve import profile_warnings, solve

    for warning in profile_warnings(measured):
        output.note(f"warning: {warning}")
    meta = measured.meta
    cap_bytes = cap.resolve(
        gc_peak_bytes=meta.static_bytes.total + meta.memory.gc_peak_bytes, device_bytes=meta.device_bytes
    )
    recorded = {
        "--profile": profile,
        "--mem": mem.strip(),
        "--risk": f"{risk:g}",
        "--time-limit": None if time_limit == TIME_LIMIT_S else f"{time_limit:g}",
    }
    plan = solve(
        measured,
        cap_bytes=cap_bytes,
        risk=risk,
        cap_text=mem.strip(),
        profile_name=profile.name,
        command=command_line("solve", recorded),
        time_limit_s=time_limit,
    )
    digest, written = plan.save(path, force=force)
    plan = dataclasses.replace(plan, digest=digest)
    output.show(
        f"{profile.name} under {mem.strip()} = {format_bytes(cap_bytes)}, risk {risk:g}",
        plan_rungs(plan),
        margin_line(plan),
        f"wrote {path}" if written else f"unchanged {path}",
    )
    facts = {"plan": str(path), "profile": str(profile), **plan_facts(plan), "unchanged": not written}
    output.emit({**facts, "wall_s": time.perf_counter() - started})
