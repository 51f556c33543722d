"""Columns from the members of tar shards: pointers into the mapped files, or decoded values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Field, Mismatch, Objects, RowSlices, as_array, make_column
from rankfeed.errors import ArgumentError, CorruptError, MissingExtraError, RankfeedError, SourceError
from rankfeed.sources.source import empty_column, with_where
from rankfeed.sources.tar.shards import Shard

Int64 = npt.NDArray[np.int64]


class Members(NamedTuple):
    """Members of one extension in one shard.

    Args:
        shard: the shard.
        rows: int64 [m], rows of the samples in it.
        slots: positions of these rows in the batch; None for all, in order.
        starts: int64 [m], offset of each member.
        sizes: int64 [m], bytes of each; -1 if a sample has no such member.
    """

    shard: Shard
    rows: Int64
    slots: Int64 | None
    starts: Int64
    sizes: Int64

    def where(self, number: int, extension: str) -> str:
        """A member, for error messages."""
        key = self.shard.index.key(int(self.rows[number]))
        return f"{self.shard.path}, sample {key!r}, .{extension} at offset {self.starts[number]}"

    def runs(self) -> RowSlices:
        """The members as pointers into the shard."""
        return RowSlices(self.shard.data, self.starts, np.maximum(self.sizes, 0), self.slots)


class MemberText(Bytes):
    """A column of text that names the member if one is not UTF-8."""

    def __init__(self, parts: Sequence[Members], extension: str) -> None:
        super().__init__([part.runs() for part in parts], text=True)
        self._members = parts, extension

    def rows(self) -> list[Any]:
        try:
            return super().rows()
        except CorruptError:
            parts, extension = self._members
            read_values(parts, extension, bytes.decode)  # raises, and names the member
            raise


def read_values(parts: Sequence[Members], extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
    """Decoded members in the order of the batch; None for a sample without one. Errors name the member."""
    out: list[Any] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        slots = range(len(part.rows)) if part.slots is None else part.slots.tolist()
        members = zip(slots, part.starts.tolist(), part.sizes.tolist(), strict=True)
        for number, (slot, start, size) in enumerate(members):
            if size < 0:
                continue
            try:
                out[slot] = decode(part.shard.read(start, size))
            except MissingExtraError:
                raise
            except Exception as error:
                raise with_member(error, part.where(number, extension)) from error
    return out


def with_member(error: Exception, where: str) -> RankfeedError:
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
    """The field of a column, from some of its values.

    Args:
        values: of some samples, at least one.
        ragged: whether the first dimension varies, even if it does not in these values.
        kind: "dense" or "ragged" if the user said so.

    Examples:
        >>> str(field_of([np.zeros((3, 2)), np.zeros((5, 2))], ragged=False))
        'float64[*, 2]'
        >>> str(field_of([np.zeros((3, 2)), np.zeros((3, 4))], ragged=False))
        'object'
    """
    if all(isinstance(value, str) for value in values):
        return Field("str")
    if all(isinstance(value, bytes) for value in values):
        return Field("bytes")
    try:
        arrays = [as_array("", value) for value in values]
        dtype = np.result_type(*{array.dtype for array in arrays})
    except (ArgumentError, TypeError):
        return Field("object")
    shapes = {array.shape for array in arrays}
    first = arrays[0].shape
    if len({shape[1:] for shape in shapes}) > 1 or len({len(shape) for shape in shapes}) > 1:
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
        where = _where(parts, error.row, extension)
        raise unlike_others(field, error.found, where, extension) from error


def unlike_others(field: Field, found: object, where: str, extension: str) -> SourceError:
    """The error for a member that does not fit the field of its column."""
    return SourceError(
        "a member is unlike the others of its column",
        expected=field,
        found=found,
        where=where,
        remedy=f'pass decode={{{extension!r}: "object"}} to have each as it is, or give a decoder that makes '
        "them alike",
    )


def _where(parts: Sequence[Members], slot: int, extension: str) -> str:
    """The member at a position of the batch, for error messages."""
    for part in parts:
        slots = np.arange(len(part.rows)) if part.slots is None else part.slots
        found = np.flatnonzero(slots == slot)
        if len(found):
            return part.where(int(found[0]), extension)
    return extension
