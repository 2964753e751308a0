"""`hilore show`: read a profile or a plan."""

# ruff: noqa: PLC0415 - Parquet is imported once there is a file to read

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import newest
from hilore_cli.errors import FileError

EXAMPLE = (
    "Example: hilore show plans/qwen3-1.7b-48GB-r0.01.parquet\n\n"
    'Example: git config diff.hilore.textconv "hilore show --text"'
)


def command(
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The newest in plans/ if left out.", show_default=False)
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="A stable line a row, for git; a damaged file is one line, not an error.")
    ] = False,
    json: flags.Json = False,
) -> None:
    """Show a profile or a plan for people, or as stable text for git."""
    output = Output(as_json=json)
    if file is None:
        file, note = newest("plan")
        output.note(note)

    from hilore_cli.cli.files import load_file
    from hilore_cli.tables.plan_table import Plan

    if text and not json:
        output.show(_dump(file))
        return
    loaded = load_file(file)
    if json:
        output.emit(
            {
                "file": str(file),
                "kind": "plan" if isinstance(loaded, Plan) else "profile",
                "digest": loaded.digest,
                "metadata": dataclasses.asdict(loaded.meta),
                "rows": [dataclasses.asdict(row) for row in loaded.rows],
            }
        )
    elif isinstance(loaded, Plan):
        from hilore_cli.report.plan_view import margin_line, plan_rungs, plan_summary, plan_units

        output.show(*plan_summary(loaded), plan_rungs(loaded), margin_line(loaded), plan_units(loaded))
    else:
        from hilore_cli.report.profile_view import profile_steps, profile_summary, profile_units

        output.show(*profile_summary(loaded), profile_steps(loaded), profile_units(loaded))


def _dump(file: Path) -> str:
    """A file that is there but cannot be read must not end `git log -p`, which gives up where its textconv fails."""
    from hilore_cli.cli.files import load_file
    from hilore_cli.report.dump import dump_lines

    try:
        return "\n".join(dump_lines(load_file(file)))
    except FileError as error:
        if not file.is_file():
            raise
        return f"unreadable: {error.rule}"
