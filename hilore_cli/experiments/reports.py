"""What verification found: predicted beside measured, and which promises broke. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One variant's figures for a micro-batch: predicted or measured."""

    peak_bytes: int
    step_us: float
    """Median over rounds, where measured."""
    fastest_us: float
    cpu_us: float
    """Median CPU time of the process."""
    risk: float
    """Relative L2 error of the update's gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """One rung of a plan, run against plain and GC in turn."""

    plan: str
    rung: int
    predicted: Promise
    """Times scaled to this run: the plan's ratio to plain, times the plain step measured here."""
    measured: Promise
    gc: Promise
    plain: Promise
    tax_recovered: float
    """From each variant's fastest round, the steadiest figure where others use the machine."""
    tax_recovered_median: float
    """From medians."""
    time_ratio: float
    """Measured over predicted ratio to plain; the most favourable of median, fastest round and CPU time."""
    forward_equal: bool
    bit_equal: bool
    """Every parameter's gradient is bit for bit that of plain training."""
    held_plan_bytes: int
    held_measured_bytes: int
    cap_bytes: int
    risk_budget: float
    rounds: int
    broken: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every promise holds."""
        return not self.broken
