"""`hilore diff`: what changed between two files."""

# ruff: noqa: PLC0415 - pandas is imported once there is something to compare

from pathlib import Path
from typing import Annotated

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.errors import HiloreError

EXAMPLE = "Example: hilore diff plans/old.parquet plans/new.parquet"


def command(
    *,
    a: Annotated[Path, typer.Argument(metavar="A", help="A plan or a profile.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")],
    limit: Annotated[int, typer.Option(metavar="N", help="Rows to show; --json has them all.", min=0)] = 40,
    json: flags.Json = False,
) -> None:
    """Show what changed between two plans (or profiles); exit 0 if nothing did, 1 if something did."""
    from hilore_cli.cli.files import load_file
    from hilore_cli.tables.plan_table import Plan

    output = Output(as_json=json)
    before, after = load_file(a), load_file(b)
    if isinstance(before, Plan) is not isinstance(after, Plan):
        kinds = ["plan" if isinstance(file, Plan) else "profile" for file in (before, after)]
        raise HiloreError(
            f"{a} {b}", f"are a {kinds[0]} and a {kinds[1]}; both must be of one kind", "name two plans or two profiles"
        )

    from hilore_cli.report.difference import (
        changed_metadata,
        changed_rows,
        changed_totals,
        difference,
        difference_facts,
    )

    found = difference(before, after)
    output.emit({"a": str(a), "b": str(b), **difference_facts(found)})
    if found.same:
        output.show("same contents")
        return
    tables = (changed_metadata(found), changed_rows(found, limit=limit), changed_totals(found))
    output.show(*(table if table.rows else table.title for table in tables))
    raise typer.Exit(code=1)
