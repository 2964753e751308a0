"""`hilore profile`: measure the actor once."""

# ruff: noqa: PLC0415 - torch is imported once the flags are known to be good

import time
from typing import Annotated, Any

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import command_line, profile_path
from hilore_cli.errors import HiloreError

EXAMPLE = (
    "Example: hilore profile --model Qwen/Qwen3-1.7B\n\n"
    "Example: hilore profile --model ./my-model --micro-batch 4 --response-tokens 1024 --rollouts rollouts.parquet"
)


@flags.with_workload
def command(
    *,
    model: flags.Model,
    workload: dict[str, Any],
    codecs: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Measure these codecs only.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved timing rounds.")] = 5,
    out: flags.Out = None,
    force: flags.Force = False,
    json: flags.Json = False,
) -> None:
    """Measure the actor once: bytes, times, data flow and codec errors of every unit -> profiles/<model>.parquet."""
    from hilore_cli.cli.workload import WorkloadFlags
    from hilore_cli.measuring.options import WorkloadOptions
    from hilore_cli.tables.parquet import check_writable

    output = Output(as_json=json)
    given = WorkloadFlags(**workload)
    options = given.over(WorkloadOptions(model=model))
    if rounds < 1:
        raise HiloreError(f"--rounds {rounds}", "must be at least 1", "5 is the default")
    path = out or profile_path(model)
    check_writable(path, force=force)

    from hilore_cli.experiments.profiling import profile_actor
    from hilore_cli.report.profile_view import profile_facts, profile_steps, profile_summary
    from hilore_cli.tables.profile_table import load_profile

    started = time.perf_counter()
    with output.progress() as progress:
        measured = profile_actor(
            options,
            codecs=None if codecs is None else tuple(name.strip() for name in codecs.split(",") if name.strip()),
            rounds=rounds,
            command=command_line("profile", {**given.as_command(), "--codecs": codecs}),
            progress=progress,
        )
    measured.save(path, force=force)
    saved = load_profile(path)
    output.show(*profile_summary(saved), profile_steps(saved), f"wrote {path}")
    output.emit({"profile": str(path), **profile_facts(saved), "wall_s": time.perf_counter() - started})
