import gc
import weakref

import pytest
import torch

from hilore_cli.errors import PlanMismatch
from hilore_cli.measuring.candidates import depends_on_input
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.tracing import trace
from hilore_cli.runtime.loader import apply_plan
from tests.runtime.models import BATCH, TOKENS, small_case


@pytest.fixture(scope="module")
def case():
    return small_case()


def test_held_bytes_are_the_plans_to_the_byte_for_stored_and_compressed_units(case):
    derived = depends_on_input(case.units[0])  # a mask holds -inf, which codecs pass through raw
    kept = {
        index: "int8-g64" if unit.floating and index in derived and index % 2 else "none"
        for index, unit in enumerate(case.units[0])
        if unit.keepable
    }
    plan = case.plan({0: kept, 1: kept}, shape=(BATCH, TOKENS))
    with apply_plan(case.model, plan) as applied:
        case.gradients()
        held = applied.held_bytes()
    assert held == {(row.layer, row.unit): row.held_bytes for row in plan.rows if row.action != "recompute"}


def test_what_the_forward_really_keeps_grows_by_the_held_bytes(case):
    """Counted by the allocator: a forward under the plan against one under full checkpointing."""
    last = len(case.units[0]) - 1  # the layer's output lives on as the next layer's input
    kept = {i: "none" for i, unit in enumerate(case.units[0]) if unit.keepable and unit.bytes > 0 and i != last}
    alive = {}
    for name, assignment in (("recompute", {}), ("store", {0: kept, 1: kept})):
        logits = []
        with apply_plan(case.model, case.plan(assignment)) as applied:
            seen = trace(lambda logits=logits: logits.append(case.forward()), torch.device("cpu"))
            alive[name] = seen.levels[-1]
            held = sum(applied.held_bytes().values())
    assert alive["store"] - alive["recompute"] == held


def test_nothing_is_held_after_backward(case):
    kept = {index: "none" for index, unit in enumerate(case.units[0]) if unit.keepable}
    refs = []
    with apply_plan(case.model, case.plan({0: kept, 1: kept})):
        layer = case.model.model.layers[0]
        hook = layer.mlp.gate_proj.register_forward_hook(
            lambda *call: refs.append(weakref.ref(call[2].untyped_storage()))
        )
        case.gradients()
        hook.remove()
    gc.collect()
    assert refs
    assert all(ref() is None for ref in refs)


def test_the_rung_in_use_can_be_changed_between_steps(case):
    gate = next(index for index, unit in enumerate(case.units[0]) if unit.module == "mlp.gate_proj")
    with apply_plan(case.model, case.plan({0: {gate: "none"}}, {0: {gate: "int8-g64"}})) as applied:
        case.gradients()
        stored = applied.held_bytes()
        applied.rung = 1
        case.gradients()
        packed = applied.held_bytes()
    unit = case.units[0][gate]
    assert stored == {(0, gate): unit.bytes}
    assert packed == {(0, gate): codec("int8-g64").packed_bytes(unit.numel, torch.float32)}


def test_a_rung_that_is_not_in_the_plan_is_refused(case):
    with apply_plan(case.model, case.plan({})) as applied, pytest.raises(PlanMismatch, match="rung 3"):
        applied.rung = 3
