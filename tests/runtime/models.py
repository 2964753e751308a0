"""A small Llama with random weights and ids: the tests here are about exactness and bytes, not about errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hilore_cli.measuring.units import UnitRecord
from hilore_cli.tables.plan_table import Plan
from tests.runtime.plans import Kept, plan_for, record

BATCH, TOKENS = 2, 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, one padded micro-batch, and what plain training makes of it."""

    model: nn.Module
    ids: torch.Tensor
    mask: torch.Tensor
    units: list[list[UnitRecord]]
    call: str

    def plan(self, *ladder: Kept, **options: Any) -> Plan:
        """A plan for this model: {layer: {unit: codec}} a rung."""
        return plan_for(self.model, self.units, *ladder, call=self.call, **options)

    def forward(self) -> torch.Tensor:
        """Logits, [B, S, V]."""
        return self.model(input_ids=self.ids, attention_mask=self.mask, use_cache=False).logits

    def gradients(self, forward: Callable[[], torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Loss (under the name `loss`) and every parameter's gradient, dropout always the same."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        logits = (forward or self.forward)()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.ids.flatten())
        loss.backward()
        found = {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}
        return {"loss": loss.detach(), **found}


def small_case(*, dropout: float = 0.0, padded: bool = True, **config: Any) -> Case:
    """Two layers, hidden 32, grouped-query attention."""
    torch.manual_seed(0)
    facts = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "attention_dropout": dropout,
        "use_cache": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**facts, **config})).train()
    ids = torch.randint(0, 96, (BATCH, TOKENS))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[1, -3:] = 0
    bare = Case(model=model, ids=ids, mask=mask, units=[], call="")
    units, call = record(model, bare.forward)
    return Case(model=model, ids=ids, mask=mask, units=units, call=call)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bit-equal."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of all gradients together, in the L2 norm; `other` is exact."""
    names = [name for name in one if name != "loss"]
    change = sum(float((one[name] - other[name]).double().square().sum()) for name in names)
    return (change / sum(float(other[name].double().square().sum()) for name in names)) ** 0.5
