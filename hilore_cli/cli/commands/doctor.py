"""`hilore doctor`: versions, device and kernels, and what would break here."""

# ruff: noqa: PLC0415 - torch and the solvers are imported as each of them is looked at

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from hilore_cli.cli import flags
from hilore_cli.cli.output import Output
from hilore_cli.cli.paths import PLANS, PROFILES
from hilore_cli.errors import HiloreError
from hilore_cli.quantities import format_bytes
from hilore_cli.report.grid import Grid

EXAMPLE = "Example: hilore doctor --json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that hilore needs, or could use, here."""

    name: str
    ok: bool
    found: str
    hint: str = ""
    """How to mend it; empty where it is fine."""
    required: bool = True


def command(*, json: flags.Json = False) -> None:
    """Look at versions, solvers, device and folders; exit 1 if something must be mended before hilore works here."""
    output = Output(as_json=json)
    checks = list(_checks())
    facts = [{"name": c.name, "ok": c.ok, "hint": c.hint, "found": c.found, "required": c.required} for c in checks]
    healthy = all(check.ok or not check.required for check in checks)
    rows = tuple((_mark(check), check.name, check.found, check.hint) for check in checks)
    output.show(Grid(title="", header=("", "what", "found", "hint"), rows=rows, words=4))
    output.emit({"ok": healthy, "checks": facts})
    if not healthy:
        raise typer.Exit(code=1)


def _mark(check: Check) -> str:
    return "✓ ok" if check.ok else "✗ mend" if check.required else "- absent"


def _checks() -> Iterator[Check]:
    python = sys.version_info
    yield Check(
        name="python",
        ok=(3, 11) <= python[:2] < (3, 13),
        found=".".join(map(str, python[:3])),
        hint="" if (3, 11) <= python[:2] < (3, 13) else "use Python 3.11 or 3.12",
    )
    for package, least in (("torch", "2.11"), ("transformers", "5.0"), ("pulp", "3.0"), ("pyarrow", "17.0")):
        yield _package(package, least=least)
    yield _package("gguf", least="0.17", required=False, hint="GGUF files need it: pip install 'hilore[gguf]'")
    yield _package("flash_attn", least="2.0", required=False, hint="only --attn flash_attention_2 needs it")
    for name, available in (("HiGHS", _highs), ("CBC", _cbc)):
        required = name == "HiGHS"
        hint = "pip install highspy" if required else "the solver of second choice; pip install --force-reinstall pulp"
        yield _solver(name, available, required=required, hint=hint)
    yield _device()
    for folder in (PROFILES, PLANS):
        yield _folder(folder)
    yield _hub_cache()


def _package(name: str, *, least: str, required: bool = True, hint: str = "") -> Check:
    import importlib.metadata

    fix = hint or f"pip install '{name}>={least}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, found="missing", hint=fix, required=required)
    ok = _numbers(version) >= _numbers(least)
    return Check(name=name, ok=ok, found=version, hint="" if ok else f"{fix} (needs {least})", required=required)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _highs() -> bool:
    import pulp

    return bool(pulp.HiGHS(msg=False).available())


def _cbc() -> bool:
    import pulp

    return bool(pulp.PULP_CBC_CMD(msg=False).available())


def _solver(name: str, available: Callable[[], bool], *, required: bool, hint: str) -> Check:
    try:
        ok = available()
    except Exception as error:  # noqa: BLE001 - a solver that cannot even be asked is an absent one
        return Check(name=f"solver {name}", ok=False, found=type(error).__name__, hint=hint, required=required)
    found = "available" if ok else "missing"
    return Check(name=f"solver {name}", ok=ok, found=found, hint="" if ok else hint, required=required)


def _device() -> Check:
    hint = "pip install torch"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(name="device", ok=False, found=f"torch does not load: {error}", hint=hint)
    if torch.cuda.is_available():
        found = ", ".join(
            f"{properties.name} {format_bytes(properties.total_memory)}"
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        )
        return Check(name="device", ok=True, found=found)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Check(name="device", ok=True, found=f"no GPU; {cores} CPU cores, {format_bytes(memory)}")


def _folder(folder: Path) -> Check:
    from hilore_cli.tables.parquet import check_writable

    made = not folder.exists()
    try:
        check_writable(folder / "doctor.parquet", force=True)
    except HiloreError as error:
        return Check(name=f"{folder}/", ok=False, found=error.rule, hint="run hilore in a folder that you can write")
    if made:
        folder.rmdir()
    return Check(name=f"{folder}/", ok=True, found="writable")


def _hub_cache() -> Check:
    home = os.environ.get("HF_HOME")
    cache = Path(home) if home else Path.home() / ".cache" / "huggingface"
    found = f"{'HF_HOME' if home else 'default'}{'' if cache.is_dir() else ', empty'}"
    hint = "" if cache.is_dir() else "offline, name a local folder, set HF_HOME, or pass --weights random"
    return Check(name="model cache", ok=cache.is_dir(), found=found, hint=hint, required=False)
