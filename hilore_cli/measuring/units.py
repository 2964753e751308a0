"""Record one decoder layer's op stream from a real run: its units, who reads whom, and what autograd saves.

A dispatch mode sees every op below autograd, pack hooks see what autograd saves; both speak of storages, and while
the recorder lives it keeps each storage alive, so that one cannot be taken for another that reuses its address.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from hilore_cli.errors import HiloreError
from hilore_cli.measuring.identity import hidden_states
from hilore_cli.measuring.stream import counts, leaves, mutates, tensors
from hilore_cli.tables.profile_table import INPUT_UNIT


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecord:
    """One output of one counted op of a layer."""

    op_index: int
    leaf: int
    module: str
    op: str
    occurrence: int
    dtype: str
    numel: int
    bytes: int
    flops: int
    reads: tuple[int, ...]
    floating: bool
    keepable: bool = True
    saved: bool = False
    forced: bool = False

    @property
    def structure(self) -> tuple[Any, ...]:
        """What layers of one class share."""
        return (
            self.op_index,
            self.leaf,
            self.op,
            self.bytes,
            self.dtype,
            self.reads,
            self.keepable,
            self.saved,
            self.forced,
        )


_BLANK = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(slots=True)
class LayerRecorder:
    """Units of one layer call, in the order they are made; see `record_layer`."""

    units: list[UnitRecord] = field(default_factory=list)
    external: list[torch.UntypedStorage] = field(default_factory=list)
    """Storages of parameters, buffers and arguments (the layer input too): never kept."""
    module: str = ""
    _unit_of: dict[int, int] = field(default_factory=dict)
    _alive: list[torch.UntypedStorage] = field(default_factory=list)
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    _ops: int = 0

    def storage_unit(self, tensor: torch.Tensor) -> int | None:
        """The unit whose storage this tensor shares; INPUT_UNIT for the layer input."""
        return self._unit_of.get(id(tensor.untyped_storage()))

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, random: bool) -> None:
        """Add one counted op that has just run."""
        read = {unit for unit in map(self.storage_unit, tensors((args, kwargs))) if unit is not None}
        written = self._written(func, args, kwargs)
        values = list(leaves(out)) or [None]
        blank = func.overloadpacket.__name__ in _BLANK  # a kernel that torch does not see may fill it
        tied = random or bool(written) or blank
        inherited_bytes = self._supersede(written)
        name = str(func)
        occurrence = self._seen[self.module, name]
        self._seen[self.module, name] += 1
        for leaf, value in enumerate(values):
            is_tensor = isinstance(value, torch.Tensor)
            aliased = is_tensor and (self._is_external(value) or self.storage_unit(value) is not None)
            floating = is_tensor and value.is_floating_point()
            self.units.append(
                UnitRecord(
                    op_index=self._ops,
                    leaf=leaf,
                    module=self.module,
                    op=name,
                    occurrence=occurrence,
                    dtype=str(value.dtype).removeprefix("torch.") if is_tensor else "none",
                    numel=value.numel() if is_tensor else 0,
                    bytes=value.untyped_storage().nbytes()
                    if is_tensor and not aliased
                    else inherited_bytes * (leaf == 0),
                    flops=_flops(func, args, kwargs, out) if leaf == 0 else 0,
                    reads=tuple(sorted(read)),
                    floating=floating,
                    keepable=is_tensor and not aliased and not tied,
                    forced=random or blank or not any(isinstance(v, torch.Tensor) for v in values),
                )
            )
            if is_tensor:
                self.own(value, len(self.units) - 1)
        for tensor in written:
            self.own(tensor, len(self.units) - 1)
        self._ops += 1

    def saved(self, tensor: torch.Tensor) -> None:
        """Note that autograd saves this tensor."""
        unit = self.storage_unit(tensor)
        if unit is not None and unit != INPUT_UNIT:
            self.units[unit] = replace(self.units[unit], saved=True)

    def _supersede(self, written: list[torch.Tensor]) -> int:
        """Bytes of the written storages, which from now on belong to their new version."""
        moved = 0
        for unit in {unit for unit in map(self.storage_unit, written) if unit is not None}:
            moved += self.units[unit].bytes
            self.units[unit] = replace(self.units[unit], keepable=False, bytes=0)
        return moved

    def own(self, tensor: torch.Tensor, unit: int) -> None:
        """From now on this tensor's storage is that unit's."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._unit_of[id(storage)] = unit

    def _is_external(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return any(storage is other for other in self.external)

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if not mutates(func):
            return []
        schema = func._schema  # noqa: SLF001 - the only place an overload says what it writes
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [
            tensor
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors(named.get(argument.name))
        ]
        for tensor in written:
            if self._is_external(tensor):
                raise HiloreError(
                    f"{self.module or 'decoder layer'} ({func})",
                    "writes in place into the layer's input, a parameter or a cache, which a replay would do twice",
                    "use the model with use_cache=False, and without in-place changes of its inputs",
                )
        return written


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: LayerRecorder, device: torch.device) -> None:
        super().__init__()
        self.recorder = recorder
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not counts(func, args):
            return func(*args, **kwargs)
        before = _rng_state(self.device)
        out = func(*args, **kwargs)
        self.recorder.saw(func, args, kwargs, out, random=not torch.equal(before, _rng_state(self.device)))
        return out


@contextmanager
def record_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[LayerRecorder]:
    """Record every op that runs inside, where `layer(*args, **kwargs)` is to be called with grad enabled."""
    known = [*layer.parameters(), *layer.buffers(), *tensors((args, kwargs))]
    recorder = LayerRecorder(external=[tensor.untyped_storage() for tensor in known])
    recorder.own(hidden_states(args, kwargs), INPUT_UNIT)
    handles = []
    for path, module in layer.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(recorder, path)))
        handles.append(module.register_forward_hook(_leave(recorder, path.rpartition(".")[0])))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        recorder.saved(tensor)
        return tensor.detach()  # an op's own output would hold the op that holds it, for good

    try:
        device = next(iter(known)).device
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _Watch(recorder, device):
            yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _enter(recorder: LayerRecorder, path: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.module = path

    return hook


def _leave(recorder: LayerRecorder, parent: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        recorder.module = parent

    return hook


def _rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=out))
    if "scaled_dot_product" in str(func):
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    return 0
