"""Sizes, probabilities and model names as users write them: GB is 10^9 bytes, GiB is 2^30, never confused."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hilore_cli.errors import HiloreError

_UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>[A-Za-z]+)")
_EXAMPLES = "write 48GB, 44.7GiB, 0.9x (of the device) or 1.10gc (of the measured GC peak)"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCap:
    """A memory cap as asked for: bytes, a share of the device, or a multiple of GC's measured peak."""

    text: str
    kind: Literal["bytes", "device", "gc"]
    value: float

    def resolve(self, *, gc_peak_bytes: int, device_bytes: int) -> int:
        """Bytes of this cap, given GC's measured peak and the device's memory (both in bytes)."""
        if self.kind == "bytes":
            return round(self.value)
        return round(self.value * (gc_peak_bytes if self.kind == "gc" else device_bytes))


def parse_memory(text: str) -> MemoryCap:
    """Read `48GB`, `44.7GiB`, `0.9x` or `1.10gc`. Raises HiloreError naming the flag and the fix."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        rule = "needs a unit" if re.fullmatch(r"[0-9.]+", text.strip()) else "is not a memory size"
        raise HiloreError(f"--mem {text}", rule, _EXAMPLES)
    number, unit = float(match["number"]), match["unit"]
    if number <= 0:
        raise HiloreError(f"--mem {text}", "must be above zero", _EXAMPLES)
    if unit in ("x", "X"):
        return MemoryCap(text=text, kind="device", value=number)
    if unit.lower() == "gc":
        return MemoryCap(text=text, kind="gc", value=number)
    if unit.upper() not in _UNIT_BYTES or unit[-1] == "b":
        raise HiloreError(f"--mem {text}", f"has the unknown unit '{unit}'", _EXAMPLES)
    return MemoryCap(text=text, kind="bytes", value=number * _UNIT_BYTES[unit.upper()])


def check_risk(risk: float) -> float:
    """A risk is a relative gradient error: 0 <= risk < 1. Raises HiloreError otherwise."""
    if not 0.0 <= risk < 1.0:  # also refuses nan
        raise HiloreError(
            f"--risk {risk:g}",
            "must be at least 0 and below 1",
            "risk is the relative gradient error allowed: 0 is exact, 0.01 is one per cent",
        )
    return risk


def format_bytes(count: int) -> str:
    """`2.46 GB`, `310 MB`, `12.0 kB`, `17 B`: three digits, decimal units."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            scaled = count / size
            digits = 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0
            return f"{scaled:.{digits}f} {unit}"
    return f"{count} B"


def model_slug(model: str) -> str:
    """`Qwen/Qwen3-1.7B` -> `qwen3-1.7b`; a folder gives its name, a GGUF file its stem."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "model"
