"""What verification found: predicted beside measured, and which promises broke. Imports no torch."""

from dataclasses import dataclass

SHARE_WITHIN = 0.95
"""Of held-out updates, the share whose risk is promised to be within the budget (DESIGN section 4)."""
UPDATE_SEQUENCES = 8
"""The fewest sequences of an update that this is promised for: a group, as GRPO commonly draws it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOutcome:
    """One held-out update, run exactly and under the plan."""

    predicted_risk: float
    measured_risk: float
    exposures: tuple[float, ...]
    """Of its micro-batches, exactly."""
    rungs: tuple[int, ...]
    skippable: int
    """Micro-batches without any gradient: every loss coefficient 0, and no KL term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatesReport:
    """Whole updates at one rung, or at rungs chosen by exposure."""

    plan: str
    rung: int | None
    """None: a rung a micro-batch, by its exposure."""
    risk_budget: float
    micro_batches: int
    """In each update."""
    step_us: float
    """Predicted time of a micro-batch, on average."""
    tax_recovered: float
    """Predicted."""
    updates: tuple[UpdateOutcome, ...]

    @property
    def share_within(self) -> float:
        """Of the updates whose measured risk is within the budget."""
        return self.within / len(self.updates)

    @property
    def within(self) -> int:
        """Updates whose measured risk is within the budget."""
        return sum(one.measured_risk <= self.risk_budget for one in self.updates)

    @property
    def predicted_over_measured(self) -> tuple[float, ...]:
        """Ascending, of the updates in which anything was compressed."""
        return tuple(sorted(one.predicted_risk / one.measured_risk for one in self.updates if one.measured_risk))

    @property
    def broken(self) -> tuple[str, ...]:
        """What does not hold, in words with numbers."""
        if self.share_within >= SHARE_WITHIN:
            return ()
        worst = max(one.measured_risk for one in self.updates)
        name = "by exposure" if self.rung is None else f"rung {self.rung}"
        line = (
            f"{name}: risk within {self.risk_budget:.3g} in {self.within} of {len(self.updates)} updates, promised are "
            f"{SHARE_WITHIN:.0%}; the highest is {worst:.3g}"
        )
        return (line,)

    @property
    def ok(self) -> bool:
        """The promise holds."""
        return not self.broken
