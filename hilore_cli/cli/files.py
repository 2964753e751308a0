"""Open whatever hilore file a path names."""

import json
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from hilore_cli.tables.parquet import METADATA_KEY
from hilore_cli.tables.plan_table import Plan, load_plan
from hilore_cli.tables.profile_table import Profile, load_profile


def load_file(path: Path) -> Profile | Plan:
    """A profile or a plan, whichever it is. Raises FileError."""
    return load_profile(path) if _stated_kind(path) == "profile" else load_plan(path)


def _stated_kind(path: Path) -> Literal["profile", "plan"]:
    """What the file says it is; for a damaged one the folder is the better witness, and loading will say more."""
    try:
        kind = json.loads((pq.read_schema(path).metadata or {})[METADATA_KEY])["kind"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        kind = "profile" if path.parent.name == "profiles" else "plan"
    return "profile" if kind == "profile" else "plan"
