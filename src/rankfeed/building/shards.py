"""One shard of a packed data set: rows in, a file and a record of it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from rankfeed.columns import Bytes, Column, Columns, Dense, Field, Ragged
from rankfeed.errors import PackError
from rankfeed.storage import Shard, atomic_file, file_digest, map_file
from rankfeed.storage.arrow_shard import Stored, read_shard, write_shard

#: Bytes that are read in one go, about.
_BLOCK_BYTES = 4 << 20


class Record(msgspec.Struct, frozen=True):
    """A shard that is written: what the manifest will say of it, and its fields as far as its own rows tell."""

    shard: Shard
    fields: dict[str, Field]


def shard_name(number: int) -> str:
    """The file name of a shard.

    Example:
        >>> shard_name(3)
        'shard-00003.arrow'
    """
    return f"shard-{number:05d}.arrow"


def store(columns: Columns) -> tuple[dict[str, Stored], dict[str, Field]]:
    """The columns laid out as they will lie in the file, and what they hold.

    Raises:
        PackError: a column of objects.
    """
    stored: dict[str, Stored] = {}
    for name, column in columns.items():
        stored[name] = _stored(name, column)
    return stored, {name: column.field for name, column in columns.items()}


def _stored(name: str, column: Column) -> Stored:
    if isinstance(column, Dense):
        return Stored(column.gather())
    if isinstance(column, (Ragged, Bytes)):
        return Stored(*column.compact())
    raise PackError(
        "objects cannot be packed, since reading them back would run code",
        where=f"column {name!r}" if name else "samples that are no dicts",
        remedy="turn samples into dicts of numbers, strings, bytes and arrays",
    )


def write(
    folder: Path, number: int, stored: Mapping[str, Stored], fields: Mapping[str, Field], rows: int
) -> Record:
    """Write a shard: under a temporary name, then under its own.

    Raises:
        PackError: it cannot be written; nothing of it is left.
    """
    path = folder / shard_name(number)
    for name, field in fields.items():
        if field.kind in ("dense", "ragged") and np.dtype(field.dtype).itemsize > 8 and field.dtype[0] != "c":
            raise PackError("numbers of this type cannot be packed", found=field.dtype, where=f"column {name!r}")
    try:
        with atomic_file(path) as file:
            write_shard(file, stored, fields, rows)
        size = path.stat().st_size
        digest = file_digest(path)
    except OSError as error:
        raise PackError(
            "a shard cannot be written", found=error, where=path, remedy="make room, then pack again to go on"
        ) from error
    nbytes = sum(each.nbytes for each in stored.values())
    shard = Shard(
        path=path.name,
        rows=rows,
        bytes=size,
        xxh3=digest,
        block_rows=max(1, min(rows, rows * _BLOCK_BYTES // max(1, nbytes))),
        content=_content(stored, fields),
    )
    return Record(shard, dict(fields))


def content(columns: Columns) -> str:
    """The checksum of rows that :class:`Record` keeps: the same rows, the same checksum."""
    return _content(*store(columns))


def join(records: Sequence[Record]) -> dict[str, Field]:
    """The fields that hold the rows of all shards.

    Raises:
        PackError: there are none, because columns differ in more than their rows' lengths.
    """
    joined = dict(records[0].fields)
    for number, record in enumerate(records):
        if record.fields.keys() != joined.keys():
            raise PackError(
                "samples have different columns",
                expected=", ".join(joined),
                found=", ".join(record.fields),
                where=f"shard {number}",
            )
        for name, field in record.fields.items():
            joined[name] = _joined(name, joined[name], field, number)
    return joined


def _joined(name: str, one: Field, other: Field, number: int) -> Field:
    if one == other:
        return one
    arrays = ("dense", "ragged")
    if one.kind in arrays and other.kind in arrays:
        tails = [field.shape if field.kind == "ragged" else field.shape[1:] for field in (one, other)]
        scalars = [field.kind == "dense" and not field.shape for field in (one, other)]
        dtype = np.result_type(one.dtype, other.dtype).name
        if one.kind == other.kind and one.shape == other.shape:
            return replace(one, dtype=dtype)
        if tails[0] == tails[1] and not any(scalars):
            return Field("ragged", dtype, tails[0])
    raise PackError(
        f"rows of {name!r} have nothing in common",
        expected=str(one),
        found=str(other),
        where=f"shard {number}",
        remedy="store them flat with a column for the shape, or as bytes",
    )


def rewrite(folder: Path, number: int, record: Record, fields: Mapping[str, Field]) -> Record:
    """Write a shard anew with the fields that all shards share; its content stays."""
    old = read_shard(
        map_file(folder / record.shard.path), record.fields, record.shard.rows, str(folder / record.shard.path)
    )
    new = {name: _as(old[name], record.fields[name], field) for name, field in fields.items()}
    written = write(folder, number, new, fields, record.shard.rows)
    return Record(msgspec.structs.replace(written.shard, content=record.shard.content), dict(fields))


def _as(stored: Stored, have: Field, want: Field) -> Stored:
    if want.kind not in ("dense", "ragged"):
        return stored
    values = stored.values.astype(want.dtype, copy=False)
    if have.kind == "dense" and want.kind == "ragged":
        rows, length = values.shape[:2]
        return Stored(
            values.reshape(rows * length, *values.shape[2:]), np.arange(rows + 1, dtype=np.int64) * length
        )
    return Stored(values, stored.offsets)


def _content(stored: Mapping[str, Stored], fields: Mapping[str, Field]) -> str:
    state = xxhash.xxh3_128()
    for name, each in stored.items():
        field = fields[name]
        state.update(f"{name}|{field.dtype}|{field.kind in ('bytes', 'str')}".encode())
        offsets: Any = each.offsets
        tail = field.shape
        if offsets is None and field.shape:  # as if it were ragged: how it is stored must not matter
            tail = field.shape[1:]
            offsets = np.arange(len(each.values) + 1, dtype=np.int64) * field.shape[0]
        state.update(repr(tail).encode())
        if offsets is not None:
            state.update(np.ascontiguousarray(offsets).data)
        state.update(np.ascontiguousarray(each.values).reshape(-1).view(np.uint8).data)
    return state.hexdigest()
