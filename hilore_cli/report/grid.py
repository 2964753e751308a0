"""A table that rich draws on a terminal and that stays plain, aligned text in a pipe."""

from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Cells by row; words to the left, numbers to the right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """How many leading columns are words."""
    emphasis: frozenset[int] = frozenset()
    """Rows to make bold: the chosen rung, the plan among its baselines."""

    def as_table(self) -> Table:
        """For a terminal."""
        table = Table(
            title=self.title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for position, name in enumerate(self.header):
            table.add_column(name, justify="left" if position < self.words else "right", header_style="bold cyan")
        for position, row in enumerate(self.rows):
            style = "bold" if position in self.emphasis else ""
            table.add_row(*(Text(cell, style=_colour(cell)) for cell in row), style=style)
        return table

    def as_text(self) -> str:
        """For a pipe: no colours, no borders, no wrapping."""
        lines = (self.header, *self.rows)
        widths = [max(len(line[position]) for line in lines) for position in range(len(self.header))]
        body = [
            "  ".join(
                cell.ljust(width) if position < self.words else cell.rjust(width)
                for position, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *body] if self.title else body)


def _colour(cell: str) -> str:
    return {"✓": "green", "✗": "bold red"}.get(cell[:1], "")


def milliseconds(us: float) -> str:
    """`81.3 ms`, from microseconds."""
    ms = us / 1000
    return f"{ms:,.0f} ms" if ms >= 999.95 else f"{ms:.1f} ms" if ms >= 9.9995 else f"{ms:.3f} ms"


def percent(share: float) -> str:
    """`12.3 %`; small shares keep two significant digits, and nothing is rounded to zero."""
    value = share * 100
    return f"{value:.1f} %" if abs(value) >= 1 or value == 0 else f"{value:.2g} %"
