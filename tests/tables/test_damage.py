"""A file that is not what it should be gives one error that says what and how to mend it; never anything else."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hilore_cli.errors import FileError
from hilore_cli.tables.parquet import METADATA_KEY, contents_digest
from hilore_cli.tables.plan_table import SCHEMA, load_plan
from hilore_cli.tables.profile_table import Profile, load_profile
from tests.tables.samples import profile_meta, profile_row, toy_plan, toy_profile


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.parquet"
    toy_plan().save(path)
    return path


def refusal(load: Callable[[Path], object], path: Path) -> FileError:
    with pytest.raises(FileError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.thing == str(path)
    assert caught.value.hint
    return caught.value


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[METADATA_KEY])
    changed = change(header)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(changed).encode()}), path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(load_plan, tmp_path / "none.parquet").rule == "does not exist"


def test_an_empty_file_is_called_empty(plan_file: Path) -> None:
    plan_file.write_bytes(b"")
    assert refusal(load_plan, plan_file).rule == "is empty"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "folder" in refusal(load_plan, tmp_path).rule


def test_a_text_file_is_not_parquet(plan_file: Path) -> None:
    plan_file.write_text("rung,layer\n0,0\n")
    assert refusal(load_plan, plan_file).rule == "is not a Parquet file"


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.999])
def test_a_truncated_file_is_refused(share: float, plan_file: Path) -> None:
    whole = plan_file.read_bytes()
    plan_file.write_bytes(whole[: max(1, int(len(whole) * share))])
    refusal(load_plan, plan_file)


def test_every_flipped_bit_is_refused_or_changes_nothing(plan_file: Path) -> None:
    whole = plan_file.read_bytes()
    expected = load_plan(plan_file)
    refused = 0
    for position in range(0, len(whole), max(1, len(whole) // 400)):
        for bit in (0, 5, 7):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            plan_file.write_bytes(flipped)
            try:
                assert load_plan(plan_file) == expected
            except FileError:
                refused += 1
    assert refused > 600


def test_a_foreign_parquet_file_is_called_foreign(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "foreign.parquet")
    assert "did not write" in refusal(load_plan, tmp_path / "foreign.parquet").rule


def test_a_profile_is_not_taken_for_a_plan(tmp_path: Path) -> None:
    toy_profile().save(tmp_path / "p.parquet")
    assert refusal(load_plan, tmp_path / "p.parquet").rule == "is a profile, but a plan is wanted"


def test_a_plan_is_not_taken_for_a_profile(plan_file: Path) -> None:
    assert refusal(load_profile, plan_file).rule == "is a plan, but a profile is wanted"


def test_a_newer_format_asks_for_an_upgrade(plan_file: Path) -> None:
    rewrite_header(plan_file, lambda header: {**header, "format_version": 99})
    error = refusal(load_plan, plan_file)
    assert "99" in error.rule
    assert "upgrade hilore" in error.hint


def test_an_older_format_asks_for_a_new_solve(plan_file: Path) -> None:
    rewrite_header(plan_file, lambda header: {**header, "format_version": 0})
    error = refusal(load_plan, plan_file)
    assert "older" in error.rule
    assert "hilore solve" in error.hint


@pytest.mark.parametrize(
    "header", [[], "plan", {}, {"kind": "plan"}, {"kind": "plan", "format_version": "x", "digest": "", "metadata": {}}]
)
def test_a_malformed_header_is_refused(header: Any, plan_file: Path) -> None:
    rewrite_header(plan_file, lambda _: header)
    refusal(load_plan, plan_file)


def test_edited_metadata_no_longer_matches_the_digest(plan_file: Path) -> None:
    rewrite_header(plan_file, lambda header: {**header, "metadata": {**header["metadata"], "cap_bytes": 1}})
    assert "digest" in refusal(load_plan, plan_file).rule


@pytest.mark.parametrize("metadata", [{}, {"rungs": 3}, [], None, {"rungs": [{}]}])
def test_metadata_of_another_shape_is_refused_even_under_a_right_digest(metadata: Any, plan_file: Path) -> None:
    rows = pq.read_table(plan_file).cast(SCHEMA).replace_schema_metadata(None)
    digest = contents_digest(rows, metadata)
    rewrite_header(plan_file, lambda header: {**header, "metadata": metadata, "digest": digest})
    refusal(load_plan, plan_file)


def test_a_missing_column_is_refused(plan_file: Path) -> None:
    table = pq.read_table(plan_file)
    pq.write_table(table.drop_columns(["held_bytes"]), plan_file)
    refusal(load_plan, plan_file)


def test_a_null_is_refused(plan_file: Path) -> None:
    table = pq.read_table(plan_file)
    column = pa.array([None, *table.column("module").to_pylist()[1:]], pa.string())
    pq.write_table(table.set_column(table.column_names.index("module"), "module", column), plan_file)
    refusal(load_plan, plan_file)


@pytest.mark.parametrize("name", ["recompute_us", "codec_us", "error", "gain"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_profile_value_that_no_measurement_gives_names_its_place(name: str, value: float, tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    Profile(meta=profile_meta(), rows=(profile_row(layer=1, **{name: value}),)).save(path)
    rule = refusal(load_profile, path).rule
    assert name in rule
    assert "layer 1, self_attn.q_proj mm" in rule
