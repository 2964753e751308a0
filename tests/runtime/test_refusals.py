import copy
import functools
from dataclasses import replace

import pytest
import torch

from hilore_cli.errors import PlanMismatch, ReplayError
from hilore_cli.measuring.identity import decoder_layers
from hilore_cli.runtime.loader import apply_plan
from tests.runtime.models import BATCH, TOKENS, differing, small_case


@pytest.fixture(scope="module")
def case():
    return small_case()


def kept(case):
    return {index: "none" for index, unit in enumerate(case.units[0]) if unit.saved and unit.keepable}


def plan(case, **options):
    return case.plan({0: kept(case), 1: kept(case)}, **options)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("dtype", "bfloat16", "dtype"),
        ("attention", "eager", "attention kernel"),
        ("layers", 3, "decoder layers"),
        ("config_hash", "0" * 64, "configuration"),
        ("parameter_hash", "0" * 64, "parameter shapes"),
        ("model_class", "Qwen3ForCausalLM", "model class"),
        ("adapter", "default:r16", "adapter"),
    ],
)
def test_a_plan_for_another_model_is_refused_naming_both_sides(case, field, value, word):
    good = plan(case)
    other = replace(good, meta=replace(good.meta, **{field: value}))
    with pytest.raises(PlanMismatch, match=rf"{word}.*the plan has .*, the model has ") as caught:
        apply_plan(case.model, other)
    assert caught.value.hint


def test_a_longer_sequence_than_the_plans_is_refused(case):
    with (
        apply_plan(case.model, plan(case, shape=(BATCH, TOKENS - 1))),
        pytest.raises(PlanMismatch, match=f"2 x {TOKENS} tokens: is larger than the plan's 2 x {TOKENS - 1}"),
    ):
        case.gradients()


def test_a_model_whose_own_checkpointing_is_on_is_refused(case):
    model = copy.deepcopy(case.model)
    model.activation_checkpointing_enable()
    with pytest.raises(PlanMismatch, match="gradient checkpointing on"):
        apply_plan(model, plan(case))


def test_checkpointing_switched_on_behind_the_plan_is_refused_at_the_next_forward(case):
    with apply_plan(case.model, plan(case)):
        case.model.activation_checkpointing_enable()
        try:
            with pytest.raises(PlanMismatch, match="gradient checkpointing on"):
                case.gradients()
        finally:
            case.model.activation_checkpointing_disable()


def test_a_kv_cache_while_training_is_refused(case):
    with apply_plan(case.model, plan(case)), pytest.raises(PlanMismatch, match="KV cache"):
        case.model(input_ids=case.ids, attention_mask=case.mask, use_cache=True)


def test_sampling_with_a_cache_still_works_under_the_plan(case):
    with apply_plan(case.model, plan(case)), torch.no_grad():
        out = case.model(input_ids=case.ids, attention_mask=case.mask, use_cache=True)
    assert out.past_key_values is not None


def test_a_second_plan_on_the_same_model_is_refused(case):
    with apply_plan(case.model, plan(case)), pytest.raises(PlanMismatch, match="replaced already"):
        apply_plan(case.model, plan(case))


def test_remove_gives_the_model_back_as_it_was(case):
    exact = case.gradients()
    apply_plan(case.model, plan(case)).remove()
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(case.model))
    assert differing(case.gradients(), exact) == []


def test_an_op_stream_that_differs_from_the_plans_is_refused_naming_both_ops(case):
    good = plan(case)
    rows = tuple(replace(row, op="aten.cos.default") if row.op_index == 3 else row for row in good.rows)
    with (
        apply_plan(case.model, replace(good, rows=rows)),
        pytest.raises(ReplayError, match=r"the plan has aten.cos.default, the model runs aten"),
    ):
        case.gradients()


def test_held_bytes_that_are_not_the_plans_are_refused(case):
    good = plan(case, shape=(BATCH, TOKENS))
    rows = tuple(replace(row, held_bytes=row.held_bytes + 4) for row in good.rows)
    with (
        apply_plan(case.model, replace(good, rows=rows)),
        pytest.raises(ReplayError, match="bytes where the plan says"),
    ):
        case.gradients()


@pytest.mark.parametrize("codec", ["none", "int8-g64"])
def test_a_kept_output_changed_in_place_raises_instead_of_being_served_stale(case, codec):
    units = case.units[0]
    gate = next(index for index, unit in enumerate(units) if unit.module == "mlp.gate_proj")
    seen = []
    hook = decoder_layers(case.model)[0].mlp.gate_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    try:
        with apply_plan(case.model, case.plan({0: {gate: codec}})):
            logits = case.forward()
            with torch.no_grad():
                seen[0].mul_(2)
            with pytest.raises(ReplayError, match="changed in place"):
                logits.sum().backward()
    finally:
        hook.remove()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_mask_changed_in_place_after_the_forward_raises(case, keeps):
    masks = []
    layer = decoder_layers(case.model)[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    try:
        with apply_plan(case.model, plan(case) if keeps else case.plan({})):
            logits = case.forward()
            masks[0].logical_not_()
            with pytest.raises(ReplayError, match="an input or a weight of it was changed in place"):
                logits.sum().backward()
    finally:
        hook.remove()


def test_backward_can_run_twice_where_the_graph_is_retained(case):
    exact = case.gradients()
    with apply_plan(case.model, plan(case)):
        case.model.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(case.forward().flatten(0, 1), case.ids.flatten())
        loss.backward(retain_graph=True)
        loss.backward()
    twice = {name: parameter.grad for name, parameter in case.model.named_parameters()}
    assert all(torch.allclose(twice[name], 2 * exact[name], rtol=1e-5, atol=1e-7) for name in twice)


def test_evaluation_and_scoring_without_gradients_run_unwrapped(case):
    with apply_plan(case.model, plan(case)) as applied, torch.no_grad():
        case.forward()
    assert applied.held_bytes() == {}


def test_a_weight_changed_between_forward_and_backward_raises(case):
    model = copy.deepcopy(case.model)
    with apply_plan(model, plan(case)):
        logits = model(input_ids=case.ids, attention_mask=case.mask, use_cache=False).logits
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(2)
        with pytest.raises(ReplayError, match="weight of it was changed in place"):
            logits.sum().backward()


def test_autocast_is_refused_by_name(case):
    with (
        apply_plan(case.model, plan(case)),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(PlanMismatch, match="runs under autocast"),
    ):
        case.gradients()


def test_a_micro_batch_without_padding_is_recomputed_in_full_with_one_warning(case):
    full = torch.ones_like(case.mask)
    unpadded = replace(case, mask=full)
    exact = unpadded.gradients()
    with apply_plan(case.model, plan(case)) as applied:
        with pytest.warns(RuntimeWarning, match="padding mask") as caught:
            found = unpadded.gradients()
        assert applied.held_bytes() == {}
        unpadded.gradients()  # a second warning would be an error here
    assert differing(found, exact) == []
    assert len(caught) == 1


def test_a_copy_of_the_model_trains_without_the_plan(case):
    with apply_plan(case.model, plan(case)) as applied:
        twin = copy.deepcopy(case.model)
        twin(input_ids=case.ids, attention_mask=case.mask, use_cache=False).logits.sum().backward()
        assert applied.held_bytes() == {}


def test_removing_a_plan_that_another_tool_has_wrapped_stops_it(case):
    model = copy.deepcopy(case.model)
    applied = apply_plan(model, plan(case))
    layer = decoder_layers(model)[0]
    inner = layer.forward
    layer.forward = functools.partial(inner)
    applied.remove()
    model(input_ids=case.ids, attention_mask=case.mask, use_cache=False).logits.sum().backward()
    assert applied.held_bytes() == {}


def test_an_audit_is_made_at_the_first_full_micro_batch_however_late(case):
    good = plan(case, shape=(BATCH, TOKENS))
    rows = tuple(replace(row, held_bytes=row.held_bytes + 4) for row in good.rows)
    with apply_plan(case.model, replace(good, rows=rows)):
        case.model(input_ids=case.ids[:, :-1], attention_mask=case.mask[:, :-1], use_cache=False)
        for _ in range(2):
            with pytest.raises(ReplayError, match="bytes where the plan says"):
                case.gradients()
