"""HiGHS inside the process, through PuLP: silent, started from a known plan, its bound kept.

PuLP's own class prints HiGHS's banner to standard output, takes no start, and drops the dual bound. Imported
only where highspy is installed.
"""

import math
from collections.abc import Mapping

import highspy
import pulp


class WarmHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """One solve of a PuLP problem from `start`, values by variable (0 where absent)."""

    def __init__(self, start: Mapping[pulp.LpVariable, float], **options: float) -> None:
        super().__init__(msg=False)
        self._start = start
        self._options = options
        self.bound = -math.inf
        """No solution has an objective below this."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        """Make the model, silent from its first moment."""
        lp.solverModel = _SilentHighs()
        for name, value in self._options.items():
            lp.solverModel.setOptionValue(name, value)

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802 - PuLP's name
        """Run from the start, keep the bound."""
        model = lp.solverModel
        model.setSolution(len(self._start), [variable.index for variable in self._start], list(self._start.values()))
        model.run()
        self.bound = model.getInfo().mip_dual_bound

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802 - PuLP's name
        """PuLP's reading of the result; without a solution it would index an empty list."""
        if not lp.solverModel.getSolution().value_valid:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        found: tuple[int, int] = super().findSolutionValues(lp)
        return found


class _SilentHighs(highspy.Highs):  # type: ignore[misc]
    def enableCallbacks(self) -> None:  # noqa: N802 - highspy's name; called first of all by its constructor
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
