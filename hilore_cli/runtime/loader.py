"""Apply a plan to a Hugging Face causal LM: `apply_plan(model, load_plan(path))`.

Each decoder-layer instance gets a `forward` of ours, which acts only while training with gradients enabled, so that
sampling and scoring run as before. What it does follows the current rung: nothing (`plain`), torch's checkpoint as
it is (nothing kept), or op-level replay. The first training forward audits what the layers really hold.
"""

import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch import nn

from hilore_cli.errors import PlanMismatch, ReplayError
from hilore_cli.measuring import identity
from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.codecs import codec
from hilore_cli.measuring.stream import tensors
from hilore_cli.runtime.budget import OnExcess, UpdateBudget
from hilore_cli.runtime.choice import RungCost
from hilore_cli.runtime.replay import LayerCall, OpPolicy
from hilore_cli.tables.plan_table import COMPRESS, STORE, Plan, PlanRow

PLAIN_UNIT = -1
_CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past", "cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPolicy:
    """One layer at one rung."""

    plain: bool
    ops: tuple[OpPolicy, ...]
    unit_numbers: dict[tuple[int, int], int]
    """(op index, leaf) -> the plan's unit."""
    held_bytes: int


RECOMPUTE_ALL = LayerPolicy(plain=False, ops=(), unit_numbers={}, held_bytes=0)


class Applied:
    """A plan at work in a model. As a context manager it is removed at the end, and put back on entering again."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._layers = identity.decoder_layers(model)
        self._meta = plan.meta
        self._ladder = _ladder(plan)
        self._held: list[dict[int, int]] = [{} for _ in self._layers]
        self._other_calls: set[str] = set()
        self._audited: set[tuple[int, int]] = set()
        self._costs = [
            RungCost(rung=rung.rung, step_us=rung.step_us, risk2=rung.predicted_risk**2) for rung in plan.meta.rungs
        ]
        self._budget = UpdateBudget(self._costs, (), risk=plan.meta.risk)
        self.rung = plan.meta.chosen
        self._forwards = [types.MethodType(_forward(self, index), layer) for index, layer in enumerate(self._layers)]
        self.__enter__()

    @property
    def rung(self) -> int:
        """Index of the rung in use; a new one takes effect at the next forward."""
        return self._rung

    @rung.setter
    def rung(self, rung: int) -> None:
        if rung not in range(len(self._ladder)):
            raise PlanMismatch(f"rung {rung}", f"the plan has rungs 0 to {len(self._ladder) - 1}", "see `hilore show`")
        self._rung = rung

    def held_bytes(self) -> dict[tuple[int, int], int]:
        """What the last forward really kept: (layer, unit) -> bytes of storage.

        A plain layer has one entry, under unit -1, from its first forward of the plan's full shape at this rung: others
        run unobserved.
        """
        return {(layer, unit): held for layer, units in enumerate(self._held) for unit, held in units.items()}

    def choose(
        self, exposures: Sequence[float], *, gradient_norm: float | None = None, on_excess: OnExcess = "warn"
    ) -> list[int]:
        """A rung for each micro-batch of the coming update: least predicted time within the plan's risk.

        Args:
            exposures: one a micro-batch, in the order they will run: `exposure` where the loss coefficients are known
                (on-policy), else `exposure_bound`.
            gradient_norm: of the update, before clipping; the last ones' is a good guess. By default the
                profile's gradient norm per exposure is taken.
            on_excess: what `audit` does when exact exposures exceed the budget.

        Set `rung` to each in turn before its micro-batch's forward. Raises HiloreError if a number is not finite or
        negative.

        The profile's margin covers how the error by gradient norm differs between updates; by exposure alone both
        differ more, so a norm of another time makes the promise looser.
        """
        gamma = self._meta.gamma
        self._budget = UpdateBudget(
            self._costs,
            exposures,
            risk=self._meta.risk,
            gradient_exposure=None if gradient_norm is None else gradient_norm / gamma,
            on_excess=on_excess,
        )
        return list(self._budget.rungs)

    def audit(self, exposure: float) -> list[int]:
        """Tell the exact exposure of the next micro-batch, known after its forward and before its backward.

        Returns the update's rungs, which may have changed for the micro-batches to come. Warns once an update, or
        raises RiskExceeded, as `choose` was asked to. Raises IndexError past the update's last micro-batch.
        """
        return list(self._budget.audit(exposure))

    def acts_on(self, index: int, layer: nn.Module) -> bool:
        """Whether the plan is in place and this is its layer, not a copy of it."""
        return self._active and self._layers[index] is layer

    def remove(self) -> None:
        """Give every layer its own forward back; where another tool has wrapped it since, stop acting in it."""
        self._active = False
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            if layer.__dict__.get("forward") is forward:
                del layer.forward

    def __enter__(self) -> Self:
        self._active = True
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def run_layer(self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One training forward of layer `index` under the current rung. Raises PlanMismatch or ReplayError."""
        shape = self._check_call(index, args, kwargs)
        policy = self._ladder[self._rung][index]
        call = identity.call_signature(args, kwargs)
        if call != self._meta.call:
            self._warn_of_call(call)
            policy = RECOMPUTE_ALL
        watched = (args, kwargs, list(self._layers[index].parameters()), list(self._layers[index].buffers()))
        full = policy is not RECOMPUTE_ALL and shape == (self._meta.micro_batch, self._meta.tokens)
        audit = full and (self._rung, index) not in self._audited
        if policy.plain and not audit:
            return original(*args, **kwargs)
        if policy.plain:
            out, self._held[index] = _run_observed(self._layers[index], original, args, kwargs)
        else:
            replayed = LayerCall(f"layer {index}", policy.ops, watched)
            out = checkpointed(original, args, kwargs, contexts=replayed.contexts)
            self._held[index] = {policy.unit_numbers[key]: kept.held_bytes for key, kept in replayed.kept.items()}
        held = sum(self._held[index].values())
        if audit and held != policy.held_bytes:
            raise ReplayError(
                f"layer {index}",
                f"holds {held} bytes where the plan says {policy.held_bytes}",
                "profile and solve again with these versions and this kind of batch",
            )
        if audit:
            self._audited.add((self._rung, index))
        return out

    def _warn_of_call(self, call: str) -> None:
        if call not in self._other_calls:
            self._other_calls.add(call)
            warnings.warn(
                f"layers are called with other tensors ({call}) than in the profile ({self._meta.call}), as without a "
                "padding mask; hilore recomputes such micro-batches in full",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        if getattr(self._layers[index], "gradient_checkpointing", False):
            raise _checkpointing_is_on(f"layer {index}")
        cache = next((name for name in _CACHE_NAMES if kwargs.get(name) is not None), None)
        if cache is not None:
            rule = f"got a KV cache ({cache}) while training; a replay would append to it twice"
            raise PlanMismatch(f"layer {index}", rule, "set model.config.use_cache = False for the update")
        hidden = identity.hidden_states(args, kwargs)
        if torch.is_autocast_enabled(hidden.device.type):
            raise PlanMismatch(
                f"layer {index}",
                f"runs under autocast, but the plan was profiled in {self._meta.dtype} without",
                "load the model in the profiled dtype and switch the trainer's autocast (bf16, fp16) off",
            )
        batch, tokens = hidden.shape[:2]
        if batch > self._meta.micro_batch or tokens > self._meta.tokens:
            raise PlanMismatch(
                f"micro-batch of {batch} x {tokens} tokens",
                f"is larger than the plan's {self._meta.micro_batch} x {self._meta.tokens}",
                "profile and solve at the largest shape of the training, with --micro-batch, --prompt-tokens, "
                "--response-tokens",
            )
        return batch, tokens


def apply_plan(model: nn.Module, plan: Plan) -> Applied:
    """Make `model` train under `plan`, at the rung solved for its risk. Raises PlanMismatch naming both sides."""
    _check_identity(model, plan)
    _check_codecs(plan)
    where = identity.active_checkpointing(model)
    if where is not None:
        raise _checkpointing_is_on(where)
    layers = identity.decoder_layers(model)
    if any("forward" in layer.__dict__ for layer in layers):
        raise PlanMismatch(
            type(model).__name__,
            "has decoder layers whose forward is replaced already, by a plan or by another tool",
            "call applied.remove() on the earlier plan, or apply the plan before the other tool",
        )
    return Applied(model, plan)


def _forward(applied: Applied, index: int) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = types.MethodType(type(self).forward, self)
        if not (torch.is_grad_enabled() and self.training and applied.acts_on(index, self)):
            return original(*args, **kwargs)
        return applied.run_layer(index, original, args, kwargs)

    return forward


def _run_observed(
    layer: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[int, int]]:
    """Run a plain layer once under pack hooks that count the storages autograd saves, arguments and weights aside."""
    known = [*tensors((args, kwargs)), *layer.parameters(), *layer.buffers()]
    storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)
    held = 0

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        nonlocal held
        storage = tensor.untyped_storage()
        if storage not in storages:
            storages.add(storage)
            held += storage.nbytes()
        # detached: an op's own output would hold the op that holds it, for good if no backward comes
        return tensor.detach(), tensor._version  # noqa: SLF001

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = packed
        if tensor._version != version:  # noqa: SLF001
            raise ReplayError(
                "plain layer", "a saved tensor was changed in place before backward", "remove that change"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = original(*args, **kwargs)
    return out, {PLAIN_UNIT: held}


def _ladder(plan: Plan) -> list[list[LayerPolicy]]:
    """Policies by rung and layer, from rows in forward order."""
    ladder: list[list[LayerPolicy]] = [[] for _ in plan.meta.rungs]
    for (rung, _), rows in groupby(plan.rows, key=lambda row: (row.rung, row.layer)):
        ladder[rung].append(_layer_policy(list(rows)))
    return ladder


def _layer_policy(rows: list[PlanRow]) -> LayerPolicy:
    ops = tuple(
        OpPolicy(
            name=outputs[0].op,
            runs=outputs[0].replays,
            kept=tuple((row.leaf, row.codec) for row in outputs if row.action in (STORE, COMPRESS)),
        )
        for outputs in (list(group) for _, group in groupby(rows, key=lambda row: row.op_index))
    )
    return LayerPolicy(
        plain=rows[0].plain,
        ops=ops,
        unit_numbers={(row.op_index, row.leaf): row.unit for row in rows},
        held_bytes=sum(row.held_bytes for row in rows),
    )


def _check_identity(model: nn.Module, plan: Plan) -> None:
    meta = plan.meta
    layers = len(identity.decoder_layers(model))
    for what, planned, found in (
        ("model class", meta.model_class, type(model).__name__),
        ("decoder layers", meta.layers, layers),
        ("dtype", meta.dtype, identity.dtype_name(model)),
        ("attention kernel", meta.attention, identity.attention_name(model)),
        ("adapter", meta.adapter, identity.adapter_name(model)),
        ("configuration", meta.config_hash, identity.config_hash(model)),
        ("parameter shapes", meta.parameter_hash, identity.parameter_hash(model)),
    ):
        if planned != found:
            sides = [str(side)[:12] if len(str(side)) == 64 else str(side) for side in (planned, found)]
            raise PlanMismatch(
                f"plan for {meta.model}",
                f"{what} differ: the plan has {sides[0]}, the model has {sides[1]}",
                "load the model that was profiled, or profile and solve for this one",
            )


def _check_codecs(plan: Plan) -> None:
    for name in sorted({row.codec for row in plan.rows if row.action == COMPRESS}):
        codec(name)  # raises for one that is not registered


def _checkpointing_is_on(where: str) -> PlanMismatch:
    return PlanMismatch(
        where,
        "has its own gradient checkpointing on, which would turn every stored unit into a recomputed one",
        "switch it off in the model and set gradient_checkpointing=False in the trainer",
    )
