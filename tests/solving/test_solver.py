import random
from itertools import product

import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilore_cli.errors import Infeasible
from hilore_cli.solving import solver
from hilore_cli.solving.evaluate import evaluate, fits
from hilore_cli.solving.greedy import solve_greedy
from hilore_cli.solving.nearest import frugal_assignment, smallest_cap, smallest_risk
from hilore_cli.solving.presolve import presolve
from hilore_cli.solving.problem import Problem, problem_from_profile
from hilore_cli.solving.solver import OPTIMAL, TIME_LIMIT, solve_problem
from tests.solving.toys import brute_force, dice_of, layer_plans, random_problem, toy_profile

many = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def limits(problem: Problem, dice: random.Random) -> tuple[int, float]:
    """A cap around what the problem needs, and a risk that allows some lossy choices."""
    least = smallest_cap(problem)
    return least + dice.choice((-1, 0, 1, 3, 6, 10, 15, 25, 40, 80)), dice.choice((0.0, 0.1, 0.2, 0.25, 0.5))


@many
@given(seed=seeds)
def test_the_solver_finds_what_brute_force_finds(seed: int) -> None:
    dice = dice_of(seed)
    problem = random_problem(dice)
    cap, risk = limits(problem, dice)
    truth = brute_force(problem, cap_bytes=cap, risk=risk)
    if truth is None:
        with pytest.raises(Infeasible):
            solve_problem(problem, cap_bytes=cap, risk=risk, gap=0.0)
        return
    solution = solve_problem(problem, cap_bytes=cap, risk=risk, gap=0.0)
    assert solution.outcome.step_us == pytest.approx(truth[1].step_us, abs=1e-6)
    assert solution.status == OPTIMAL
    assert solution.bound_us <= truth[1].step_us + 1e-6
    assert solution.outcome == evaluate(problem, solution.assignment)
    assert fits(solution.outcome, cap_bytes=cap, risk=risk)


@many
@given(seed=seeds)
def test_the_smallest_cap_is_the_lowest_peak_of_all_plans(seed: int) -> None:
    problem = random_problem(dice_of(seed))
    plans = product(*(list(layer_plans(layer)) for layer in problem.layers))
    assert smallest_cap(problem) == min(evaluate(problem, plan).peak_bytes for plan in plans)


@many
@given(seed=seeds)
def test_presolve_loses_no_optimal_plan(seed: int) -> None:
    dice = dice_of(seed)
    problem = random_problem(dice)
    cap, risk = limits(problem, dice)
    whole = brute_force(problem, cap_bytes=cap, risk=risk)
    reduced = brute_force(presolve(problem, risk=risk), cap_bytes=cap, risk=risk)
    assert (whole and whole[1].step_us) == (reduced and pytest.approx(reduced[1].step_us))


@many
@given(seed=seeds)
def test_presolve_changes_no_peak_of_the_plans_it_leaves(seed: int) -> None:
    dice = dice_of(seed)
    problem = random_problem(dice)
    reduced = presolve(problem, risk=0.2)
    for _ in range(20):
        plan = tuple(dice.choice(list(layer_plans(layer))) for layer in reduced.layers)
        assert evaluate(reduced, plan).peak_bytes == evaluate(problem, plan).peak_bytes


@many
@given(seed=seeds)
def test_greedy_keeps_to_the_cap_and_the_risk(seed: int) -> None:
    dice = dice_of(seed)
    problem = random_problem(dice)
    cap, risk = limits(problem, dice)
    greedy = solve_greedy(problem, cap_bytes=cap, risk=risk)
    if greedy is None:
        assert cap < smallest_cap(problem)
    else:
        assert fits(evaluate(problem, greedy), cap_bytes=cap, risk=risk)


def test_infeasible_names_the_smallest_cap_and_says_that_risk_does_not_help() -> None:
    problem = problem_from_profile(toy_profile())
    least = smallest_cap(problem)
    with pytest.raises(Infeasible, match=r"--mem 1MB --risk 0.01: no plan fits") as caught:
        solve_problem(problem, cap_bytes=10**6, risk=0.01, cap_text="1MB")
    assert f"(--mem {least}B)" in caught.value.hint
    assert "smallest risk at this cap: none" in caught.value.hint


def test_the_smallest_cap_has_a_plan_and_one_byte_less_has_none() -> None:
    problem = problem_from_profile(toy_profile())
    least = smallest_cap(problem)
    assert frugal_assignment(problem, cap_bytes=least) is not None
    assert frugal_assignment(problem, cap_bytes=least - 1) is None


def test_the_smallest_risk_at_a_feasible_cap_is_zero() -> None:
    problem = problem_from_profile(toy_profile())
    assert smallest_risk(problem, cap_bytes=smallest_cap(problem)) == 0.0
    assert smallest_risk(problem, cap_bytes=smallest_cap(problem) - 1) is None


def test_a_time_limited_incumbent_is_not_called_optimal() -> None:
    profile = toy_profile(layers=16)
    problem = problem_from_profile(profile)
    memory = profile.meta.memory
    cap = problem.static_bytes + (3 * memory.gc_peak_bytes + memory.plain_peak_bytes) // 4
    solution = solve_problem(problem, cap_bytes=cap, risk=0.01, gap=1e-7, time_limit_s=0.05)
    assert solution.status == TIME_LIMIT
    assert solution.gap > 1e-7
    assert fits(solution.outcome, cap_bytes=cap, risk=0.01)


def test_the_solver_beats_greedy_where_risk_is_scarce() -> None:
    profile = toy_profile(layers=8)
    problem = problem_from_profile(profile)
    memory = profile.meta.memory
    cap = problem.static_bytes + (4 * memory.gc_peak_bytes + memory.plain_peak_bytes) // 5
    solution = solve_problem(problem, cap_bytes=cap, risk=0.01)
    assert solution.outcome.step_us < 0.99 * solution.greedy_us
    assert solution.gap <= 1e-3


def test_cbc_stands_in_where_highspy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path).available():
        pytest.skip("no CBC for this platform")
    profile = toy_profile()
    problem, memory = problem_from_profile(profile), profile.meta.memory
    cap = problem.static_bytes + (memory.gc_peak_bytes + memory.plain_peak_bytes) // 2
    highs = solve_problem(problem, cap_bytes=cap, risk=0.01, gap=5e-3)
    monkeypatch.setattr(solver, "solver_name", lambda: solver.CBC)
    cbc = solve_problem(problem, cap_bytes=cap, risk=0.01, gap=5e-3)
    assert cbc.status == OPTIMAL
    assert cbc.bound_us <= highs.outcome.step_us
    assert highs.bound_us <= cbc.outcome.step_us


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    problem = random_problem(dice_of(1))
    solve_problem(problem, cap_bytes=smallest_cap(problem) + 10, risk=0.0)
    assert capfd.readouterr() == ("", "")
