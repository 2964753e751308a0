"""Times: whole steps in interleaved rounds, and the ops of a replay from the profiler's marks."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hilore_cli.measuring.tracing import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """One variant's rounds, in microseconds."""

    wall_us: tuple[float, ...]
    cpu_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median wall time."""
        return median(self.wall_us)

    @property
    def median_cpu_us(self) -> float:
        """Median CPU time of the process."""
        return median(self.cpu_us)

    @property
    def fastest_us(self) -> float:
        """Fastest wall time: the steadiest figure on a shared machine."""
        return min(self.wall_us)


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    device: torch.device,
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    advance: Callable[[], None] = lambda: None,
    warmups: int = 1,
) -> dict[str, Rounds]:
    """Time each variant once a round, in turn (A B C A B C), after `warmups` untimed rounds.

    Args:
        variants: what to time, by name.
        rounds: timed rounds.
        device: waited for before and after each run.
        around: a context to enter, untimed, around each run of a variant.
        advance: called after each run.
        warmups: untimed rounds before.
    """
    wall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for number in range(-warmups, rounds):
        for name, run in variants.items():
            with around[name]() if around else nullcontext():
                _wait(device)
                wall_start, cpu_start = time.perf_counter(), time.process_time()
                run()
                _wait(device)
                wall_us, cpu_us = time.perf_counter() - wall_start, time.process_time() - cpu_start
            if number >= 0:
                wall[name].append(wall_us * 1e6)
                cpu[name].append(cpu_us * 1e6)
            advance()
    return {name: Rounds(wall_us=tuple(wall[name]), cpu_us=tuple(cpu[name])) for name in variants}


def op_times(traces: Iterable[Trace], layer_class: Sequence[int]) -> dict[tuple[int, int], float]:
    """(class, op index) -> microseconds of the op in replay: median over the class's layers and the traces."""
    samples: dict[tuple[int, int], list[float]] = defaultdict(list)
    for seen in traces:
        for mark in seen.device_marks:
            kind, _, place = mark.name.partition(":")
            if kind == "op":
                layer, _, index = place.partition(":")
                samples[layer_class[int(layer)], int(index)].append(mark.duration_us)
    return {key: median(values) for key, values in samples.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
