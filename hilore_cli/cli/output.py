"""Where commands print: results on stdout, notes and progress on stderr; with `--json`, one object and nothing else."""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console

from hilore_cli.report.grid import Grid
from hilore_cli.report.progress import PlainProgress, RichProgress


class Output:
    """One command's output; `show` is silent and `emit` speaks with `--json`, and the other way round without."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without ticks and arrows is no reason to fail

    def note(self, text: str) -> None:
        """One line on stderr."""
        sys.stderr.write(f"{text}\n")

    def show(self, *parts: Grid | str) -> None:
        """Tables and lines for people: drawn by rich on a terminal, plain in a pipe."""
        if self._as_json:
            return
        console = Console(highlight=False, markup=False) if sys.stdout.isatty() else None
        for part in parts:
            if console is None:
                sys.stdout.write(f"{part.as_text() if isinstance(part, Grid) else part}\n")
            else:
                console.print(part.as_table() if isinstance(part, Grid) else part)

    def emit(self, facts: Mapping[str, Any]) -> None:
        """The JSON object that scripts read."""
        if self._as_json:
            sys.stdout.write(f"{json.dumps(_finite(facts), indent=2, allow_nan=False)}\n")

    def progress(self) -> AbstractContextManager[RichProgress | PlainProgress]:
        """A bar on a terminal, one line a stage elsewhere; both on stderr."""
        return RichProgress(Console(stderr=True)) if sys.stderr.isatty() else PlainProgress(self.note)


def _finite(value: Any) -> Any:
    """JSON has no nan and no infinity: null stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
