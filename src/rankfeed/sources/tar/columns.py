"""Columns out of the members of tar shards: pointers into the mapped files, or decoded values."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Dense, Field, Objects, Ragged, RowSlices, as_array
from rankfeed.errors import ArgumentError, CorruptError, MissingExtraError, RankfeedError, SourceError
from rankfeed.sources.tar.decoders import Decoder
from rankfeed.storage.mapped import ReadHandle

Int64 = npt.NDArray[np.int64]

#: What is behind the name of the column that holds a sound's frames a second.
RATE = ".rate"


class Places(Protocol):
    """The index of a shard: where its samples' members lie."""

    @property
    def offsets(self) -> Int64: ...
    def locate(self, extension: str, rows: Int64) -> tuple[Int64, Int64]: ...
    def key_runs(self, rows: Int64) -> tuple[npt.NDArray[np.uint8], Int64, Int64]: ...
    def key(self, row: int) -> str: ...


@dataclass(frozen=True)
class Shard:
    """An open shard.

    Args:
        path: of the archive.
        data: uint8, the whole file, mapped.
        index: where its samples lie.
        file: the same file, open.
        stamp: its size and time when it was opened.
    """

    path: str
    data: npt.NDArray[np.uint8]
    index: Places
    file: ReadHandle
    stamp: tuple[int, int]

    def is_unchanged(self) -> bool:
        """Whether the file still is as it was: to look at a mapped page that was cut off ends the process."""
        return stamp_of(self.file) == self.stamp

    def read(self, start: int, size: int) -> bytes:
        """The bytes of a member."""
        return self.data[start : start + size].tobytes()


def stamp_of(file: ReadHandle) -> tuple[int, int]:
    """Size and time of an open file."""
    found = os.fstat(file.handle)
    return found.st_size, found.st_mtime_ns


class Part(NamedTuple):
    """Members of one extension in one shard.

    Args:
        shard: it.
        rows: int64 [m], numbers of the samples in it.
        slots: which rows of the batch they are; None for all, in order.
        starts: where each lies.
        sizes: how many bytes; -1 where a sample has no such member.
    """

    shard: Shard
    rows: Int64
    slots: Int64 | None
    starts: Int64
    sizes: Int64

    def where(self, number: int, extension: str) -> str:
        """What an error says of a member."""
        key = self.shard.index.key(int(self.rows[number]))
        return f"{self.shard.path}, sample {key!r}, .{extension} at offset {self.starts[number]}"


class NamedBytes(Bytes):
    """Texts that say which one is damaged."""

    def __init__(self, parts: Sequence[Part], extension: str) -> None:
        super().__init__([as_run(part) for part in parts], text=True)
        self._members = parts, extension

    def rows(self) -> list[Any]:
        try:
            return super().rows()
        except CorruptError:
            parts, extension = self._members
            read_values(parts, extension, bytes.decode)  # raises, and names the member
            raise


def read_values(parts: Sequence[Part], extension: str, decode: Callable[[bytes], Any]) -> list[Any]:
    """The members' values, in the order of the batch; None where there is none.

    Raises:
        CorruptError: one cannot be decoded; names file, sample and offset.
        UnsafeError, SourceError, MissingExtraError: it is not to be decoded.
    """
    out: list[Any] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        slots = range(len(part.rows)) if part.slots is None else part.slots.tolist()
        read = part.shard.read
        for number, (slot, start, size) in enumerate(
            zip(slots, part.starts.tolist(), part.sizes.tolist(), strict=True)
        ):
            if size < 0:
                continue
            try:
                out[slot] = decode(read(start, size))
            except MissingExtraError:
                raise
            except Exception as error:
                raise blamed(error, part.where(number, extension)) from error
    return out


def blamed(error: Exception, where: str) -> RankfeedError:
    """An error of a decoder, with the member that it is about."""
    if isinstance(error, SourceError):
        return type(error)(
            error.summary, expected=error.expected, found=error.found, where=where, remedy=error.remedy
        )
    return CorruptError(
        "a member cannot be decoded",
        found=f"{type(error).__name__}: {str(error)[:200]}",
        where=where,
        remedy="write the sample again; or take its bytes with decode=False",
    )


def field_of(values: Sequence[Any], *, ragged: bool, kind: str | None = None) -> Field:
    """What a column holds, judged by some of its values.

    Args:
        values: of some samples, at least one.
        ragged: whether the first dimension differs in other samples, even where it does not in these.
        kind: "dense" or "ragged" where somebody knows better.

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
    vary = kind == "ragged" or (kind is None and (ragged or len(shapes) > 1))
    return Field("ragged", dtype.name, first[1:]) if vary and first else Field("dense", dtype.name, first)


def column_of_values(field: Field, values: list[Any], parts: Sequence[Part], extension: str) -> Column:
    """A column of decoded values; None stands for a member that is not there.

    Raises:
        SourceError: a value is unlike the others of its column; names file and sample.
    """
    if field.kind == "object":
        return Objects(values)
    if field.kind in ("bytes", "str"):
        wanted = str if field.kind == "str" else bytes
        nothing = wanted()
        values = [nothing if value is None else value for value in values]
        for slot, value in enumerate(values):
            if not isinstance(value, wanted):
                raise _unlike(field, type(value).__name__, parts, slot, extension)
        return Bytes.of(values) if values else Bytes([_no_runs(np.empty(0, np.uint8))], text=field.kind == "str")
    dtype = np.dtype(field.dtype)
    nothing_there = np.zeros((0, *field.shape) if field.kind == "ragged" else field.shape, dtype)
    arrays = []
    for slot, value in enumerate(values):
        try:
            array = nothing_there if value is None else as_array(extension, value)
        except ArgumentError as error:
            raise _unlike(field, error.found, parts, slot, extension) from error
        inner = array.shape[1:] if field.kind == "ragged" else array.shape
        same_rank = array.ndim == nothing_there.ndim
        if inner != field.shape or not same_rank or not np.can_cast(array.dtype, dtype, "safe"):
            raise _unlike(field, f"{array.dtype.name}{list(array.shape)}", parts, slot, extension)
        arrays.append(array)
    if field.kind == "dense":
        return Dense.of(np.stack(arrays, dtype=dtype) if arrays else np.empty((0, *field.shape), dtype))
    if not arrays:
        return Ragged([_no_runs(nothing_there)])
    return Ragged.of([array.astype(dtype, copy=False) for array in arrays])


def _no_runs(values: npt.NDArray[Any]) -> RowSlices:
    return RowSlices(values, np.empty(0, np.int64), np.empty(0, np.int64))


def _unlike(field: Field, found: object, parts: Sequence[Part], slot: int, extension: str) -> SourceError:
    return unlike(field, found, place_of(parts, slot, extension), extension)


def unlike(field: Field, found: object, where: str, extension: str) -> SourceError:
    """Say that a member is unlike the others of its column."""
    return SourceError(
        "a member is unlike the others of its column",
        expected=field,
        found=found,
        where=where,
        remedy=f'pass decode={{{extension!r}: "object"}} to have each as it is, or give a decoder that makes '
        "them alike",
    )


def place_of(parts: Sequence[Part], slot: int, extension: str) -> str:
    """Where the member of a row of the batch lies."""
    for part in parts:
        numbers = np.arange(len(part.rows)) if part.slots is None else part.slots
        found = np.flatnonzero(numbers == slot)
        if len(found):
            return part.where(int(found[0]), extension)
    return extension


def plain_column(parts: Sequence[Part], extension: str, decoder: Decoder) -> Column:
    """Bytes and text as they lie in the shards."""
    if decoder.kind == "text":
        return NamedBytes(parts, extension)
    return Bytes([as_run(part) for part in parts])


def as_run(part: Part) -> RowSlices:
    """Members as they lie in their shard."""
    return RowSlices(part.shard.data, part.starts, np.maximum(part.sizes, 0), part.slots)
