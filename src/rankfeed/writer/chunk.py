"""Chunks: rows in memory that are converted, joined and cut to the size of shards before they are written.

Whether a column is dense or ragged, and of which type, is known only after the last row. So the rows of a chunk
are laid out as they need, and chunks that differ are joined: dense columns become ragged, narrow types wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed.columns.columns import Column, ColumnBuffer, Columns, Dense, Segmented
from rankfeed.columns.field import Field
from rankfeed.columns.layout import Mismatch, as_array, convert_exactly, flat_fields, join_layouts, parse_layout
from rankfeed.errors import ArgumentError, WriteError
from rankfeed.storage.checksum import digest_of

Fields = Mapping[str, Field]

#: Rows and bytes of a chunk.
BATCH_ROWS, BATCH_BYTES = 256, 1 << 20
_REMEDY = "give every sample the same keys, and make types and all dimensions but the first agree"


@dataclass(frozen=True)
class Chunk:
    """Some rows in memory, laid out as the fields say."""

    rows: int
    fields: dict[str, Field]
    columns: dict[str, ColumnBuffer]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.columns.values())

    @property
    def digest(self) -> str:
        """Checksum of the rows."""
        pieces: list[bytes | memoryview] = []
        for name, field in self.fields.items():
            stored = self.columns[name]
            pieces += [name.encode(), str(field).encode(), stored.values.reshape(-1).view(np.uint8).data]
            if stored.offsets is not None:
                pieces.append(stored.offsets.view(np.uint8).data)
        return digest_of(str(self.rows).encode(), *pieces)

    def take(self, name: str, field: Field) -> ColumnBuffer:
        """Remove a column and return it under a wider field, as `join_fields` returns them."""
        return _converted(self.columns.pop(name), self.fields[name], field, self.rows, f"field {name!r}")


def chunks_of_samples(samples: Iterable[tuple[int, Any]], shard_bytes: int, noun: str) -> Iterator[Chunk]:
    """Gather samples, each with the number that errors name, into chunks of an eighth of a shard at most."""
    limit = batch_bytes(shard_bytes)
    waiting: list[tuple[int, dict[str, Any]]] = []
    nbytes = 0
    for index, sample in samples:
        if not isinstance(sample, dict):
            raise _not_dicts([sample], f"{noun} {index}")
        row = {name: _value(name, value, f"{noun} {index}") for name, value in sample.items()}
        waiting.append((index, row))
        nbytes += sum(len(value) if isinstance(value, (bytes, str)) else value.nbytes for value in row.values())
        if len(waiting) == BATCH_ROWS or nbytes >= limit:
            yield _chunk_of_dicts(waiting, noun)
            waiting, nbytes = [], 0
    if waiting:
        yield _chunk_of_dicts(waiting, noun)


def batch_bytes(shard_bytes: int) -> int:
    """Bytes of a chunk for shards of some size."""
    return max(1, min(BATCH_BYTES, shard_bytes // 8))


def _value(name: str, value: Any, where: str) -> Any:
    if isinstance(value, (bytes, str)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    try:
        array = np.array(as_array(name, value))  # a copy: an iterable may fill one array again and again
        # An empty list fits any type, and bool is promoted to any other.
        return array.astype(np.bool_) if isinstance(value, list) and not array.size else array
    except ArgumentError as error:
        if value is None:
            error.remedy = (
                f"write a value in its place, and mark it by a field of its own ({name}_valid: False); or leave "
                "the sample out"
            )
        raise _unstorable(error, f"{where}, field {name!r}") from error


def _unstorable(error: ArgumentError, where: str) -> WriteError:
    return WriteError(
        f"cannot write a sample: {error.summary}",
        expected=error.expected,
        found=error.found,
        where=", ".join(str(place) for place in (where, error.where) if place),
        remedy=error.remedy or _REMEDY,
    )


def _chunk_of_dicts(numbered: list[tuple[int, dict[str, Any]]], noun: str) -> Chunk:
    where = f"{noun}s {numbered[0][0]} to {numbered[-1][0]}"
    try:
        return chunk_of(Columns.from_samples([sample for _, sample in numbered]), where)
    except Mismatch as error:
        raise _unstorable(error, f"{noun} {numbered[error.row][0]}") from error
    except WriteError:
        for index, sample in numbered:  # name the first sample that cannot be stored
            chunk_of(Columns.from_samples([sample]), f"{noun} {index}")
        raise


def chunk_of(columns: Columns, where: str) -> Chunk:
    """Copy the columns of a batch, of any kind but objects, into memory."""
    if not columns.as_dicts:
        raise _not_dicts(columns.samples(), where)
    if not columns:
        raise WriteError("a sample has no fields", where=where)
    fields, stored = {}, {}
    for name, column in columns.items():
        fields[name], stored[name] = _stored(name, column, where)
    return Chunk(columns.num_rows, fields, stored)


def _not_dicts(values: Iterable[Any], where: str) -> WriteError:
    kinds = sorted({type(value).__name__ for value in values if not isinstance(value, dict)})
    return WriteError(
        "samples must be dicts, since columns need names",
        expected="a dict of numbers, arrays, strings and bytes",
        found=", ".join(kinds),
        where=where,
        remedy='yield {"image": image, "label": label} instead of (image, label)',
    )


def _stored(name: Any, column: Column, where: str) -> tuple[Field, ColumnBuffer]:
    place = f"{where}, field {name!r}"
    if type(name) is not str or not name or name.encode(errors="replace").decode() != name:
        raise WriteError("a field name must be a non-empty str", found=repr(name), where=where)
    if isinstance(column, Dense):
        stored = ColumnBuffer(column.gather())
    elif isinstance(column, Segmented):
        stored = ColumnBuffer(*column.compact())
    else:
        raise WriteError(
            "Python objects cannot be written: reading them would run code",
            found=", ".join(sorted({type(value).__name__ for value in column.rows()})),
            where=place,
            remedy="convert them to numbers, arrays, strings or bytes",
        )
    field, dtype = column.field, column.dtype
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise WriteError("Arrow has no type for this dtype", found=dtype, where=place)
    if field.kind == "dense" and field.shape[:1] == (0,):
        # Arrow's fixed-size lists have at least one element.
        wide = Field("ragged", field.dtype, field.shape[1:])
        stored, field = _converted(stored, field, wide, len(column), place), wide
    if 0 in field.shape:
        raise WriteError("arrays with an inner dimension of 0 cannot be written", found=field, where=place)
    return field, stored


def concat_chunks(chunks: list[Chunk]) -> Chunk:
    """One chunk with the rows of several, in order. Their columns are released as they are joined."""
    if len(chunks) == 1:
        return chunks[0]
    fields: Fields = chunks[0].fields
    for chunk in chunks[1:]:
        fields = join_fields(fields, chunk.fields, "")
    rows = sum(chunk.rows for chunk in chunks)
    columns = {}
    for name, field in fields.items():
        parts = [chunk.take(name, field) for chunk in chunks]
        offsets = None
        if field.kind != "dense":
            lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
            offsets = np.concatenate([[0], *lengths]).cumsum()
        columns[name] = ColumnBuffer(np.concatenate([part.values for part in parts]), offsets)
    return Chunk(rows, dict(fields), columns)


def gather_shards(chunks: Iterable[Chunk], limit: int) -> Iterator[Chunk]:
    """Join chunks into shards, each ending with the chunk that brings it to ``limit`` bytes."""
    gathered: list[Chunk] = []
    nbytes = row = 0
    fields = None
    for chunk in chunks:
        where = f"row {row} or one of the {chunk.rows - 1} after it"
        fields = chunk.fields if fields is None else join_fields(fields, chunk.fields, where)
        row += chunk.rows
        gathered.append(chunk)
        nbytes += chunk.nbytes
        del chunk
        if nbytes >= limit:
            joined = concat_chunks(gathered)
            gathered, nbytes = [], 0  # released before a shard is written, which takes a while
            yield joined
            del joined
    if gathered:
        yield concat_chunks(gathered)


def join_fields(one: Fields, other: Fields, where: str) -> dict[str, Field]:
    """The fields of columns that hold the rows of both."""
    if one == other:
        return dict(one)
    try:
        joined = flat_fields(join_layouts(parse_layout(one), parse_layout(other)))
    except Mismatch as error:
        raise _unstorable(error, where) from error
    assert joined is not None
    return joined


def _converted(stored: ColumnBuffer, old: Field, new: Field, rows: int, where: str) -> ColumnBuffer:
    if old == new:
        return stored
    values, offsets = convert_exactly(stored.values, np.dtype(new.dtype)), stored.offsets
    if values is None:
        raise WriteError(
            f"numbers do not fit into one column: {old.dtype} would lose digits or signs as {new.dtype}",
            where=where,
            remedy="convert them with map=..., or use separate fields",
        )
    if new.kind == "ragged" and offsets is None:
        length = old.shape[0]
        values = values.reshape(rows * length, *new.shape)
        offsets = np.arange(rows + 1, dtype=np.int64) * length
    return ColumnBuffer(values, offsets)
