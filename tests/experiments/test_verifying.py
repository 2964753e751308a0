"""Profile, solve and verify a small model at caps from GC's peak to plain's: every promise holds, times aside."""

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

from hilore_cli import apply_plan, solve
from hilore_cli.errors import PlanMismatch
from hilore_cli.experiments.calibration import CALIBRATION_BATCHES
from hilore_cli.experiments.progress import Silent
from hilore_cli.experiments.verifying import broken_promises, verify_plan
from hilore_cli.experiments.workloads import prepare
from hilore_cli.measuring.identity import active_checkpointing, decoder_layers
from hilore_cli.measuring.options import LossSpec
from hilore_cli.measuring.step import actor_step
from hilore_cli.measuring.tracing import trace
from hilore_cli.runtime import replay
from tests.experiments.steady import steady

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = (0.0, 0.25, 0.5, 0.75, 1.05)
"""Of the way from GC's peak to plain's; predictions are on the safe side, so all plain takes a little more."""
RISK = 0.02


@pytest.fixture(scope="module")
def workload(tiny_options):
    return prepare(tiny_options, count=CALIBRATION_BATCHES + 3 * 2, skip=0, progress=Silent())


@pytest.fixture(scope="module")
def plan_at(tiny_profile):
    profile = steady(tiny_profile)
    memory, static = profile.meta.memory, profile.meta.static_bytes.total

    @cache
    def solved(share):
        dynamic = memory.gc_peak_bytes + share * (memory.plain_peak_bytes - memory.gc_peak_bytes)
        return solve(profile, cap_bytes=static + int(dynamic), risk=RISK)

    return solved


@pytest.fixture(scope="module")
def reports_at(plan_at, workload, tiny_options):
    """(exact rung, the rung solved for the risk) at a share of the way."""

    @cache
    def verified(share):
        plan = plan_at(share)
        return verify_plan(plan, tiny_options, workload=workload, rungs=[0, plan.meta.chosen], rounds=1)

    return verified


def broken(report) -> list[str]:
    """What broke, times aside: other processes may run here."""
    return [line for line in report.broken if not line.startswith("time")]


@pytest.mark.parametrize("share", SHARES)
def test_the_exact_rung_keeps_its_promises(share, reports_at, plan_at):
    report, _ = reports_at(share)
    assert broken(report) == []
    assert report.forward_equal
    assert report.bit_equal
    assert report.measured.risk == 0.0
    assert report.held_measured_bytes == report.held_plan_bytes == plan_at(share).meta.rungs[0].held_bytes
    assert report.measured.peak_bytes == pytest.approx(report.predicted.peak_bytes, rel=0.05)
    assert report.measured.peak_bytes <= report.cap_bytes


@pytest.mark.parametrize("share", SHARES)
def test_the_chosen_rung_keeps_its_promises(share, reports_at, plan_at):
    _, report = reports_at(share)
    assert broken(report) == []
    assert report.forward_equal
    assert report.measured.risk <= report.predicted.risk * 2 <= 2 * RISK
    assert report.held_measured_bytes == report.held_plan_bytes
    assert report.measured.peak_bytes == pytest.approx(report.predicted.peak_bytes, rel=0.05)
    assert report.measured.peak_bytes <= report.cap_bytes


def test_the_caps_are_used_and_some_plan_compresses(plan_at):
    held = [plan_at(share).meta.rungs[0].held_bytes for share in SHARES]
    assert held == sorted(held)
    assert held[0] < held[-1]
    assert plan_at(SHARES[-1]).meta.rungs[0].plain_layers == 3
    assert any(plan_at(share).meta.rungs[plan_at(share).meta.chosen].compressed for share in SHARES)


def test_compression_errs_and_says_so(reports_at, plan_at):
    share = next(share for share in SHARES if plan_at(share).meta.rungs[plan_at(share).meta.chosen].compressed)
    _, report = reports_at(share)
    assert not report.bit_equal
    assert 0 < report.measured.risk <= RISK
    assert report.risk_budget == RISK


def test_gc_and_plain_are_measured_beside_the_plan(reports_at, tiny_profile):
    report, other = reports_at(0.5)
    static, memory = tiny_profile.meta.static_bytes.total, tiny_profile.meta.memory
    assert report.gc == other.gc
    assert report.gc.risk == 0.0
    assert report.gc.peak_bytes == pytest.approx(static + memory.gc_peak_bytes, rel=0.01)
    assert report.plain.peak_bytes == pytest.approx(static + memory.plain_peak_bytes, rel=0.01)
    assert report.gc.peak_bytes < report.measured.peak_bytes < report.plain.peak_bytes


def test_the_model_is_plain_again_afterwards(reports_at, workload):
    reports_at(0.5)
    model = workload.actor.model
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model))
    assert active_checkpointing(model) is None


def test_what_a_layer_keeps_is_released_as_soon_as_its_backward_is_done(plan_at, workload, tiny_options):
    """By the reference count alone: a cycle would hold it until Python happens to collect, and nothing counts that."""
    plan = plan_at(0.25)
    model = workload.actor.model
    calls, alive = [], []

    def count(_):
        alive.append(len(gc_free(calls)))

    hooks = [
        layer.register_forward_hook(lambda *call: layer_output_hook(call[2], count)) for layer in decoder_layers(model)
    ]
    original = replay.LayerCall.__init__

    def remember(self, *arguments):
        original(self, *arguments)
        calls.append(replay.weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch, apply_plan(model, plan):
            patch.setattr(replay.LayerCall, "__init__", remember)
            actor_step(model, workload.micro_batches[0], tiny_options.loss)
            left = len(gc_free(calls))
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()
    assert calls
    assert left == 0
    assert alive[0] == len(calls)
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 1


def gc_free(calls):
    return [call for call in (ref() for ref in calls) if call is not None]


def layer_output_hook(out, count) -> None:
    hidden = out[0] if isinstance(out, tuple) else out
    if hidden.requires_grad and torch.is_grad_enabled():
        hidden.register_hook(count)


def test_a_forward_without_backward_holds_nothing_afterwards(plan_at, workload):
    model, batch = workload.actor.model, workload.micro_batches[0]

    def forward():
        with apply_plan(model, plan_at(0.5)):
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)

    gc.disable()
    try:
        assert trace(forward, torch.device("cpu")).levels[-1] == 0
    finally:
        gc.enable()


def test_another_shape_than_the_plans_is_refused_naming_both(plan_at, tiny_options):
    shape = replace(tiny_options.shape, response_tokens=17)
    with pytest.raises(PlanMismatch, match="of 2 x 24 tokens, asked for is 2 x 25 tokens"):
        verify_plan(plan_at(0.5), replace(tiny_options, shape=shape), rounds=1)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_an_exact_rung_is_exact_under_every_loss(kind, plan_at, tiny_options, workload):
    options = replace(tiny_options, loss=LossSpec(kind=kind))
    (report,) = verify_plan(plan_at(0.5), options, workload=replace(workload, options=options), rungs=[0], rounds=1)
    assert broken(report) == []
    assert report.bit_equal


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"forward_equal": False}, "forward"),
        ({"bit_equal": False}, "risk: the plan promises bit-equal"),
        ({"held_measured_bytes": 1}, "held bytes"),
        ({"cap_bytes": 1}, "peak: measured"),
        ({"time_ratio": 1.2}, "time"),
    ],
)
def test_each_promise_can_break(change, word, reports_at):
    report = replace(reports_at(0.5)[0], time_ratio=1.0)
    assert broken_promises(report) == ()
    (line,) = broken_promises(replace(report, **change))
    assert line.startswith(word)


def test_a_risk_above_its_budget_and_a_peak_above_its_prediction_break(reports_at):
    report = replace(reports_at(0.5)[1], time_ratio=1.0, risk_budget=RISK)
    risky = replace(report, measured=replace(report.measured, risk=0.03), bit_equal=False)
    high = replace(report, measured=replace(report.measured, peak_bytes=2 * report.cap_bytes))
    assert [line.split(":")[0] for line in broken_promises(risky)] == ["risk"]
    assert [line.split(":")[0] for line in broken_promises(high)] == ["peak", "peak"]
