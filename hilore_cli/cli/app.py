"""The command line: one verb a file in `commands`; nothing heavy is imported before a verb needs it."""

from typing import Annotated

import typer

from hilore_cli import __version__
from hilore_cli.cli.commands import demo, diff, doctor, profile, show, solve, verify

app = typer.Typer(
    name="hilore",
    help="Profile the activation memory of a GRPO actor, solve what to store, compress or recompute, and verify it.",
    epilog=(
        "Example: hilore profile --model Qwen/Qwen3-1.7B\n\n"
        "then: hilore solve --mem 48GB --risk 0.01\n\n"
        "then: hilore verify plans/qwen3-1.7b-48GB-r0.01.parquet"
    ),
    no_args_is_help=False,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

for name, module in (
    ("profile", profile),
    ("solve", solve),
    ("verify", verify),
    ("show", show),
    ("diff", diff),
    ("demo", demo),
    ("doctor", doctor),
):
    app.command(name, epilog=module.EXAMPLE)(module.command)


@app.callback()
def hilore(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Print the version, or the help where no verb is given."""
    if version:
        typer.echo(f"hilore {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
