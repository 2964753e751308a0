"""What the machinery costs a layer, apart from its ops: measured on two tokens, where ops cost next to nothing.

Four variants of one layer's forward and backward, interleaved: plain, forward only, checkpointed, and replayed by a
plan that keeps all that autograd saves. The checkpoint's own cost is checkpointed - plain - forward (it runs the ops
once more); replay's is keeping all - plain (it runs none again), less the checkpoint's.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.gains import no_weight_gradients
from hilore_cli.measuring.layer_calls import LayerInput, layer_output
from hilore_cli.measuring.timing import interleaved
from hilore_cli.measuring.units import UnitRecord
from hilore_cli.runtime.replay import NO_CODEC, LayerCall, OpPolicy

ROUNDS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Microseconds a replayed layer costs beyond its ops."""

    checkpoint_us: float
    mode_us: float


def measure_overheads(layer: nn.Module, call: LayerInput, units: tuple[UnitRecord, ...]) -> Overheads:
    """Time the machinery on one layer, called as in `call` (a few tokens); `units` are of that call."""
    policy = keep_saved(units)

    def run(kind: str) -> None:
        args, kwargs, leaf = call.fresh()
        if kind == "forward":
            with torch.no_grad():
                layer(*args, **kwargs)
            return
        if kind == "plain":
            out = layer(*args, **kwargs)
        elif kind == "checkpoint":
            out = checkpointed(layer.forward, args, kwargs)
        else:
            replayed = LayerCall("layer", policy, (args, kwargs))
            out = checkpointed(layer.forward, args, kwargs, contexts=replayed.contexts)
        hidden = layer_output(out)
        torch.autograd.grad(hidden, leaf, torch.ones_like(hidden))

    kinds = ("plain", "forward", "checkpoint", "keep")
    with no_weight_gradients(layer):
        rounds = interleaved(
            {kind: lambda kind=kind: run(kind) for kind in kinds},  # type: ignore[misc]
            rounds=ROUNDS,
            device=next(layer.parameters()).device,
            warmups=5,
        )
    plain, forward, checkpoint, keep = (rounds[kind].fastest_us for kind in kinds)
    checkpoint_us = max(checkpoint - plain - forward, 0.0)
    return Overheads(checkpoint_us=checkpoint_us, mode_us=max(keep - plain - checkpoint_us, 0.0))


def keep_saved(units: tuple[UnitRecord, ...]) -> tuple[OpPolicy, ...]:
    """A policy that stores every saved unit that can be stored, so that only forced ops run again."""
    ops: dict[int, list[UnitRecord]] = {}
    for unit in units:
        ops.setdefault(unit.op_index, []).append(unit)
    return tuple(
        OpPolicy(
            name=leaves[0].op,
            runs=any(unit.forced or (unit.saved and not unit.keepable) for unit in leaves),
            kept=tuple((unit.leaf, NO_CODEC) for unit in leaves if unit.keepable and unit.saved),
        )
        for leaves in ops.values()
    )
