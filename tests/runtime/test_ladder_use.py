"""The loader's side of the ladder: rungs chosen by exposure and audited, on a plan at work."""

import dataclasses
import warnings

import pytest

from hilore_cli.errors import RiskExceeded
from hilore_cli.runtime.loader import apply_plan
from tests.tables.samples import toy_plan

COSTS = ((0.0, 1200.0), (0.009, 1040.0))


@pytest.fixture
def applied(tiny_llama, monkeypatch):
    """A plan whose rungs cost as in COSTS, at work in nothing: only its numbers are asked for."""
    plan = toy_plan()
    rungs = tuple(
        dataclasses.replace(rung, predicted_risk=risk, step_us=us)
        for rung, (risk, us) in zip(plan.meta.rungs, COSTS, strict=True)
    )
    plan = dataclasses.replace(plan, meta=dataclasses.replace(plan.meta, rungs=rungs, risk=0.01, gamma=2.0))
    monkeypatch.setattr("hilore_cli.runtime.loader._check_identity", lambda *_: None)
    monkeypatch.setattr("hilore_cli.runtime.loader._check_codecs", lambda *_: None)
    with apply_plan(tiny_llama().model, plan) as applied:
        yield applied


def test_every_micro_batch_runs_at_the_plans_risk_where_exposures_are_alike(applied):
    assert applied.choose([1.0] * 4) == [1] * 4


def test_a_small_gradient_leaves_less_to_spend(applied):
    assert applied.choose([1.0] * 4, gradient_norm=2.0 * 2.0) == [1] * 4
    assert applied.choose([1.0] * 4, gradient_norm=1.4 * 2.0) == [1, 1, 0, 0]
    assert applied.choose([1.0] * 4, gradient_norm=0.1) == [0] * 4


def test_what_was_chosen_is_audited_as_it_runs(applied):
    rungs = applied.choose([1.0, 1.0], gradient_norm=2.0 * 2**0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert applied.audit(1.0) == rungs
    with pytest.warns(RuntimeWarning, match="budget 0.01,"):
        applied.audit(5.0)


def test_an_excess_can_raise(applied):
    applied.choose([1.0], gradient_norm=2.0, on_excess="raise")
    with pytest.raises(RiskExceeded):
        applied.audit(2.0)


def test_the_list_given_out_is_the_callers_own(applied):
    rungs = applied.choose([1.0, 1.0])
    rungs[0] = 7
    assert applied.audit(1.0) == [1, 1]
