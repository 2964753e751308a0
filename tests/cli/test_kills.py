"""SIGKILL at any moment: the file that people commit is the old one or the new one, and what is left gets swept."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hilore_cli import load_plan, load_profile, solve
from hilore_cli.tables.parquet import check_writable
from tests.solving.toys import toy_profile

ROOT = Path(__file__).parents[2]
SOLVE_KILLS, PROFILE_KILLS = 20, 6
# Dies where a hand-made kill could only hit by luck: at the n-th call of a function that writing goes through.
DIE_AT = """
import os, signal, sys
owner, name, when = sys.argv[1:4]
import pyarrow.parquet as pq
from pathlib import Path
home = {"os": os, "pq": pq, "Path": Path}[owner]
original = getattr(home, name)
def dying(*args, **kwargs):
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    original(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(home, name, dying)
from hilore_cli.__main__ import run
run(sys.argv[4:])
"""
# One warm process that forks a child a line: each is a whole `hilore` but for the seconds that torch takes to import.
FORK_EACH_LINE = """
import os, sys
import torch, transformers
from transformers.models.llama import modeling_llama
import hilore_cli.experiments.profiling, hilore_cli.cli.workload, hilore_cli.report.profile_view
from hilore_cli.__main__ import run
for line in sys.stdin:
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(run(line.split()))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile and an old plan, both of a toy."""
    profile = toy_profile(layers=1)
    profile.save(tmp_path / "p.parquet")
    plan = solve(profile, cap_bytes=10**9, risk=0.0)
    plan.save(tmp_path / "plans" / "x.parquet")
    return tmp_path


def solve_command(mem: str) -> list[str]:
    arguments = ("--profile", "p.parquet", "--mem", mem, "--risk", "0", "--out", "plans/x.parquet", "--force")
    return [sys.executable, "-m", "hilore_cli", "solve", *arguments]


def digests(folder: Path) -> tuple[str, str]:
    """Of the old plan, which stands, and of the new one, which is solved aside."""
    old = load_plan(folder / "plans" / "x.parquet").digest
    aside = [*solve_command("1.2gc"), "--out", "new.parquet"]
    assert subprocess.run(aside, cwd=folder, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0
    new = load_plan(folder / "new.parquet").digest
    assert old != new
    return old, new


def test_a_solve_killed_at_any_moment_leaves_the_old_plan_or_the_new_one(folder: Path) -> None:
    path = folder / "plans" / "x.parquet"
    whole, (old, new) = path.read_bytes(), digests(folder)
    started = time.perf_counter()
    subprocess.run(solve_command("1.2gc"), cwd=folder, env=ENVIRONMENT, capture_output=True, check=True)
    lasts = time.perf_counter() - started
    dice = random.Random(0)  # noqa: S311 - moments, not secrets
    found = set()
    for number in range(SOLVE_KILLS):
        path.write_bytes(whole)
        late = number % 2  # every other one near the end, where the file is written
        moment = lasts * dice.uniform(0.75 if late else 0.02, 1.05)
        with subprocess.Popen(
            solve_command("1.2gc"), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            if number % 4 == 3:
                wait_for_a_temporary_file(path, process)
            else:
                time.sleep(moment)
            process.kill()
        found.add(load_plan(path).digest)
    assert found <= {old, new}
    assert old in found
    swept_by_the_next(path)


def wait_for_a_temporary_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not being_written(path):
        pass


def being_written(path: Path) -> bool:
    """Whether a temporary file beside it holds something by now."""
    for other in path.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if other.suffix == ".tmp" and other.stat().st_size:
                return True
    return False


def swept_by_the_next(path: Path) -> None:
    """What every command does before it works for a file."""
    check_writable(path, force=True)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("owner", "name", "when", "outcome"),
    [
        ("pq", "write_table", "before", "old"),
        ("pq", "write_table", "after", "old"),
        ("os", "fsync", "after", "old"),
        ("Path", "replace", "before", "old"),
        ("Path", "replace", "after", "new"),
    ],
)
def test_a_solve_killed_between_two_steps_of_writing_leaves_a_whole_plan(
    owner: str, name: str, when: str, outcome: str, folder: Path
) -> None:
    path = folder / "plans" / "x.parquet"
    before = path.read_bytes()
    command = [sys.executable, "-c", DIE_AT, owner, name, when, *solve_command("1.2gc")[3:]]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (path.read_bytes() == before) == (outcome == "old")
    assert load_plan(path).meta.cap_text == {"old": "", "new": "1.2gc"}[outcome]
    assert len(list(path.parent.glob(".*.tmp"))) == (outcome == "old")
    swept_by_the_next(path)


def test_a_profile_killed_at_any_moment_leaves_the_old_one_or_the_new_one(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "p.parquet"
    old_digest, _ = toy_profile().save(path)
    whole = path.read_bytes()
    words = (
        f"profile --model {tiny_folder} --weights random --micro-batch 2 --prompt-tokens 8 --response-tokens 16 "
        f"--codecs bf16 --rounds 1 --out {path} --force"
    )
    found = []
    with subprocess.Popen(
        [sys.executable, "-c", FORK_EACH_LINE],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as warm:
        lasts = 0.0
        for number in range(PROFILE_KILLS + 1):
            path.write_bytes(whole)
            child = start(warm, words)
            started = time.perf_counter()
            if number:  # the first one is let live, for its length
                wait(path, lasts * number / PROFILE_KILLS, last=number == PROFILE_KILLS, since=started)
                with contextlib.suppress(ProcessLookupError):  # it may have been faster than the first one
                    os.kill(child, signal.SIGKILL)
            code = read_number(warm)
            if not number:
                lasts = time.perf_counter() - started
                assert code == 0
            found.append(load_profile(path).digest == old_digest)
        assert warm.stdin is not None
        warm.stdin.close()
    assert found[0] is False
    assert True in found[1:]
    swept_by_the_next(path)


def start(warm: subprocess.Popen[str], words: str) -> int:
    assert warm.stdin is not None
    warm.stdin.write(f"{words}\n")
    warm.stdin.flush()
    return read_number(warm)


def read_number(warm: subprocess.Popen[str]) -> int:
    assert warm.stdout is not None
    line = warm.stdout.readline()
    assert line, "the warm process has died"
    return int(line)


def wait(path: Path, seconds: float, *, last: bool, since: float) -> None:
    """Until the moment; the last kill waits for the temporary file."""
    while time.perf_counter() - since < (60.0 if last else seconds):
        if last and being_written(path):
            return
        time.sleep(0.0 if last else 0.005)
