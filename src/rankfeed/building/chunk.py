"""Rows on their way into a shard: columns in memory, and how two stretches of rows agree on one layout.

Whether a column is dense or ragged, and of which type, is only known when all rows were seen. So each stretch is
laid out as its own rows ask, and stretches that turn out to differ are joined: dense gives way to ragged,
a narrow type to a wide one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed.columns import Column, ColumnBuffer, Columns, Dense, Field, Objects
from rankfeed.errors import ArgumentError, PackError
from rankfeed.storage import digest_of

Fields = Mapping[str, Field]


@dataclass(frozen=True)
class Chunk:
    """Some rows in memory.

    Args:
        rows: how many.
        fields: what each column holds.
        columns: the columns, laid out as the fields say.
    """

    rows: int
    fields: dict[str, Field]
    columns: dict[str, ColumnBuffer]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(stored.nbytes for stored in self.columns.values())

    @property
    def digest(self) -> str:
        """The checksum of the rows themselves."""
        pieces: list[bytes | memoryview] = []
        for name, field in self.fields.items():
            stored = self.columns[name]
            pieces += [name.encode(), str(field).encode(), stored.values.reshape(-1).view(np.uint8).data]
            if stored.offsets is not None:
                pieces.append(stored.offsets.view(np.uint8).data)
        return digest_of(str(self.rows).encode(), *pieces)

    def laid_out(self, fields: Fields) -> Chunk:
        """The same rows under wider fields, as `join_fields` gives them."""
        columns = {
            name: _laid_out(self.columns[name], self.fields[name], field, self.rows, f"field {name!r}")
            for name, field in fields.items()
        }
        return Chunk(self.rows, dict(fields), columns)


def chunk_of(columns: Columns, where: str) -> Chunk:
    """Copy the columns of a batch into memory, as they will lie in a shard.

    Args:
        columns: of any kind but objects.
        where: which rows these are, for errors.

    Raises:
        PackError: a column cannot be stored; names it.
    """
    if not columns.as_dicts:
        values = columns.samples()
        if not all(isinstance(value, dict) for value in values):
            raise not_a_dict(values, where)
        columns = columns_of(values, where)
    if not columns:
        raise PackError("samples without fields cannot be packed", where=where)
    fields, stored = {}, {}
    for name, column in columns.items():
        fields[name], stored[name] = _stored(name, column, where)
    return Chunk(columns.num_rows, fields, stored)


def columns_of(samples: list[dict[str, Any]], where: str) -> Columns:
    """Columns out of samples.

    Raises:
        PackError: they have none in common; names field and row.
    """
    try:
        return Columns.from_samples(samples)
    except ArgumentError as error:
        raise PackError(
            f"cannot be packed: {error.summary}",
            expected=error.expected,
            found=error.found,
            where=f"{where}, {error.where}" if error.where else where,
            remedy=error.remedy,
        ) from error


def not_a_dict(values: Iterable[Any], where: str) -> PackError:
    """The error for samples that are no dicts."""
    kinds = sorted({type(value).__name__ for value in values if not isinstance(value, dict)})
    return PackError(
        "samples must be dicts to be packed: a column needs a name",
        expected="a dict of numbers, arrays, strings and bytes",
        found=", ".join(kinds),
        where=where,
        remedy='yield {"image": image, "label": label} instead of (image, label)',
    )


def _stored(name: Any, column: Column, where: str) -> tuple[Field, ColumnBuffer]:
    place = f"{where}, field {name!r}"
    if type(name) is not str or not name or not is_text(name):
        raise PackError("a field needs a name", found=repr(name), where=where)
    if isinstance(column, Objects):
        raise PackError(
            "objects are not packed, since reading them back would run code",
            found=", ".join(sorted({type(value).__name__ for value in column.rows()})),
            where=place,
            remedy="turn them into numbers, arrays, strings or bytes",
        )
    if isinstance(column, Dense):
        stored = ColumnBuffer(_native(column.gather()))
    else:
        values, offsets = column.compact()  # type: ignore[attr-defined]
        stored = ColumnBuffer(_native(values), offsets)
    field = column.field
    if field.kind in ("bytes", "str"):
        return field, stored
    dtype = stored.values.dtype
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise PackError("a type that Arrow does not have", found=f"dtype {dtype}", where=place)
    field = Field(field.kind, dtype.name, field.shape)
    if field.kind == "dense" and field.shape[:1] == (0,):
        # Rows without elements: Arrow's fixed-size lists have some.
        wide = Field("ragged", field.dtype, field.shape[1:])
        stored, field = _laid_out(stored, field, wide, len(column)), wide
    if 0 in field.shape:
        raise PackError("arrays whose inner dimensions are 0 cannot be packed", found=field, where=place)
    return field, stored


def is_text(name: str) -> bool:
    """Whether a string can be written down: not if half of a character is in it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _native(array: Any) -> Any:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def concatenated(chunks: list[Chunk]) -> Chunk:
    """One chunk of the rows of several, in order. They are used up: a column is let go when it is joined.

    Raises:
        PackError: their fields have nothing in common.
    """
    if len(chunks) == 1:
        return chunks[0]
    fields: Fields = chunks[0].fields
    for chunk in chunks[1:]:
        fields = join_fields(fields, chunk.fields, "")
    rows = sum(chunk.rows for chunk in chunks)
    columns = {}
    for name, field in fields.items():
        parts = [
            _laid_out(chunk.columns.pop(name), chunk.fields[name], field, chunk.rows, f"field {name!r}")
            for chunk in chunks
        ]
        offsets = None
        if field.kind != "dense":
            lengths = [np.diff(part.offsets) for part in parts if part.offsets is not None]
            offsets = np.zeros(rows + 1, np.int64)
            np.cumsum(np.concatenate(lengths), out=offsets[1:])
        columns[name] = ColumnBuffer(np.concatenate([part.values for part in parts]), offsets)
    return Chunk(rows, dict(fields), columns)


def join_fields(one: Fields, other: Fields, where: str) -> dict[str, Field]:
    """The fields that rows of both have room in.

    Raises:
        PackError: there are none; names the field.

    Examples:
        >>> join_fields({"x": Field("dense", "int32", (3,))}, {"x": Field("dense", "int64", (5,))}, "row 7")
        {'x': Field(kind='ragged', dtype='int64', shape=())}
    """
    if one.keys() != other.keys():
        raise PackError(
            "samples have different fields",
            expected=", ".join(map(repr, one)),
            found=", ".join(map(repr, other)),
            where=where or None,
            remedy="give every sample the same keys",
        )
    return {
        name: field if field == other[name] else _join(name, field, other[name], where)
        for name, field in one.items()
    }


def _join(name: str, one: Field, other: Field, where: str) -> Field:
    problem = PackError(
        f"values of field {name!r} do not fit into one column",
        expected=one,
        found=other,
        where=where or None,
        remedy="make types and all dimensions but the first agree",
    )
    if not {one.kind, other.kind} <= {"dense", "ragged"}:
        raise problem
    dtype = np.promote_types(one.dtype, other.dtype)
    if dtype.kind == "f" and np.dtype(one.dtype).kind in "iu" and np.dtype(other.dtype).kind in "iu":
        raise problem  # int64 and uint64 would meet in float64 and lose digits
    if one.kind == other.kind and one.shape == other.shape:
        return Field(one.kind, dtype.name, one.shape)
    inner = []
    for field in (one, other):
        if field.kind == "dense" and not field.shape:
            raise problem  # a number is no sequence
        inner.append(field.shape if field.kind == "ragged" else field.shape[1:])
    if inner[0] != inner[1]:
        raise problem
    return Field("ragged", dtype.name, inner[0])


def survives(values: Any, dtype: np.dtype[Any]) -> bool:
    """Whether whole numbers are the same ones under another type; what else there is, numpy looks after.

    Examples:
        >>> survives(np.array([2**53]), np.dtype("float64")), survives(np.array([2**53 + 1]), np.dtype("float64"))
        (True, False)
    """
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8 or dtype.kind not in "fc":
        return True
    wide = values.astype(np.float64)
    # Beyond the type's own range, what comes back depends on the machine.
    return bool((wide < float(np.iinfo(values.dtype).max)).all() and (wide.astype(values.dtype) == values).all())


def digits_lost(where: str) -> PackError:
    """The error for those that are not."""
    return PackError(
        "whole numbers and others do not fit into one column: float64 has not all their digits",
        where=where or None,
        remedy="convert them with map=..., or give them fields of their own",
    )


def _laid_out(stored: ColumnBuffer, is_now: Field, becomes: Field, rows: int, where: str = "") -> ColumnBuffer:
    if is_now == becomes:
        return stored
    if not survives(stored.values, np.dtype(becomes.dtype)):
        raise digits_lost(where)
    values, offsets = stored.values.astype(becomes.dtype, copy=False), stored.offsets
    if becomes.kind == "ragged" and offsets is None:
        length = is_now.shape[0]
        values = values.reshape(rows * length, *becomes.shape)
        offsets = np.arange(rows + 1, dtype=np.int64) * length
    return ColumnBuffer(values, offsets)
