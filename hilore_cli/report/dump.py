"""A profile or plan as stable text, a line a row: what `git diff` compares through its textconv."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from hilore_cli.tables import plan_table, profile_table
from hilore_cli.tables.plan_table import Plan
from hilore_cli.tables.profile_table import Profile

_PLAN_KEYS = ("rung", "layer", "unit", "module", "op", "action")
_PROFILE_KEYS = ("shape", "layer", "unit", "module", "op", "codec")


def dump_lines(file: Profile | Plan) -> Iterator[str]:
    """Metadata, sorted by name, then one line a row; nothing depends on the file's place or on the day."""
    if isinstance(file, Plan):
        kind, keys, columns = "plan", _PLAN_KEYS, plan_table.SCHEMA.names
    else:
        kind, keys, columns = "profile", _PROFILE_KEYS, profile_table.SCHEMA.names
    yield f"kind = {kind}"
    for name, value in sorted(flat_metadata(dataclasses.asdict(file.meta))):
        yield f"{name} = {value}"
    rest = [name for name in columns if name not in keys]
    read_keys, read_rest = attrgetter(*keys), attrgetter(*rest)
    for row in file.rows:
        labels = " ".join(f"{name} {value}" for name, value in zip(keys, read_keys(row), strict=True) if value != "")
        values = " ".join(
            f"{name}={_plain(value)}" for name, value in zip(rest, read_rest(row), strict=True) if value not in ("", ())
        )
        yield f"{labels}: {values}"


def flat_metadata(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested metadata as `section.name` and JSON values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_metadata(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for position, entry in enumerate(value):
                yield from flat_metadata(entry, f"{prefix}{name}[{position:03}].")
        else:
            yield f"{prefix}{name}", json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
