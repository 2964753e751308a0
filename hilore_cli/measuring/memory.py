"""The memory curve of a GC step, from allocator events: what the solver adds held bytes to (DESIGN section 5).

One traced step under full checkpointing gives, layer by layer, the peak of its forward, the level at which its
backward begins (its base), and every moment of its replay and backward: the height above the base and which units'
storages are alive. A unit that a plan stores is not rebuilt, so its bytes leave the moments it is alive in.
A second step with one plain layer a class gives how far a plain layer's backward rises above what it holds.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from hilore_cli.measuring.checkpointing import checkpointed
from hilore_cli.measuring.identity import hidden_states
from hilore_cli.measuring.layer_calls import around_layers, layer_output
from hilore_cli.measuring.stream import counts, leaves
from hilore_cli.measuring.tracing import PREFIX, MemoryEvent, Trace, trace
from hilore_cli.tables.profile_table import ReplayPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Where one output of a replayed op lay."""

    layer: int
    unit: int
    op_index: int
    address: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """A step's trace, cut by our marks into the windows of the timeline."""

    trace: Trace
    outputs: tuple[Output, ...]
    layers: int
    times: tuple[float, ...]
    starts: Mapping[str, float]
    ends: Mapping[str, float]

    def forward_window(self, layer: int) -> tuple[float, float]:
        """From a layer's call to its return, in microseconds of the trace."""
        return self.starts[f"forward:{layer}"], self.ends[f"forward:{layer}"]

    def backward_window(self, layer: int) -> tuple[float, float]:
        """From the gradient's arrival at the layer's output to its arrival at the layer's input."""
        return self.starts[f"backward:{layer}"], self.starts.get(f"backward:{layer - 1}", self.times[-1])

    @property
    def head_window(self) -> tuple[float, float]:
        """From the last layer's return to its backward."""
        return self.forward_window(self.layers - 1)[1], self.backward_window(self.layers - 1)[0]

    @property
    def tail_peak(self) -> int:
        """Highest level after the first layer's backward."""
        return self.peak((self.backward_window(0)[1], self.times[-1]))

    def level_at(self, time_us: float) -> int:
        """Bytes above the start at this time."""
        index = bisect_right(self.times, time_us) - 1
        return self.trace.levels[index] if index >= 0 else 0

    def peak(self, window: tuple[float, float]) -> int:
        """Highest level in a window."""
        first, last = bisect_left(self.times, window[0]), bisect_right(self.times, window[1])
        return max(self.level_at(window[0]), *self.trace.levels[first:last], 0)


class _Marking(TorchDispatchMode):
    """Marks each counted op of a replay and notes where its outputs lie."""

    def __init__(self, layer: int, outputs: list[Output]) -> None:
        super().__init__()
        self.layer = layer
        self.outputs = outputs
        self.ops = self.units = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not counts(func, args):
            return func(*args, **(kwargs or {}))
        with record_function(f"{PREFIX}op:{self.layer}:{self.ops}"):
            out = func(*args, **(kwargs or {}))
        for value in list(leaves(out)) or [None]:
            if isinstance(value, torch.Tensor):
                address = value.untyped_storage().data_ptr()
                self.outputs.append(Output(layer=self.layer, unit=self.units, op_index=self.ops, address=address))
            self.units += 1
        self.ops += 1
        return out


def trace_step(
    model: nn.Module, step: Callable[[], Any], device: torch.device, *, plain: frozenset[int] = frozenset()
) -> TracedStep:
    """Trace one step with every layer checkpointed but those in `plain`, marked as the curve needs it."""
    outputs: list[Output] = []
    layers = 0

    def arrival(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            with record_function(f"{PREFIX}backward:{name}"):
                pass

        return hook

    def run(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal layers
        layers = max(layers, index + 1)
        if index == 0:
            hidden = hidden_states(args, kwargs)
            if hidden.requires_grad:  # not so with frozen embeddings
                hidden.register_hook(arrival("-1"))
        with record_function(f"{PREFIX}forward:{index}"):
            if index in plain:
                out = original(*args, **kwargs)
            else:
                marking = _Marking(index, outputs)
                out = checkpointed(original, args, kwargs, contexts=lambda: (nullcontext(), marking))
        layer_output(out).register_hook(arrival(str(index)))
        return out

    with around_layers(model, run):
        seen = trace(step, device)
    return TracedStep(
        trace=seen,
        outputs=tuple(outputs),
        layers=layers,
        times=tuple(event.at_us for event in seen.events),
        starts={mark.name: mark.start_us for mark in seen.marks},
        ends={mark.name: mark.start_us + mark.duration_us for mark in seen.marks},
    )


def replay_points(step: TracedStep, layers: Iterable[int], unit_bytes: Mapping[int, int]) -> tuple[ReplayPoint, ...]:
    """Moments in the backward of these layers (one class) that can decide its working set, dominated ones dropped.

    Args:
        step: a traced step in which the layers were replayed.
        layers: the layers of one class.
        unit_bytes: bytes of each unit that a plan may store.
    """
    points: dict[frozenset[int], int] = {}
    for layer in layers:
        window = step.backward_window(layer)
        base = step.level_at(window[0])
        lifetimes = _lifetimes(step, layer, unit_bytes)
        first, last = bisect_left(step.times, window[0]), bisect_right(step.times, window[1])
        for index in range(first, last):
            now = step.times[index]
            alive = frozenset(unit for unit, (start, end) in lifetimes.items() if start <= now < end)
            points[alive] = max(points.get(alive, 0), step.trace.levels[index] - base)
    return tuple(
        ReplayPoint(bytes=height, alive=tuple(sorted(alive)))
        for alive, height in sorted(points.items(), key=lambda item: (-item[1], sorted(item[0])))
        if not any(
            height <= other_height - sum(unit_bytes[unit] for unit in other - alive)
            for other, other_height in points.items()
            if other != alive
        )
    )


def plain_extra_bytes(step: TracedStep, layer: int) -> int:
    """How far the backward of a layer that ran plain rises above the level at its start."""
    window = step.backward_window(layer)
    return step.peak(window) - step.level_at(window[0])


def _lifetimes(step: TracedStep, layer: int, unit_bytes: Mapping[int, int]) -> dict[int, tuple[float, float]]:
    """When the storage of each unit was alive in the layer's replay: from allocation to release, in microseconds."""
    by_address: dict[int, list[MemoryEvent]] = defaultdict(list)
    for event in step.trace.events:
        by_address[event.address].append(event)
    lifetimes = {}
    for output in step.outputs:
        if output.layer != layer or output.unit not in unit_bytes:
            continue
        name = f"op:{layer}:{output.op_index}"
        start, end = step.starts[name], step.ends[name]
        events = by_address[output.address]
        born = next((event.at_us for event in events if event.bytes > 0 and start <= event.at_us <= end), None)
        if born is not None:
            died = next((event.at_us for event in events if event.bytes < 0 and event.at_us > born), step.times[-1])
            lifetimes[output.unit] = (born, died)
    return lifetimes
