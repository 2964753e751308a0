"""HiGHS inside the process, through PuLP: silent, and its bound kept.

PuLP's own class prints HiGHS's banner to standard output and drops the dual bound. No start is given: HiGHS 1.16
loses the objective's offset of a start that its presolve shrinks, and then stops early, calling it optimal; and
on our programs a start saves no time. Imported only where highspy is installed.
"""

import math

import highspy
import pulp


class QuietHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """One solve of a PuLP problem under HiGHS's own options."""

    def __init__(self, **options: float) -> None:
        super().__init__(msg=False)
        self._options = options
        self.bound = -math.inf
        """No solution has an objective below this."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        """Make the model, silent from its first moment."""
        lp.solverModel = _SilentHighs()
        for name, value in self._options.items():
            lp.solverModel.setOptionValue(name, value)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802 - PuLP's name
        """Keep the bound; PuLP's own reading would index an empty list where there is no solution."""
        self.bound = lp.solverModel.getInfo().mip_dual_bound
        if not lp.solverModel.getSolution().value_valid:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        found: tuple[int, int] = super().findSolutionValues(lp)
        return found


class _SilentHighs(highspy.Highs):
    def enableCallbacks(self) -> None:  # noqa: N802 - highspy's name; called first of all by its constructor
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
