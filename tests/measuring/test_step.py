import dataclasses
from typing import Any

import pytest
import torch

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.losses import exposure_bound
from hilore_cli.measuring.options import LossSpec
from hilore_cli.measuring.rollouts import Completion, MicroBatch, Rollouts, micro_batches
from hilore_cli.measuring.step import actor_step, completion_logps, facts_of
from hilore_cli.tables.profile_table import Shape
from tests.conftest import TinyLlama

SHAPE = Shape(micro_batch=2, prompt_tokens=7, response_tokens=9)


def batch(*, shape: Shape = SHAPE, old: bool = False, reference: bool = False) -> MicroBatch:
    draw = torch.Generator().manual_seed(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (count,), generator=draw).tolist())

    def logps(count: int) -> tuple[float, ...]:
        return tuple((-5.5 + 0.2 * torch.randn(count, generator=draw)).tolist())

    completions = tuple(
        Completion(
            group=0,
            prompt_ids=ids(prompt),
            completion_ids=ids(response),
            advantage=advantage,
            old_logps=logps(response) if old else None,
            ref_logps=logps(response) if reference else None,
        )
        for prompt, response, advantage in ((4, 9, 1.5), (7, 5, -0.5))
    )
    rollouts = Rollouts(completions=completions, source="random", digest="", mean_reward=0.0)
    return micro_batches(rollouts, shape, pad_id=0, count=1, device="cpu")[0]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_log_probs_equal_those_of_each_sequence_alone_without_padding(tiny_llama: TinyLlama) -> None:
    model = tiny_llama().model
    data = batch()
    logps = completion_logps(model, data)
    assert logps.shape == (2, 9)
    assert logps.dtype == torch.float32
    for row in range(2):
        real = data.attention_mask[row].bool()
        ids = data.input_ids[row][real][None]
        length = int(data.completion_mask[row].sum())
        table = model(ids).logits[0].log_softmax(-1)
        expected = table[:-1].gather(1, ids[0, 1:, None])[-length:, 0]
        torch.testing.assert_close(logps[row, :length], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_wider_padding_changes_no_log_prob(tiny_llama: TinyLlama, attention: str) -> None:
    model = tiny_llama(attention=attention).model
    wide = batch(shape=Shape(micro_batch=2, prompt_tokens=20, response_tokens=30))
    torch.testing.assert_close(completion_logps(model, wide)[:, :9], completion_logps(model, batch()))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_the_surrogate_gives_the_gradients_of_the_loss(tiny_llama: TinyLlama, kind: str, level: str) -> None:
    spec = LossSpec(kind=kind, level=level, beta=0.05)
    data = batch(old=True, reference=True)
    model = tiny_llama().model
    actor_step(model, data, spec)
    found = gradients(model)

    model.zero_grad()
    logps, mask = completion_logps(model, data), data.completion_mask
    lengths = mask.sum(1, keepdim=True)
    log_ratio = (logps - data.old_logps) * mask
    if level == "sequence":
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(mask)
    ratio, advantages = log_ratio.exp(), data.advantages[:, None]
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = data.ref_logps - logps
    weights = mask / (mask.sum() if kind == "dapo" else 2 * lengths)
    ((policy + 0.05 * (gap.exp() - gap - 1)) * weights).sum().backward()
    for name, expected in gradients(model).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-7)


def test_two_micro_batches_accumulate_to_twice_their_common_half(tiny_llama: TinyLlama) -> None:
    model = tiny_llama().model
    data = batch()
    actor_step(model, data, LossSpec())
    once = gradients(model)
    model.zero_grad()
    for _ in range(2):
        actor_step(model, data, LossSpec(), facts=facts_of([data, data]))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, once[name])


def test_exposure_is_known_before_the_forward_on_policy(tiny_llama: TinyLlama) -> None:
    data = batch()
    result = actor_step(tiny_llama().model, data, LossSpec())
    bound = exposure_bound(LossSpec(), advantages=data.advantages, mask=data.completion_mask, on_policy=True)
    assert result.exposure == pytest.approx(bound, rel=1e-6)
    assert not result.logps.requires_grad
    assert not result.loss.requires_grad


def test_zero_advantages_give_zero_gradients(tiny_llama: TinyLlama) -> None:
    model = tiny_llama().model
    data = dataclasses.replace(batch(), advantages=torch.zeros(2))
    assert actor_step(model, data, LossSpec()).exposure == 0
    assert all((gradient == 0).all() for gradient in gradients(model).values())


def test_bfloat16_models_give_float32_log_probs(tiny_llama: TinyLlama) -> None:
    result = actor_step(tiny_llama(dtype=torch.bfloat16).model, batch(), LossSpec())
    assert result.logps.dtype == torch.float32


def test_a_kl_term_without_reference_log_probs_is_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(HiloreError, match="ref_logps"):
        actor_step(tiny_llama().model, batch(), LossSpec(beta=0.1))
