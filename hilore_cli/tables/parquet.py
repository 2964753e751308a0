"""Parquet files that people commit: deterministic, atomic, self-describing, with a digest of what they say.

The digest covers the decoded rows and the metadata, not the bytes of the file, so it survives another
Parquet writer and still catches a flipped bit. Writing goes through a temporary file in the same folder,
fsync and rename: a kill leaves the old file or the new one.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from hilore_cli.errors import FileError

METADATA_KEY = b"hilore"
Kind = Literal["profile", "plan"]


_COLUMNS = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
    tuple[int, ...]: pa.list_(pa.int64()),
}


def schema_of(row: type) -> pa.Schema:
    """The columns of a dataclass of ints, floats, strings, bools and tuples of ints."""
    return pa.schema([(name, _COLUMNS[kind]) for name, kind in get_type_hints(row).items()])


def columns_of(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Dataclass rows to columns, in order."""
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema=schema)


def contents_digest(table: pa.Table, metadata: Mapping[str, Any]) -> str:
    """SHA-256 over the metadata (canonical JSON) and every column's name, type and decoded values."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in table.column_names:
        column = table.column(name)
        digest.update(f"\0{name}:{column.type}\0".encode())
        digest.update(json.dumps(column.to_pylist()).encode())
    return digest.hexdigest()


def read_table(path: Path, *, kind: Kind, schema: pa.Schema, version: int) -> tuple[pa.Table, dict[str, Any], str]:
    """Rows, metadata and digest of a hilore file. Raises FileError, in one line, for anything else."""
    again = f"make it again with `hilore {'profile' if kind == 'profile' else 'solve'}`"
    restore = f"restore it from git, or {again}"
    damaged = FileError(str(path), "is damaged: its contents do not match its digest", restore)
    payload = _payload(path, kind=kind, again=again)
    try:
        table = pq.read_table(pa.BufferReader(payload))
    except (pa.ArrowException, OSError, ValueError) as error:
        whole = payload.startswith(b"PAR1")
        rule = "is a damaged or truncated Parquet file" if whole else "is not a Parquet file"
        raise FileError(str(path), rule, restore) from error
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise FileError(str(path), "is a Parquet file that hilore did not write", f"name a hilore {kind}, or {again}")
    try:
        header = json.loads(raw)
        found_kind, found_version = header["kind"], int(header["format_version"])
        stated, metadata = header["digest"], header["metadata"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged from error
    if found_kind != kind:
        raise FileError(str(path), f"is a {found_kind}, but a {kind} is wanted", f"name a {kind}, or {again}")
    if found_version != version:
        age, fix = (
            ("newer", "upgrade hilore (pip install --upgrade hilore)") if found_version > version else ("older", again)
        )
        rule = f"has format version {found_version}, {age} than the {version} that this hilore reads"
        raise FileError(str(path), rule, fix)
    rows = _decode(table, schema)
    if rows is None or contents_digest(rows, metadata) != stated:
        raise damaged
    return rows, metadata, stated


def _payload(path: Path, *, kind: Kind, again: str) -> bytes:
    if path.is_dir():
        raise FileError(str(path), "is a folder, not a file", f"name the {kind} file in it")
    try:
        payload = path.read_bytes()
    except FileNotFoundError as error:
        raise FileError(str(path), "does not exist", f"check the path, or {again}") from error
    except OSError as error:
        raise FileError(str(path), f"cannot be read ({error.strerror})", "check its permissions") from error
    if not payload:
        raise FileError(str(path), "is empty", again)
    return payload


def _decode(table: pa.Table, schema: pa.Schema) -> pa.Table | None:
    """The columns in our own types: another writer may have chosen wider ones for the same values."""
    try:
        rows = table.select(schema.names).cast(schema).replace_schema_metadata(None)
        rows.validate(full=True)  # a damaged string may not be UTF-8
    except (KeyError, ValueError, pa.ArrowException):
        return None
    return rows


def write_table(
    path: Path, table: pa.Table, metadata: Mapping[str, Any], *, kind: Kind, version: int, force: bool
) -> tuple[str, bool]:
    """Write rows and metadata; returns the digest and whether the file changed.

    Raises FileError if another file stands there (unless `force`) or the folder cannot be written.
    """
    digest = contents_digest(table, metadata)
    if _stands_unchanged(path, kind=kind, schema=table.schema, version=version, digest=digest):
        return digest, False
    check_writable(path, force=force)
    header = {"kind": kind, "format_version": version, "digest": digest, "metadata": metadata}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(header, sort_keys=True).encode()})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd", write_statistics=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FileError(str(path), f"cannot be written ({error.strerror})", "choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)
    return digest, True


def check_writable(path: Path, *, force: bool) -> None:
    """Raise FileError now rather than after an hour of measuring; sweeps what killed runs left behind."""
    if path.exists() and not force:
        raise FileError(
            str(path), "exists already with other contents", "pass --force to replace it, or choose another --out"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            if not _alive(stale.name.split(".")[-2]):
                stale.unlink(missing_ok=True)
        probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        probe.touch()
        probe.unlink()
    except OSError as error:
        rule = f"the folder cannot be written ({error.strerror})"
        raise FileError(str(path.parent), rule, "choose another folder with --out") from error


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return True
    return True


def _stands_unchanged(path: Path, *, kind: Kind, schema: pa.Schema, version: int, digest: str) -> bool:
    if not path.exists():
        return False
    try:
        return read_table(path, kind=kind, schema=schema, version=version)[2] == digest
    except FileError:
        return False
