"""Run the command line in a folder of its own."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hilore_cli.__main__ import run
from tests.tables.samples import toy_plan, toy_profile


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        """Stdout as the one JSON object that it must be."""
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts


Hilore = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hilore(folder: Path, capsys: pytest.CaptureFixture[str]) -> Hilore:
    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def profile_file(folder: Path) -> Path:
    toy_profile().save(folder / "profiles" / "two-layers.parquet")
    return Path("profiles/two-layers.parquet")


@pytest.fixture
def plan_file(folder: Path) -> Path:
    toy_plan().save(folder / "plans" / "two-layers-1.10gc-r0.01.parquet")
    return Path("plans/two-layers-1.10gc-r0.01.parquet")
