"""Starting: fast, and without torch where nothing is measured."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hilore_cli
from tests.tables.samples import toy_plan, toy_profile

ROOT = Path(__file__).parents[2]
RUN_AND_LIST = """
import sys
from hilore_cli.__main__ import run
run(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
"""


def imported_by(*arguments: str, folder: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy_profile().save(tmp_path / "profiles" / "two-layers.parquet")
    toy_plan().save(tmp_path / "plans" / "plan.parquet")
    return tmp_path


def test_help_imports_neither_torch_nor_parquet_nor_pandas_nor_the_solver(folder: Path) -> None:
    assert not imported_by("--help", folder=folder) & {"torch", "pyarrow", "pandas", "pulp", "numpy"}


@pytest.mark.parametrize(
    "command",
    [
        "solve --mem 1GB",
        "show plans/plan.parquet",
        "show --text plans/plan.parquet",
        "diff plans/plan.parquet plans/plan.parquet",
    ],
)
def test_without_measuring_there_is_no_torch(command: str, folder: Path) -> None:
    loaded = imported_by(*command.split(), folder=folder)
    assert "pyarrow" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("verb", ["profile", "verify", "demo"])
def test_the_help_of_a_measuring_verb_needs_no_torch(verb: str, folder: Path) -> None:
    assert "torch" not in imported_by(verb, "--help", folder=folder)


def test_the_public_api_is_listed_and_lazy() -> None:
    script = "import sys, hilore_cli; print(*dir(hilore_cli)); assert not {'torch', 'pyarrow'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(hilore_cli.__all__) <= set(done.stdout.split())


@pytest.mark.parametrize("name", hilore_cli.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hilore_cli, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'aply_plan'"):
        hilore_cli.aply_plan  # noqa: B018


WAIT = """
import sys, time
from types import ModuleType
fake = ModuleType("hilore_cli.solving.solve")
def solve(*_, **__):
    print("solving", flush=True)
    time.sleep(60)
fake.solve, fake.profile_warnings = solve, lambda _: []
sys.modules["hilore_cli.solving.solve"] = fake
from hilore_cli.__main__ import main
main()
"""


def test_ctrl_c_ends_quietly_with_130(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, "solve", "--mem", "1GB"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == "using profiles/two-layers.parquet, newest of 1\n"
    assert [path.name for path in (folder / "plans").iterdir()] == ["plan.parquet"]
