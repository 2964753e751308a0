"""What is written is read back, by us and after any other Parquet writer."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilore_cli.tables.plan_table import Plan, PlanRow, load_plan
from hilore_cli.tables.profile_table import Profile, ProfileRow, load_profile
from tests.tables.samples import plan_row, profile_meta, profile_row, toy_plan, toy_profile

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(0, 1e300)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
BY_TYPE: dict[type, st.SearchStrategy[Any]] = {int: INT64, float: FINITE, str: TEXT, bool: st.booleans()}


def rows_of(row_type: type, sample: Any, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    narrow = {"shape", "rung", "layer", "unit", "op_index", "leaf", "occurrence"}
    fields = {
        field.name: INT32 if field.name in narrow else BY_TYPE.get(type(getattr(sample, field.name)), st.nothing())
        for field in dataclasses.fields(row_type)
    }
    return st.builds(row_type, **{**fields, **special})


@settings(max_examples=40, deadline=None)
@given(st.lists(rows_of(ProfileRow, profile_row(), reads=st.lists(INT32, max_size=4).map(tuple)), max_size=5))
def test_any_profile_reads_back_as_written(rows: list[ProfileRow]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.parquet"
        digest, changed = Profile(meta=profile_meta(), rows=tuple(rows)).save(path)
        assert changed
        assert load_profile(path) == Profile(meta=profile_meta(), rows=tuple(rows), digest=digest)


@settings(max_examples=40, deadline=None)
@given(st.lists(rows_of(PlanRow, plan_row()), max_size=5), TEXT)
def test_any_plan_reads_back_as_written(rows: list[PlanRow], command: str) -> None:
    meta = dataclasses.replace(toy_plan().meta, command=command)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.parquet"
        digest, _ = Plan(meta=meta, rows=tuple(rows)).save(path)
        assert load_plan(path) == Plan(meta=meta, rows=tuple(rows), digest=digest)


def test_two_writes_give_the_same_bytes(tmp_path: Path) -> None:
    toy_plan().save(tmp_path / "a.parquet")
    toy_plan().save(tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def _large_strings(table: pa.Table) -> pa.Table:
    fields = [pa.field(f.name, pa.large_string()) if pa.types.is_string(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))


def _through_pandas(table: pa.Table, path: Path) -> None:
    frame = table.to_pandas()
    again = pa.Table.from_pandas(frame)
    metadata = {**(again.schema.metadata or {}), **(table.schema.metadata or {})}
    pq.write_table(again.replace_schema_metadata(metadata), path)


WRITERS = {
    "uncompressed": lambda table, path: pq.write_table(table, path, compression="none"),
    "small row groups": lambda table, path: pq.write_table(table, path, row_group_size=2, compression="snappy"),
    "no dictionary": lambda table, path: pq.write_table(table, path, use_dictionary=False, version="1.0"),
    "large strings": lambda table, path: pq.write_table(_large_strings(table), path),
    "other column order": lambda table, path: pq.write_table(table.select(table.column_names[::-1]), path),
    "pandas": _through_pandas,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("sample", "load"), [(toy_profile(), load_profile), (toy_plan(), load_plan)])
def test_another_parquet_writer_keeps_contents_and_digest(writer: str, sample: Any, load: Any, tmp_path: Path) -> None:
    digest, _ = sample.save(tmp_path / "ours.parquet")
    WRITERS[writer](pq.read_table(tmp_path / "ours.parquet"), tmp_path / "theirs.parquet")
    assert (tmp_path / "theirs.parquet").read_bytes() != (tmp_path / "ours.parquet").read_bytes()
    read = load(tmp_path / "theirs.parquet")
    assert (read.digest, read.rows) == (digest, sample.rows)


def test_a_plan_opens_as_a_table_in_pandas(tmp_path: Path) -> None:
    toy_plan().save(tmp_path / "plan.parquet")
    frame = pd.read_parquet(tmp_path / "plan.parquet")
    assert frame.groupby("rung").held_bytes.sum().to_dict() == {0: 8000, 1: 10_250}
