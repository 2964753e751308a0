"""Predicted against measured risk, one point an update."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hilore_cli.errors import HiloreError
from hilore_cli.tables.parquet import check_writable

if TYPE_CHECKING:
    from hilore_cli.experiments.reports import UpdatesReport

SUFFIXES = (".png", ".svg")


def check_plot(path: Path, *, force: bool) -> None:
    """Raise HiloreError now rather than after the run if the plot cannot be drawn there."""
    if path.suffix not in SUFFIXES:
        raise HiloreError(f"--plot {path}", f"ends in none of {', '.join(SUFFIXES)}", "name it risk.svg, say")
    check_writable(path, force=force)
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise HiloreError("--plot", "needs the package matplotlib", "pip install 'hilore[plot]'") from error


def plot_risk(path: Path, reports: Sequence["UpdatesReport"]) -> None:
    """Draw every report's updates and its budget into one figure. Raises HiloreError if it cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    highest = 0.0
    for number, report in enumerate(reports):
        compressed = [one for one in report.updates if one.measured_risk]
        name = "rungs by exposure" if report.rung is None else f"rung {report.rung}"
        predicted = [one.predicted_risk for one in compressed]
        measured = [one.measured_risk for one in compressed]
        label = f"{name}: within {report.risk_budget:g} in {report.share_within:.0%} of {len(report.updates)}"
        axes.scatter(predicted, measured, s=18, alpha=0.7, color=f"C{number}", label=label)
        axes.axhline(report.risk_budget, color=f"C{number}", linewidth=0.8, linestyle=":")
        highest = max([highest, report.risk_budget, *predicted, *measured])
    axes.plot([0, highest], [0, highest], color="grey", linewidth=0.8)
    axes.set(
        xlabel="predicted risk of an update", ylabel="measured", xlim=(0, 1.05 * highest), ylim=(0, 1.05 * highest)
    )
    axes.legend(loc="upper left")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
        temporary.replace(path)
    except OSError as error:
        raise HiloreError(f"--plot {path}", f"cannot be written ({error.strerror})", "choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)
