"""The profile and plan that lie in the repository: they belong together, and hold on the real model."""

from pathlib import Path

import pytest
import torch

from hilore_cli import apply_plan, load_plan, load_profile, solve
from hilore_cli.tables.plan_table import COMPRESS, STORE

ROOT = Path(__file__).parents[2]
EXAMPLE_PROFILE = ROOT / "profiles" / "smollm2-135m.parquet"
EXAMPLE_PLAN = ROOT / "plans" / "smollm2-135m-1.10gc-r0.01.parquet"


@pytest.fixture(scope="module")
def example():
    return load_plan(EXAMPLE_PLAN)


def test_the_example_plan_is_of_the_example_profile(example):
    profile = load_profile(EXAMPLE_PROFILE)
    assert example.meta.profile_digest == profile.digest
    assert example.meta.profile_name == EXAMPLE_PROFILE.name
    assert example.meta.cap_bytes == round(1.10 * example.meta.gc_peak_bytes)
    assert {row.action for row in example.rows} >= {STORE, COMPRESS}


def test_the_example_is_solved_again_to_the_same_rows(example):
    again = solve(load_profile(EXAMPLE_PROFILE), cap_bytes=example.meta.cap_bytes, risk=0.0)
    assert list(again.rung_rows(0)) == list(example.rung_rows(0))
    assert again.meta.rungs[0].peak_bytes <= example.meta.cap_bytes


@pytest.mark.usefixtures("one_thread")
def test_the_example_gives_bit_equal_gradients_on_the_real_model(example, smollm2):
    """A padded batch of real text at the plan's shape, by the next token's cross-entropy."""
    model = smollm2.model
    texts = [
        "The sum of two odd numbers is even, because each leaves a remainder of one when it is divided by two.",
        "Once upon a time there was a small village by the sea, whose people counted the ships that came and went. "
        * 9,
    ]
    ids, mask = padded(smollm2.tokenizer, texts, example.meta.tokens)

    def gradients():
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    assert ids.shape == (example.meta.micro_batch, example.meta.tokens)
    model.train()
    try:
        loss, exact = gradients()
        with apply_plan(model, example) as applied:
            applied.rung = 0
            planned_loss, planned = gradients()
            held = sum(applied.held_bytes().values())
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
    assert torch.equal(planned_loss, loss)
    assert all(torch.equal(a, b) for a, b in zip(planned, exact, strict=True))
    assert held == example.meta.rungs[0].held_bytes


def padded(tokenizer, texts, tokens):
    """Token ids and mask [B, tokens]: cut on the right, padded on the left."""
    rows = [tokenizer(text)["input_ids"][:tokens] for text in texts]
    ids = torch.tensor([[0] * (tokens - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (tokens - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
