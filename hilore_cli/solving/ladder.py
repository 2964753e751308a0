"""A ladder of rungs: the same cap at several risks, so that the runtime can spend risk where it costs least.

Risk never decides whether a plan fits (see `nearest`), so either every rung exists or none does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hilore_cli.solving.nearest import infeasible, smallest_risk
from hilore_cli.solving.problem import Problem
from hilore_cli.solving.solver import GAP, Solution, solve_problem

MULTIPLES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedRung:
    """One rung: the risk it was solved under and the solution."""

    risk: float
    solution: Solution


def ladder_risks(risk: float, multiples: Sequence[float] = MULTIPLES) -> tuple[float, ...]:
    """The risks to solve at, ascending: multiples of the one asked for and itself, those of 1 and above left out."""
    return tuple(sorted({risk * multiple for multiple in (*multiples, 1.0) if risk * multiple < 1.0}))


def solve_ladder(
    problem: Problem,
    *,
    cap_bytes: int,
    risk: float,
    cap_text: str = "",
    gap: float = GAP,
    time_limit_s: float = 120.0,
    multiples: Sequence[float] = MULTIPLES,
) -> tuple[SolvedRung, ...]:
    """Solve every rung under the cap (bytes, static included); a larger budget is never slower.

    The time limit is for all rungs together; what one leaves is shared by those after it. Raises Infeasible.
    """
    if smallest_risk(problem, cap_bytes=cap_bytes) is None:
        raise infeasible(problem, cap_bytes=cap_bytes, cap_text=cap_text, risk=risk)
    deadline = time.monotonic() + time_limit_s
    risks = ladder_risks(risk, multiples)
    rungs: list[SolvedRung] = []
    for position, budget in enumerate(risks):
        solution = solve_problem(
            problem,
            cap_bytes=cap_bytes,
            risk=budget,
            gap=gap,
            time_limit_s=max(deadline - time.monotonic(), 0.0) / (len(risks) - position),
            start=rungs[-1].solution.assignment if rungs else None,
        )
        rungs.append(SolvedRung(risk=budget, solution=solution))
    return tuple(rungs)
