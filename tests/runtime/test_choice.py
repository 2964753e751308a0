"""Rungs by exposure: exact where few, near the best where many, and held to the budget as exposures become known."""

import itertools
import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_cli.errors import HiloreError, RiskExceeded
from hilore_cli.runtime.budget import UpdateBudget
from hilore_cli.runtime.choice import RungCost, choose_rungs

LADDER = tuple(
    RungCost(rung=rung, step_us=us, risk2=gain**2)
    for rung, (us, gain) in enumerate(
        [(100.0, 0.0), (94.0, 0.0025), (90.0, 0.005), (84.0, 0.01), (80.0, 0.02), (78.0, 0.04)]
    )
)
RISK = 0.01
SUCCESS = [2.65, *[0.38] * 7]

costs = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=5).map(
    lambda pairs: [RungCost(rung=i, step_us=float(us), risk2=float(gain)) for i, (us, gain) in enumerate(pairs)]
)
energies = st.lists(st.integers(0, 12), min_size=1, max_size=5)


def time_of(ladder: Sequence[RungCost], rungs: Sequence[int]) -> float:
    return sum(ladder[rung].step_us for rung in rungs)


def error2_of(ladder: Sequence[RungCost], rungs: Sequence[int], exposures: Sequence[float]) -> float:
    return sum(ladder[rung].risk2 * exposure**2 for rung, exposure in zip(rungs, exposures, strict=True))


@settings(max_examples=400, deadline=None)
@given(ladder=costs, exposures=energies, budget2=st.integers(0, 2000))
def test_a_small_choice_is_the_best_of_all(ladder: list[RungCost], exposures: list[int], budget2: int) -> None:
    every = itertools.product(range(len(ladder)), repeat=len(exposures))
    within = [rungs for rungs in every if error2_of(ladder, rungs, exposures) <= budget2]
    chosen = choose_rungs(ladder, exposures, budget2=budget2)
    if within:
        assert error2_of(ladder, chosen, exposures) <= budget2
        assert time_of(ladder, chosen) == min(time_of(ladder, rungs) for rungs in within)
    else:
        assert {ladder[rung].risk2 for rung in chosen} == {min(cost.risk2 for cost in ladder)}


@settings(max_examples=100, deadline=None)
@given(
    exposures=st.lists(st.just(0.0) | st.floats(0.01, 3), min_size=40, max_size=90),
    ladder=costs,
    share=st.floats(0, 2),
)
def test_a_large_choice_keeps_its_budget_and_is_one_move_from_the_relaxed_best(
    exposures: list[float], ladder: list[RungCost], share: float
) -> None:
    ladder = [*ladder, RungCost(rung=len(ladder), step_us=50.0, risk2=0.0)]
    energy = sum(exposure**2 for exposure in exposures)
    budget2 = share * energy * 5
    chosen = choose_rungs(ladder, exposures, budget2=budget2)
    assert error2_of(ladder, chosen, exposures) <= budget2 * (1 + 1e-8)
    assert time_of(ladder, chosen) <= relaxed_best(ladder, exposures, budget2) + 50.0 + 1e-6


def relaxed_best(ladder: Sequence[RungCost], exposures: Sequence[float], budget2: float) -> float:
    """The relaxed optimum by Lagrange's dual, which is piecewise linear with its corners where two rungs cost alike."""
    times = torch.tensor([cost.step_us for cost in ladder], dtype=torch.float64)
    risks = torch.tensor([cost.risk2 for cost in ladder], dtype=torch.float64)
    energies = torch.tensor(exposures, dtype=torch.float64).square()
    corners = (times[:, None] - times[None, :]) / (risks[None, :] - risks[:, None])
    prices = (corners.flatten()[:, None] / energies[None, :]).flatten()
    prices = torch.cat([prices[prices.isfinite() & (prices > 0)].unique(), torch.tensor([0.0, 1e12]).double()])
    each = times[None, None, :] + prices[:, None, None] * risks[None, None, :] * energies[None, :, None]
    return float((each.amin(dim=2).sum(dim=1) - prices * budget2).max())


def test_the_success_is_run_more_exactly_and_the_failures_less_so() -> None:
    chosen = choose_rungs(LADDER, SUCCESS, budget2=RISK**2 * sum(x**2 for x in SUCCESS))
    assert chosen[0] < 3 < min(chosen[1:]) + 1
    assert time_of(LADDER, chosen) < 8 * LADDER[3].step_us


def test_no_exposure_takes_the_fastest_rung() -> None:
    assert choose_rungs(LADDER, [0.0, 1.0], budget2=0.0) == [5, 0]
    assert choose_rungs(LADDER, [0.0] * 300, budget2=0.0) == [5] * 300


def test_no_micro_batches_no_rungs() -> None:
    assert choose_rungs(LADDER, [], budget2=1.0) == []


# the budget of an update


def budget(exposures: Sequence[float], **changes: object) -> UpdateBudget:
    return UpdateBudget(LADDER, exposures, risk=RISK, **changes)  # type: ignore[arg-type]


def test_a_budget_that_holds_says_nothing() -> None:
    update = budget(SUCCESS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exposure in SUCCESS:
            update.audit(exposure * 0.9)
    assert update.risk <= RISK


def test_an_excess_is_told_once_with_its_numbers() -> None:
    update = budget([1.0, 0.1, 0.1, 0.1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update.audit(1.0)
    with pytest.warns(RuntimeWarning, match=f"budget {RISK:.3g}, after 2 of 4 micro-batches"):
        update.audit(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exposure in (3.0, 3.0):
            update.audit(exposure)
    assert update.risk > RISK


def test_an_excess_raises_where_that_is_asked_for() -> None:
    update = budget([1.0, 0.1], on_excess="raise")
    update.audit(1.0)
    with pytest.raises(RiskExceeded, match=r"budget 0\.01,"):
        update.audit(3.0)


def test_choosing_again_brings_the_update_back_into_its_budget() -> None:
    planned = [*SUCCESS[1:], SUCCESS[0]]
    update = budget(planned, on_excess="replan")
    before = list(update.rungs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after = update.audit(1.4 * planned[0])
        for exposure in planned[1:]:
            after = update.audit(exposure)
    assert before[0] == after[0]
    assert time_of(LADDER, after) > time_of(LADDER, before)
    assert update.risk <= RISK * (1 + 1e-9)


def test_what_cannot_be_brought_back_is_told_after_choosing_again() -> None:
    update = budget([0.01, 0.01], on_excess="replan", gradient_exposure=0.02)
    with pytest.warns(RuntimeWarning, match="before choosing again"):
        after = update.audit(1.0)
    assert after[1] == 0


def test_the_gradients_own_norm_takes_the_place_of_the_profiles() -> None:
    exposures = [1.0] * 4
    assert budget(exposures, gradient_exposure=2.0).rungs == budget(exposures).rungs
    assert sum(budget(exposures, gradient_exposure=8.0).rungs) > sum(budget(exposures).rungs)
    assert budget(exposures, gradient_exposure=0.0).rungs == [0] * 4


@pytest.mark.parametrize("exposure", [math.nan, math.inf, -1.0])
def test_an_exposure_that_is_none_is_refused(exposure: float) -> None:
    with pytest.raises(HiloreError, match="exposure"):
        budget([exposure])
    with pytest.raises(HiloreError, match="exposure"):
        budget([1.0]).audit(exposure)


def test_an_unknown_answer_to_an_excess_is_refused() -> None:
    with pytest.raises(HiloreError, match="replan, warn, raise"):
        budget([1.0], on_excess="skip")


def test_auditing_past_the_last_micro_batch_is_an_error() -> None:
    with pytest.raises(IndexError):
        budget([]).audit(1.0)
