"""Run something under torch.profiler and read its trace: allocator events and our own markers, on one clock.

The exported trace is the profiler's public form: each `[memory]` event carries the signed bytes, address and device
of one allocation or release, each `record_function` its start and length.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
PREFIX = "hilore:"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent:
    """One allocation (positive) or release (negative)."""

    at_us: float
    bytes: int
    address: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One `record_function` of ours."""

    start_us: float
    duration_us: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Events in time order; levels are bytes above the start of the trace."""

    events: tuple[MemoryEvent, ...]
    levels: tuple[int, ...]
    """Level right after each event."""
    marks: tuple[Mark, ...]
    device_marks: tuple[Mark, ...]
    """On the accelerator's clock: for lengths only. On CPU the same as `marks`."""

    @property
    def peak_bytes(self) -> int:
        """Highest level above the start."""
        return max(self.levels, default=0)


def trace(run: Callable[[], Any], device: torch.device) -> Trace:
    """Run under torch.profiler with memory profiling and return what it saw on `device`."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        entries = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return _read(entries, device)


def _read(entries: list[dict[str, Any]], device: torch.device) -> Trace:
    wanted = _DEVICE_TYPES[device.type]
    events = sorted(
        (
            MemoryEvent(at_us=float(entry["ts"]), bytes=entry["args"]["Bytes"], address=entry["args"]["Addr"])
            for entry in entries
            if entry.get("name") == "[memory]" and entry["args"]["Device Type"] == wanted
        ),
        key=lambda event: event.at_us,
    )
    marks = _marks(entries, "user_annotation")
    return Trace(
        events=tuple(events),
        levels=tuple(accumulate(event.bytes for event in events)),
        marks=marks,
        device_marks=_marks(entries, "gpu_user_annotation") if device.type == "cuda" else marks,
    )


def _marks(entries: list[dict[str, Any]], category: str) -> tuple[Mark, ...]:
    marks = (
        Mark(start_us=float(entry["ts"]), duration_us=float(entry["dur"]), name=entry["name"].removeprefix(PREFIX))
        for entry in entries
        if entry.get("cat") == category and entry.get("name", "").startswith(PREFIX)
    )
    return tuple(sorted(marks, key=lambda mark: mark.start_us))
