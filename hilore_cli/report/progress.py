"""How long jobs say where they are: `stage(text, total)` opens a stage, `advance()` counts one step of it."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class RichProgress:
    """A bar a stage, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def stage(self, text: str, total: int) -> None:
        """End the stage before and open one of `total` steps."""
        self._finish()
        self._task = self._bars.add_task(text, total=max(total, 1))

    def advance(self) -> None:
        """One step of the stage is done."""
        if self._task is not None:
            self._bars.advance(self._task)

    def _finish(self) -> None:
        if self._task is not None:
            task = next(task for task in self._bars.tasks if task.id == self._task)
            self._bars.update(self._task, completed=task.total)


class PlainProgress:
    """One line a stage, for a log."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def stage(self, text: str, total: int) -> None:
        """Name the stage."""
        self._write(f"{text} ({total})" if total > 1 else text)

    def advance(self) -> None:
        """Steps are not logged."""
