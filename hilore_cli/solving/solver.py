"""Run the integer program and answer for the result: proven gap, honest status, limits checked exactly.

HiGHS runs inside the process through PuLP, on one thread with a fixed seed; CBC stands in where highspy is
missing. PuLP calls a time-limited incumbent optimal in `status`, so only `sol_status` and the bound are read.
"""

import importlib.util
import math
import time
from dataclasses import dataclass

import pulp

from hilore_cli.solving.canonical import canonical
from hilore_cli.solving.evaluate import Assignment, Outcome, evaluate, fits
from hilore_cli.solving.greedy import solve_greedy
from hilore_cli.solving.ilp import Program, build, read_assignment
from hilore_cli.solving.nearest import infeasible
from hilore_cli.solving.presolve import presolve
from hilore_cli.solving.problem import Problem

GAP = 5e-4
"""Of the step time; proven."""
HIGHS, CBC = "HiGHS", "CBC"
OPTIMAL, TIME_LIMIT = "optimal", "time limit"
_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A plan that keeps to its limits, and how good it is proven to be."""

    assignment: Assignment
    outcome: Outcome
    status: str
    """`optimal`: within the gap asked for; `time limit`: the best plan found, farther from the bound."""
    gap: float
    """(step - bound) / step."""
    bound_us: float
    """No plan under these limits is faster than this."""
    greedy_us: float
    """Step time of the greedy plan under the same limits."""


def solver_name() -> str:
    """The solver that `solve_problem` uses here."""
    return HIGHS if importlib.util.find_spec("highspy") else CBC


def solve_problem(
    problem: Problem,
    *,
    cap_bytes: int,
    risk: float,
    cap_text: str = "",
    gap: float = GAP,
    time_limit_s: float = 120.0,
    start: Assignment | None = None,
) -> Solution:
    """The fastest plan under a cap (bytes, static included) and a risk budget, to a relative `gap` of its step.

    `start` is a plan known to fit, for instance that of a smaller budget; the result is never slower than it
    or than the greedy's. Raises Infeasible, with the nearest feasible numbers, if no plan fits.
    """
    deadline = time.monotonic() + time_limit_s
    reduced = presolve(problem, risk=risk)
    greedy = solve_greedy(reduced, cap_bytes=cap_bytes, risk=risk)
    if greedy is None:
        raise infeasible(problem, cap_bytes=cap_bytes, cap_text=cap_text, risk=risk)
    greedy = canonical(reduced, greedy, cap_bytes=cap_bytes, risk=risk)
    found = [greedy] if start is None else [greedy, start]
    cap, risk2, floor_us = float(cap_bytes), risk**2, -math.inf
    for attempt in range(_ATTEMPTS):
        program = build(reduced, cap_bytes=cap, risk2=risk2)
        left_s = max(deadline - time.monotonic(), 0.05)
        solved, bound_us = _run(program, reduced, gap=gap, time_limit_s=left_s)
        if attempt == 0:
            floor_us = bound_us
        if not solved:
            break
        plan = read_assignment(program)
        outcome = evaluate(problem, plan)
        if fits(outcome, cap_bytes=cap_bytes, risk=risk):
            found.append(canonical(reduced, plan, cap_bytes=cap_bytes, risk=risk))
            break
        # the solver's tolerance let it overstep: ask for that much more room, and again
        cap -= max(0, outcome.peak_bytes - cap_bytes)
        risk2 -= max(0.0, outcome.risk2 - risk**2)
    return _answer(problem, found, greedy=greedy, floor_us=floor_us, gap=gap)


def _answer(problem: Problem, found: list[Assignment], *, greedy: Assignment, floor_us: float, gap: float) -> Solution:
    outcomes = [evaluate(problem, plan) for plan in found]
    ranks = [(outcome.step_us, outcome.risk2, sum(outcome.held_bytes)) for outcome in outcomes]
    best = ranks.index(min(ranks))
    step_us = outcomes[best].step_us
    bound_us = min(floor_us, step_us)
    proven = (step_us - bound_us) / step_us if step_us else 0.0
    return Solution(
        assignment=found[best],
        outcome=outcomes[best],
        status=OPTIMAL if proven <= gap + 1e-9 else TIME_LIMIT,
        gap=proven,
        bound_us=bound_us,
        greedy_us=evaluate(problem, greedy).step_us,
    )


def _run(program: Program, problem: Problem, *, gap: float, time_limit_s: float) -> tuple[bool, float]:
    """Solve in place; whether a solution was found, and a lower bound on the step in microseconds."""
    # the gap is promised on the whole step, the program sees what replay adds to it
    absolute = gap * problem.plain_us / program.scale.us
    floor_us = problem.plain_us + len(problem.layers) * min(problem.checkpoint_us, 0.0)
    run = _run_highs if solver_name() == HIGHS else _run_cbc
    solved, above_us = run(program, absolute=absolute, time_limit_s=time_limit_s)
    return solved, max(floor_us, problem.plain_us + above_us)


def _run_highs(program: Program, *, absolute: float, time_limit_s: float) -> tuple[bool, float]:
    from hilore_cli.solving.highs import QuietHiGHS  # noqa: PLC0415 - highspy may be missing

    solver = QuietHiGHS(threads=1, random_seed=0, time_limit=float(time_limit_s), mip_abs_gap=absolute, mip_rel_gap=0.0)
    program.lp.solve(solver)
    return _has_solution(program), solver.bound * program.scale.us


def _run_cbc(program: Program, *, absolute: float, time_limit_s: float) -> tuple[bool, float]:
    solver = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        msg=False,
        threads=1,
        timeLimit=time_limit_s,
        gapAbs=absolute,
        gapRel=0.0,
        options=["randomSeed 1", "randomCbcSeed 1"],
    )
    program.lp.solve(solver)
    if program.lp.sol_status != pulp.LpSolutionOptimal:
        return _has_solution(program), -math.inf
    # CBC's own bound does not come through PuLP
    return True, (program.lp.objective.value() - absolute) * program.scale.us


def _has_solution(program: Program) -> bool:
    return program.lp.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
