"""Op-level replay of one decoder layer (DESIGN section 3).

The layer runs inside torch's non-reentrant checkpoint. In forward a dispatch mode keeps the outputs that the plan
stores or compresses. In backward the checkpoint calls the layer again, and a second mode hands each kept output back
instead of running its op, runs what is still needed, and skips dead ops: nothing reads their outputs, so an
uninitialised tensor of the right shape stands in for them. Every check that keeps this from being silently wrong is
here: the op streams must agree by position and name, and no tensor that replay reads may have changed since forward.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli.errors import ReplayError
from hilore_cli.measuring.codecs import Packed, codec
from hilore_cli.measuring.stream import NAMES, UNMARKED_VIEWS, counts, leaves, tensors

NO_CODEC = "none"  # as in the tables
SAME = "change nothing between this forward and its backward, or solve a plan that recomputes this layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPolicy:
    """What to do with one op of the stream: its name, whether replay runs it, and the codec of each kept leaf."""

    name: str
    runs: bool
    kept: tuple[tuple[int, str], ...]

    @property
    def in_place(self) -> bool:
        """By torch's naming: `aten.mul_.Tensor`."""
        return self.name.split(".")[1].endswith("_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One kept output: the tensor or its packed form, and whose versions say that it is still what it was."""

    value: torch.Tensor | Packed
    held_bytes: int
    watched: list[tuple["weakref.ref[torch.Tensor]", int]]
    """The op's own output and its unmarked views, each with its version: their counters are separate.

    Weakly, for below autograd no alias shares a counter, and the output itself would hold the graph that holds it.
    """

    def watch(self, tensor: torch.Tensor) -> None:
        """Note the version of a tensor in this storage."""
        self.watched.append((weakref.ref(tensor), tensor._version))  # noqa: SLF001

    def changed(self) -> bool:
        """Whether a tensor that shares the kept storage was written into."""
        alive = ((ref(), version) for ref, version in self.watched)
        return any(tensor is not None and tensor._version != version for tensor, version in alive)  # noqa: SLF001


def stand_in(like: tuple[Any, ...]) -> torch.Tensor:
    """An uninitialised tensor for the output of a dead op: (sizes, strides, dtype, device)."""
    size, stride, dtype, device = like
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class LayerCall:
    """One forward of one layer and, later, its replay: what is kept, and what must not change meanwhile."""

    def __init__(self, path: str, policy: tuple[OpPolicy, ...], arguments: Any) -> None:
        self.path = path
        self.policy = policy
        self.kept: dict[tuple[int, int], Kept] = {}
        self.dead: dict[int, Any] = {}
        self.ops_in_forward = 0
        self._arguments = [(tensor, tensor._version) for tensor in tensors(arguments)]  # noqa: SLF001

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The pair that checkpoint's `context_fn` wants: one around forward, one around replay.

        A dispatch mode only where it decides something; the check for changed tensors always.
        """
        if any(op.kept for op in self.policy):
            return _Keeping(self), _Replaying(self)
        return nullcontext(), _Unchanged(self)

    def op_policy(self, index: int, func: Any, when: str) -> OpPolicy:
        """The policy at this position of the stream. Raises ReplayError if another op stands there."""
        if index < len(self.policy) and self.policy[index].name == NAMES[func]:
            return self.policy[index]
        planned = self.policy[index].name if index < len(self.policy) else "the end of the layer"
        raise ReplayError(
            f"{self.path}, op {index} in {when}",
            f"the plan has {planned}, the model runs {func}",
            "profile and solve again with these versions, this attention kernel and this kind of batch",
        )

    def keep(self, index: int, op: OpPolicy, out: Any) -> None:
        """Keep the leaves that the plan keeps, compressed at once, so that an original dies with its last reader."""
        values = list(leaves(out))
        for leaf, name in op.kept:
            tensor = values[leaf]
            value = tensor.detach() if name == NO_CODEC else codec(name).pack(tensor.detach())
            kept = self.kept[index, leaf] = Kept(
                value=value,
                held_bytes=value.held_bytes if isinstance(value, Packed) else value.untyped_storage().nbytes(),
                watched=[],
            )
            kept.watch(tensor)

    def watch_view(self, base: torch.Tensor, view: torch.Tensor) -> None:
        """A view that torch does not mark as one has a version counter of its own: watch it like its base."""
        for kept in self.kept.values():
            if any(ref() is base for ref, _ in kept.watched):
                kept.watch(view)

    def give_back(self, index: int, leaf: int) -> torch.Tensor:
        """A kept output as if its op had just run."""
        value = self.kept[index, leaf].value
        return value.detach() if isinstance(value, torch.Tensor) else codec(value.codec).unpack(value)

    def check_unchanged(self) -> None:
        """Raise ReplayError if an argument or a kept output was changed in place since forward."""
        if any(tensor._version != version for tensor, version in self._arguments):  # noqa: SLF001
            raise ReplayError(self.path, "an input or a weight of it was changed in place after its forward", SAME)
        for (index, _), kept in self.kept.items():
            if kept.changed():
                name = self.policy[index].name
                raise ReplayError(self.path, f"the kept output of {name} was changed in place after its forward", SAME)


class _Unchanged(nullcontext[None]):
    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call

    def __enter__(self) -> None:
        self.call.check_unchanged()


class _KeepingDispatch:
    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        call = self.call
        if counts(func, args):
            index = call.ops_in_forward
            call.ops_in_forward += 1
            op = call.op_policy(index, func, "forward")
            if op.kept:
                call.keep(index, op, out)
            if not (op.runs or (op.kept and isinstance(out, torch.Tensor))):
                call.dead[index] = _describe(out)
        elif func in UNMARKED_VIEWS:
            call.watch_view(args[0], out)
        return out


class _ReplayingDispatch:
    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.call = call
        self.index = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not counts(func, args):
            return func(*args, **(kwargs or {}))
        call, index = self.call, self.index
        self.index += 1
        op = call.op_policy(index, func, "replay")
        if op.runs:
            out = func(*args, **(kwargs or {}))
            return _rebuild(call, index, dict(op.kept), out) if op.kept else out
        if index not in call.dead:
            return call.give_back(index, 0)  # the op's one output is kept
        if op.in_place:
            return args[0]  # its target is as dead as itself
        return _rebuild(call, index, dict(op.kept), call.dead[index])


# A mode that defines __torch_dispatch__ itself gets it wrapped against torch.compile, at a quarter of its cost; a plan
# is for eager training, where there is nothing to guard against.
class _Keeping(_KeepingDispatch, TorchDispatchMode):
    pass


class _Replaying(_ReplayingDispatch, TorchDispatchMode):
    def __enter__(self) -> Any:
        self.index = 0
        self.call.check_unchanged()
        return super().__enter__()


def _rebuild(call: LayerCall, index: int, kept: dict[int, str], out: Any) -> Any:
    """The op's outputs in their own structure: kept leaves handed back, the others run or stood in for."""
    if isinstance(out, _Description):  # most ops have one output
        return stand_in(out)
    position = -1

    def fill(value: Any) -> Any:
        nonlocal position
        position += 1
        if position in kept:
            return call.give_back(index, position)
        return stand_in(value) if isinstance(value, _Description) else value

    return _each_leaf(out, fill)


def _each_leaf(values: Any, change: Callable[[Any], Any]) -> Any:
    """Not a closure that calls itself: that is a cycle, and would hold the call and all it keeps until a collection."""
    if isinstance(values, tuple | list) and not isinstance(values, _Description):
        return type(values)([_each_leaf(value, change) for value in values])
    return change(values)


class _Description(tuple[Any, ...]):
    """Sizes, strides, dtype and device of a tensor that is not kept."""

    __slots__ = ()


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Description((value.size(), value.stride(), value.dtype, value.device))
    if isinstance(value, tuple | list):
        return type(value)([_describe(entry) for entry in value])
    return value
