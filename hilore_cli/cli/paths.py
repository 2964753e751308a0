"""Where profiles and plans lie, what they are called, and which one is meant when none is named."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hilore_cli.errors import HiloreError
from hilore_cli.quantities import model_slug

PROFILES, PLANS = Path("profiles"), Path("plans")
_MAKE = {
    "profile": "measure one with `hilore profile --model ID_OR_PATH`, or name it",
    "plan": "solve one with `hilore solve --mem 48GB`, or name it",
}


def profile_path(model: str, *, folder: Path = PROFILES) -> Path:
    """Where a profile goes if `--out` says nothing."""
    return folder / f"{model_slug(model)}.parquet"


def plan_path(profile_name: str, *, cap_text: str, risk: float, folder: Path = PLANS) -> Path:
    """Where a plan goes if `--out` says nothing: `plans/qwen3-1.7b-48GB-r0.01.parquet`."""
    return folder / f"{profile_name}-{cap_text.replace(' ', '')}-r{risk:g}.parquet"


def newest(kind: Literal["profile", "plan"]) -> tuple[Path, str]:
    """The file meant when none is named, and the note that says so. Raises HiloreError if there is none."""
    folder = PROFILES if kind == "profile" else PLANS
    found = sorted(folder.glob("*.parquet"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not found:
        raise HiloreError(f"{folder}/", f"holds no {kind}", _MAKE[kind])
    return found[-1], f"using {found[-1]}, newest of {len(found)}"


def command_line(verb: str, flags: Mapping[str, object]) -> str:
    """The command as a file records it: given flags in a fixed order, paths as seen from the working folder."""
    words = ["hilore", verb]
    for flag, value in flags.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += [flag, _from_here(one) if isinstance(one, Path) else str(one)]
    return shlex.join(words)


def _from_here(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
