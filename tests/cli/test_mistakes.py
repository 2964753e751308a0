"""Every mistake: exit 2, one `error:` line that names the thing and the rule, one `hint:` line, nothing on stdout."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Hilore, Outcome
from tests.tables.samples import toy_plan


def assert_one_clear_line(outcome: Outcome, *words: str, code: int = 2) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    lines = [line for line in outcome.err.splitlines() if not line.startswith("using ")]
    assert len(lines) == 2
    assert re.fullmatch(r"error: [^:]+: .+", lines[0])
    assert re.fullmatch(r"hint: .+", lines[1])
    for word in words:
        assert word in outcome.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mem", "48"], ["--mem 48", "needs a unit", "48GB"]),
        (["--mem", "-1GB"], ["--mem -1GB", "1.10gc"]),
        (["--mem", "0GB"], ["--mem 0GB", "above zero"]),
        (["--mem", "48Gb"], ["--mem 48Gb", "unknown unit"]),
        (["--mem", "48GB", "--risk", "2"], ["--risk 2", "below 1"]),
        (["--mem", "48GB", "--risk", "nan"], ["--risk nan"]),
        (["--mem", "48GB", "--risk", "-0.1"], ["--risk -0.1"]),
        (["--mem", "48GB", "--risk", "low"], ["--risk", "valid number"]),
        (["--mem", "48GB", "--time-limit", "0"], ["--time-limit 0"]),
        (["--mem", "48GB", "--memory", "3"], ["--memory", "not an option", "--mem"]),
        (["--mem"], ["--mem", "argument"]),
        ([], ["--mem", "required"]),
        (["--mem", "48GB", "stray"], ["stray"]),
    ],
)
def test_a_wrong_flag_of_solve_is_one_clear_line(
    flags: list[str], words: list[str], hilore: Hilore, profile_file: Path
) -> None:
    assert_one_clear_line(hilore("solve", *flags), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--model", "required"]),
        (["--model", "toy", "--dtype", "int8"], ["--dtype int8", "bfloat16"]),
        (["--model", "toy", "--micro-batch", "0"], ["--micro-batch 0", "at least 1"]),
        (["--model", "toy", "--micro-batch", "1000000000"], ["--micro-batch 1000000000", "tokens a micro-batch"]),
        (["--model", "toy", "--loss", "ppo"], ["--loss ppo", "dapo"]),
        (["--model", "toy", "--weights", "zero"], ["--weights zero", "pretrained"]),
        (["--model", "toy", "--rollouts", "none.jsonl"], ["--rollouts none.jsonl"]),
        (["--model", "toy", "--rounds", "0"], ["--rounds 0"]),
    ],
)
def test_a_wrong_flag_of_profile_is_one_clear_line(flags: list[str], words: list[str], hilore: Hilore) -> None:
    assert_one_clear_line(hilore("profile", *flags), *words)


@pytest.mark.parametrize("command", ["solve --mem 1GB", "verify", "show"])
def test_with_nothing_to_work_on_the_folder_and_the_way_out_are_named(command: str, hilore: Hilore) -> None:
    assert_one_clear_line(hilore(*command.split()), "holds no")


def test_an_unknown_verb_is_one_clear_line(hilore: Hilore) -> None:
    assert_one_clear_line(hilore("slove"), "slove", "hilore --help")


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), path)


def text(path: Path) -> None:
    path.write_text("layer,action\n")


@pytest.mark.parametrize("damage", [missing, empty, truncated, foreign, text])
def test_a_file_that_is_no_profile_is_named_by_solve(damage: object, hilore: Hilore, profile_file: Path) -> None:
    assert callable(damage)
    damage(profile_file)
    assert_one_clear_line(hilore("solve", "--mem", "1GB", "--profile", str(profile_file)), str(profile_file))


@pytest.mark.parametrize("damage", [missing, empty, truncated, foreign, text])
@pytest.mark.parametrize("verb", ["verify", "show", "diff"])
def test_a_file_that_is_no_plan_is_named_by_every_reader(
    damage: object, verb: str, hilore: Hilore, plan_file: Path
) -> None:
    assert callable(damage)
    damage(plan_file)
    files = [str(plan_file)] * (2 if verb == "diff" else 1)
    assert_one_clear_line(hilore(verb, *files), str(plan_file))


def test_solve_does_not_take_a_plan_for_a_profile(hilore: Hilore, plan_file: Path) -> None:
    outcome = hilore("solve", "--mem", "1GB", "--profile", str(plan_file))
    assert_one_clear_line(outcome, "is a plan, but a profile is wanted")


def test_verify_does_not_take_a_profile_for_a_plan(hilore: Hilore, profile_file: Path) -> None:
    assert_one_clear_line(hilore("verify", str(profile_file)), "is a profile, but a plan is wanted")


def test_verify_refuses_a_rung_that_the_plan_has_not(hilore: Hilore, plan_file: Path) -> None:
    assert_one_clear_line(hilore("verify", str(plan_file), "--rung", "9"), "--rung 9", "0, 1")


def test_profile_refuses_to_overwrite_before_it_measures(hilore: Hilore, profile_file: Path) -> None:
    before = profile_file.read_bytes()
    assert_one_clear_line(hilore("profile", "--model", "toy/two-layers"), "exists already", "--force")
    assert profile_file.read_bytes() == before


def test_profile_refuses_a_folder_that_cannot_be_written_before_it_measures(hilore: Hilore, folder: Path) -> None:
    (folder / "file").write_text("")
    assert_one_clear_line(hilore("profile", "--model", "toy", "--out", "file/p.parquet"), "cannot be written", "--out")


def test_a_plan_and_a_profile_cannot_be_compared(hilore: Hilore, profile_file: Path, plan_file: Path) -> None:
    assert_one_clear_line(hilore("diff", str(profile_file), str(plan_file)), "one kind")


def test_an_error_stays_one_line_whatever_the_file_is_called(hilore: Hilore, folder: Path) -> None:
    toy_plan().save(folder / "two\nlines.parquet")
    assert_one_clear_line(hilore("solve", "--mem", "1GB", "--profile", "two\nlines.parquet"), "two lines.parquet")
