"""The risk of one update: rungs chosen from the exposures known before it, audited as the exact ones become known."""

import math
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Literal

from hilore_cli.errors import HiloreError, RiskExceeded
from hilore_cli.runtime.choice import RungCost, choose_rungs

OnExcess = Literal["replan", "warn", "raise"]
ON_EXCESS: tuple[OnExcess, ...] = ("replan", "warn", "raise")
_ROUNDING = 1e-9
_ESTIMATED = 0.1
"""Of the squared risk: how far an estimate may be above the budget while exposures are still to come."""


class UpdateBudget:
    """One update's risk budget, and the rungs that it is spent on.

    Args:
        costs: what each rung costs.
        exposures: of each micro-batch, in order; bounds where the exact ones are not known yet.
        risk: relative L2 error of the update's gradient that is allowed.
        gradient_exposure: the norm of the update's gradient in units of exposure (norm / Gamma); None is the exposure
            of the update itself, as in the profile.
        on_excess: what to do once the budget is exceeded: choose again for the micro-batches still to come, warn, or
            raise RiskExceeded. A choice that cannot bring the update back into its budget warns too.
    """

    def __init__(
        self,
        costs: Sequence[RungCost],
        exposures: Sequence[float],
        *,
        risk: float,
        gradient_exposure: float | None = None,
        on_excess: OnExcess = "warn",
    ) -> None:
        if on_excess not in ON_EXCESS:
            raise HiloreError(f"on_excess={on_excess!r}", f"is none of {', '.join(ON_EXCESS)}", "'warn' is the default")
        self._costs = list(costs)
        self._risk2 = {cost.rung: cost.risk2 for cost in costs}
        self._planned = [_checked(exposure) for exposure in exposures]
        self._exact: list[float] = []
        self._risk = risk
        self._gradient_exposure = None if gradient_exposure is None else _checked(gradient_exposure, "gradient norm")
        self._on_excess = on_excess
        self._told = False
        self.rungs = choose_rungs(self._costs, self._planned, budget2=self._budget2)

    @property
    def _exposures(self) -> list[float]:
        """Exact ones, and for the others what was planned.

        Where the budget is relative, plans that were off so far by a common factor are taken to be so to the end:
        bounds often are, and the risk does not feel it. The median keeps one odd micro-batch from deciding that.
        """
        rest = self._planned[len(self._exact) :]
        if self._gradient_exposure is not None:
            return [*self._exact, *rest]
        factor = median([1.0, *(exact / plan for exact, plan in zip(self._exact, self._planned, strict=False) if plan)])
        return [*self._exact, *(factor * exposure for exposure in rest)]

    @property
    def _budget2(self) -> float:
        if self._gradient_exposure is not None:
            return self._risk**2 * self._gradient_exposure**2
        return self._risk**2 * sum(exposure**2 for exposure in self._exposures)

    def _error2(self, exposures: Sequence[float]) -> float:
        return sum(self._risk2[rung] * exposure**2 for rung, exposure in zip(self.rungs, exposures, strict=False))

    @property
    def risk(self) -> float:
        """Predicted relative error of the update's gradient, with what is known now."""
        budget2 = self._budget2
        return self._risk * math.sqrt(self._error2(self._exposures) / budget2) if budget2 else 0.0

    def audit(self, exposure: float) -> list[int]:
        """Take in the exact exposure of the next micro-batch; returns the update's rungs as they now are.

        Raises RiskExceeded if that is what was asked for, IndexError past the last micro-batch.
        """
        if len(self._exact) == len(self.rungs):
            raise IndexError("every micro-batch of this update has been audited")
        self._exact.append(_checked(exposure))
        before = self.risk
        if self._on_excess == "replan" and before > self._risk:
            self._replan()
        if self._exceeded and not self._told:
            self._told = True
            self._tell(before)
        return self.rungs

    @property
    def _exceeded(self) -> bool:
        slack = _ROUNDING if len(self._exact) == len(self.rungs) else _ESTIMATED
        return self._error2(self._exposures) > self._budget2 * (1 + slack)

    def _replan(self) -> None:
        done = len(self._exact)
        left2 = self._budget2 - self._error2(self._exact)
        self.rungs = self.rungs[:done] + choose_rungs(self._costs, self._exposures[done:], budget2=left2)

    def _tell(self, before: float) -> None:
        rule = (
            f"the risk of this update is {self.risk:.3g}, its budget {self._risk:.3g}, after {len(self._exact)} of "
            f"{len(self.rungs)} micro-batches: their exposures are not those that the choice of rungs was told"
        )
        if self._on_excess == "raise":
            hint = "choose with exposure_bound before the forward, or on_excess='replan'"
            raise RiskExceeded("update", rule, hint)
        planned_again = f" (it was {before:.3g} before choosing again)" if self._on_excess == "replan" else ""
        warnings.warn(rule + planned_again, RuntimeWarning, stacklevel=4)


def _checked(value: float, name: str = "exposure") -> float:
    if not (math.isfinite(value) and value >= 0):
        raise HiloreError(f"{name} {value}", "must be finite and not negative", "check advantages and rewards")
    return float(value)
