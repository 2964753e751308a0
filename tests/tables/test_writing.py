"""Writing: never over another file unasked, never half a file, never a stale temporary left behind."""

import dataclasses
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hilore_cli.errors import FileError
from hilore_cli.tables.parquet import check_writable
from hilore_cli.tables.plan_table import Plan, load_plan
from tests.tables.samples import toy_plan


def other_plan() -> Plan:
    plan = toy_plan()
    return dataclasses.replace(plan, meta=dataclasses.replace(plan.meta, risk=0.02))


def test_the_same_contents_leave_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    digest, changed = toy_plan().save(path)
    written_ns = path.stat().st_mtime_ns
    assert changed
    assert toy_plan().save(path) == (digest, False)
    assert path.stat().st_mtime_ns == written_ns


def test_other_contents_are_refused_without_force(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    toy_plan().save(path)
    before = path.read_bytes()
    with pytest.raises(FileError, match="exists already") as caught:
        other_plan().save(path)
    assert "--force" in caught.value.hint
    assert path.read_bytes() == before


def test_force_replaces(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    toy_plan().save(path)
    assert other_plan().save(path, force=True)[1]
    assert load_plan(path).meta.risk == 0.02


def test_a_damaged_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(FileError, match="exists already"):
        toy_plan().save(path)


def test_missing_folders_are_made(tmp_path: Path) -> None:
    toy_plan().save(tmp_path / "a" / "b" / "plan.parquet")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["plan.parquet"]


def test_a_file_where_the_folder_should_be_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("")
    with pytest.raises(FileError, match="cannot be written") as caught:
        toy_plan().save(tmp_path / "plans" / "plan.parquet")
    assert "--out" in caught.value.hint


def test_a_read_only_folder_is_one_error() -> None:
    with pytest.raises(FileError, match="cannot be written"):
        check_writable(Path("/proc/self/plan.parquet"), force=False)


def test_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, living = (tmp_path / f".plan.parquet.{pid}.tmp" for pid in (dead.pid, os.getppid()))
    stale.write_bytes(b"half")
    living.write_bytes(b"someone's")
    toy_plan().save(tmp_path / "plan.parquet")
    assert not stale.exists()
    assert living.exists()


WRITE_FOREVER = """
import dataclasses, itertools, os, sys
from pathlib import Path
from tests.tables.samples import toy_plan
plan = toy_plan()
other = dataclasses.replace(plan, meta=dataclasses.replace(plan.meta, risk=0.02))
path = Path(sys.argv[1])
# imports are over: children are cheap, and each is killed at a moment of its own
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for turn in itertools.count():
            (plan if turn % 2 else other).save(path, force=True)
    print(child, flush=True)
    sys.stdin.readline()
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    toy_plan().save(path)
    whole = {toy_plan().save(tmp_path / "a.parquet")[0], other_plan().save(tmp_path / "b.parquet")[0]}
    rng = random.Random(7)  # noqa: S311 - moments to kill at, not secrets
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOREVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        seen = set()
        for _ in range(60):
            writer.stdin.write("go\n")
            writer.stdin.flush()
            writer.stdout.readline()
            time.sleep(rng.uniform(0.005, 0.06))
            writer.stdin.write("kill\n")
            writer.stdin.flush()
            writer.stdout.readline()
            seen.add(load_plan(path).digest)
        writer.stdin.close()
    assert seen == whole
    toy_plan().save(path, force=True)
    other_plan().save(path, force=True)
    assert not list(tmp_path.glob(".*.tmp"))
