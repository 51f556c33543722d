"""Columns from the members of tar shards: pointers into the mapped files, or decoded values."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import (
    Bytes,
    Column,
    Dense,
    Field,
    Mismatch,
    Objects,
    Ragged,
    RowSlices,
    RowTake,
    as_array,
    make_column,
)
from rankfeed.errors import ArgumentError, CorruptError, MissingExtraError, RankfeedError, SourceError
from rankfeed.sources.npy.header import check_size, read_header
from rankfeed.sources.source import empty_column, with_where
from rankfeed.sources.tar.shards import Shard, ShardSet

Int64 = npt.NDArray[np.int64]

#: Bytes of a `.npy` member before its elements, unless shapes or field names are long.
_HEAD_BYTES = 128
_MAX_HEADERS = 1 << 14


class Members(NamedTuple):
    """Members of one extension in one shard."""

    shard: Shard
    rows: Int64  #: [m], rows of the samples in the shard
    slots: Int64 | None  #: positions of these rows in the batch; None for all, in order
    starts: Int64  #: [m], offset of each member
    sizes: Int64  #: [m], bytes of each; -1 if a sample has no such member

    def where(self, number: int, extension: str) -> str:
        """A member, for error messages."""
        key = self.shard.index.key(int(self.rows[number]))
        return f"{self.shard.path}, sample {key!r}, .{extension} at offset {self.starts[number]}"

    def runs(self) -> RowSlices:
        """The members as pointers into the shard."""
        return RowSlices(self.shard.data, self.starts, np.maximum(self.sizes, 0), self.slots)

    def all_slots(self) -> Int64:
        """Positions of the rows in the batch."""
        return np.arange(len(self.rows)) if self.slots is None else self.slots


class MemberText(Bytes):
    """A column of text that names the member if one is not UTF-8."""

    def __init__(self, parts: Sequence[Members], extension: str) -> None:
        super().__init__([part.runs() for part in parts], text=True)
        self._members = parts, extension

    def rows(self) -> list[Any]:
        try:
            return super().rows()
        except CorruptError:
            read_values(*self._members, bytes.decode)  # raises, and names the member
            raise


class SampleBatch:
    """Some samples, whose members are located and decoded when a column needs them."""

    def __init__(self, shards: ShardSet, ids: Int64) -> None:
        self._shards, self._ids = shards, ids
        self._members: dict[str, list[Members]] = {}
        self._values: dict[str, list[Any]] = {}

    @cached_property
    def _places(self) -> list[tuple[Shard, Int64, Int64 | None]]:
        places = self._shards.places(self._ids)
        return [(self._shards.open(number), rows, slots) for number, rows, slots in places]

    def keys(self) -> Bytes:
        """The keys of the samples."""
        return Bytes(
            [RowSlices(*shard.index.key_runs(rows), slots) for shard, rows, slots in self._places], text=True
        )

    def members(self, extension: str) -> list[Members]:
        """The members of one extension by shard."""
        if extension not in self._members:
            self._members[extension] = [
                Members(shard, rows, slots, *shard.index.locate(extension, rows))
                for shard, rows, slots in self._places
            ]
        return self._members[extension]

    def values(self, extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
        """Decoded members, see `read_values`."""
        if extension not in self._values:
            self._values[extension] = read_values(self.members(extension), extension, decode)
        return self._values[extension]

    def presence(self, extension: str) -> Dense:
        """Whether each sample has a member."""
        parts = self.members(extension)
        out = np.empty(sum(len(part.rows) for part in parts), bool)
        for part in parts:
            out[part.all_slots()] = part.sizes >= 0
        return Dense.of(out)


def read_values(parts: Sequence[Members], extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
    """Decoded members in the order of the batch; None for a sample without one. Errors name the member."""
    out: list[Any] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        members = zip(part.all_slots().tolist(), part.starts.tolist(), part.sizes.tolist(), strict=True)
        for number, (slot, start, size) in enumerate(members):
            if size < 0:
                continue
            try:
                out[slot] = decode(part.shard.read(start, size))
            except MissingExtraError:
                raise
            except Exception as error:
                raise _with_member(error, part.where(number, extension)) from error
    return out


def _with_member(error: Exception, where: str) -> RankfeedError:
    """An error of a decoder with the member that it is about."""
    if isinstance(error, SourceError):
        return with_where(error, where)
    return CorruptError(
        "a member cannot be decoded",
        found=f"{type(error).__name__}: {str(error)[:200]}",
        where=where,
        remedy="write the sample again; or take its bytes with decode=False",
    )


def field_of(values: Sequence[Any], *, ragged: bool, kind: str | None = None) -> Field:
    """The field of a column, from the values of some samples.

    ``ragged`` says that the first dimension varies, even if it does not in these values; ``kind`` is "dense" or
    "ragged" if the user said so.

    Examples:
        >>> str(field_of([np.zeros((3, 2)), np.zeros((5, 2))], ragged=False))
        'float64[*, 2]'
        >>> str(field_of([np.zeros((3, 2)), np.zeros((3, 4))], ragged=False))
        'object'
    """
    if not values:
        return Field("object")
    for python_type, name in ((str, "str"), (bytes, "bytes")):
        if all(isinstance(value, python_type) for value in values):
            return Field(name)  # type: ignore[arg-type]
    try:
        arrays = [as_array("", value) for value in values]
        dtype = np.result_type(*{array.dtype for array in arrays})
    except (ArgumentError, TypeError):
        return Field("object")
    shapes = {array.shape for array in arrays}
    first = arrays[0].shape
    if len({(len(shape), shape[1:]) for shape in shapes}) > 1:
        return Field("object")
    varies = kind == "ragged" or (kind is None and (ragged or len(shapes) > 1))
    return Field("ragged", dtype.name, first[1:]) if varies and first else Field("dense", dtype.name, first)


def column_of_values(field: Field, values: list[Any], parts: Sequence[Members], extension: str) -> Column:
    """A column of decoded values, None for a missing member; a SourceError if a value does not fit."""
    if field.kind == "object":
        return Objects(values)
    if not values:
        return empty_column(field)
    shape = (0, *field.shape) if field.kind == "ragged" else field.shape
    missing: Any = {"str": "", "bytes": b""}.get(field.kind, np.zeros(shape, field.dtype or None))
    try:
        return make_column(extension, [missing if value is None else value for value in values], field)
    except Mismatch as error:
        for part in parts:
            for number in np.flatnonzero(part.all_slots() == error.row).tolist():
                raise _unlike_others(field, error.found, part.where(number, extension), extension) from error
        raise


def _unlike_others(field: Field, found: object, where: str, extension: str) -> SourceError:
    """The error for a member that does not fit the field of its column."""
    return SourceError(
        "a member is unlike the others of its column",
        expected=field,
        found=found,
        where=where,
        remedy=f'pass decode={{{extension!r}: "object"}} to have each as it is, or give a decoder that makes '
        "them alike",
    )


class NpyReader:
    """Reads `.npy` members of one extension in place; ``field`` is dense or ragged.

    Members begin at multiples of 512 bytes and their elements 128 bytes later, so rows of a column are not rows of
    one array. But all rows at the same remainder of the row size are rows of one view, so a batch is split by
    remainders.
    """

    def __init__(self, field: Field, extension: str) -> None:
        self._field, self._extension = field, extension
        self._row_bytes = np.dtype(field.dtype).itemsize * math.prod(field.shape)
        #: By the first bytes of a member: offset of its elements, rows, offset of its end, and if it is readable
        #: in place.
        self._layouts: dict[bytes, tuple[int, int, int, bool]] = {}

    def column(self, parts: Sequence[Members]) -> Dense | Ragged | None:
        """A column that points into the shards; None if that is not possible (other byte order, no elements)."""
        takes, slices = list[RowTake](), list[RowSlices]()
        for part in parts:
            if not self._row_bytes or (part.sizes < _HEAD_BYTES).any():
                return None
            found = np.array(self._layouts_of(part), np.int64).reshape(-1, 4)
            if not found[:, 3].all():
                return None
            begins, remainders = part.starts + found[:, 0], (part.starts + found[:, 0]) % self._row_bytes
            for remainder in np.unique(remainders).tolist():
                some = remainders == remainder
                slots = part.slots if some.all() else part.all_slots()[some]
                size = (len(part.shard.data) - remainder) // self._row_bytes * self._row_bytes
                rows = part.shard.data[remainder : remainder + size].view(self._field.dtype)
                rows = rows.reshape(-1, *self._field.shape)
                first = begins[some] // self._row_bytes
                takes.append(RowTake(rows, first, slots))
                slices.append(RowSlices(rows, first, found[some, 1], slots))
        if not takes:
            return None
        return Dense(takes) if self._field.kind == "dense" else Ragged(slices)

    def _layouts_of(self, part: Members) -> list[tuple[int, int, int, bool]]:
        out = []
        data: Any = part.shard.data.data
        for number, (start, size) in enumerate(zip(part.starts.tolist(), part.sizes.tolist(), strict=True)):
            head = bytes(data[start : start + _HEAD_BYTES])
            layout = self._layouts.get(head)
            if layout is None or layout[2] > size:
                layout = self._read_layout(part, number, start, size)
                if layout[0] <= _HEAD_BYTES and len(self._layouts) < _MAX_HEADERS:
                    self._layouts[head] = layout
            out.append(layout)
        return out

    def _read_layout(self, part: Members, number: int, start: int, size: int) -> tuple[int, int, int, bool]:
        try:
            header = read_header(io.BytesIO(part.shard.read(start, min(size, 1 << 20))), "")
            if not header.fits(self._field):
                raise _unlike_others(self._field, header, "", self._extension)
            check_size(header, size, "")
        except RankfeedError as error:
            raise _with_member(error, part.where(number, self._extension)) from error
        in_place = header.dtype.isnative and not (header.fortran and len(header.shape) > 1)
        rows = header.shape[0] if header.shape else 1
        return header.offset, rows, header.offset + header.nbytes, in_place
