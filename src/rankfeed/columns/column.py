"""The columns of a batch: where each row is, and how it is copied into one array.

A column does not hold its rows but points at them: *parts*, each an existing array (a memory-mapped file, a
decoded row group) with the rows wanted from it. So a batch is copied once, from the pages of the file into the
buffer that becomes the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns.field import Field
from rankfeed.columns.gather import copy_segments, copy_windows, suits_windows, take_rows
from rankfeed.errors import CorruptError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
#: Allocates an array: (shape, dtype) -> uninitialised array.
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

#: Up to this many numbers, numpy allocates the result fastest itself.
_FEW_ROWS = 4096
#: From this many bytes per row, a Python loop that copies once beats two vectorised copies.
_LARGE_ROW = 16384


class RowTake(NamedTuple):
    """Rows of an array: ``values[rows[i]]`` is row ``slots[i]`` of the batch (``i`` if slots is None)."""

    values: Array
    rows: Int64
    slots: Int64 | None = None


class RowSlices(NamedTuple):
    """Slices of an array: ``values[starts[i] : starts[i] + lengths[i]]`` is row ``slots[i]`` of the batch.

    ``place(i)`` names row i in errors.
    """

    values: Array
    starts: Int64
    lengths: Int64
    slots: Int64 | None = None
    place: Callable[[int], str] | None = None


def slots_of(part: RowTake | RowSlices) -> Int64:
    """The rows of the batch that a part fills."""
    return np.arange(len(part[1])) if part.slots is None else part.slots


class Column(ABC):
    """One column of a batch."""

    @property
    @abstractmethod
    def field(self) -> Field:
        """Type of the column."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, 0 if unknown."""
        return 0

    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """Each row as a sample contains it."""


class Dense(Column):
    """Rows of one shape.

    Examples:
        >>> column = Dense([RowTake(np.array([10, 11, 12, 13]), np.array([3, 0]))])
        >>> column.gather()
        array([13, 10])
    """

    def __init__(self, parts: Sequence[RowTake]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, array: Array) -> Dense:
        """All rows of an array, in order."""
        return cls([RowTake(array, np.arange(len(array)))])

    @property
    def field(self) -> Field:
        values = self.parts[0].values
        return Field("dense", values.dtype.name, values.shape[1:])

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return len(self) * int(self.parts[0].values[:1].nbytes)

    def gather(self, allocate: Allocate = np.empty) -> Array:
        """The rows in one array: [rows, *shape]."""
        parts = self.parts
        values, rows, slots = parts[0]
        if slots is None:
            if values.ndim == 1 and len(rows) <= _FEW_ROWS:
                return values.take(rows, 0, None, "clip")
            out = allocate((len(rows), *values.shape[1:]), values.dtype)
            take_rows(values, rows, out)
            return out
        out = allocate((len(self), *values.shape[1:]), values.dtype)
        if out.nbytes >= _LARGE_ROW * len(out):
            for part in parts:
                for row, slot in zip(part.rows.tolist(), slots_of(part).tolist(), strict=True):
                    out[slot] = part.values[row]
            return out
        # First part by part, then into the order of the batch: the second copy stays in the cache.
        by_part = allocate(out.shape, out.dtype)
        place = np.empty(len(out), np.int64)
        place[np.concatenate([slots_of(part) for part in parts])] = np.arange(len(out))
        first = 0
        for part in parts:
            last = first + len(part.rows)
            take_rows(part.values, part.rows, by_part[first:last])
            first = last
        take_rows(by_part, place, out)
        return out

    def rows(self) -> Sequence[Any]:
        return list(self.gather())


class _Segmented(Column):
    """Rows that are slices of elements."""

    def __init__(self, parts: Sequence[RowSlices]) -> None:
        self.parts = parts
        if len(parts) == 1 and parts[0].slots is None:
            self.lengths: Int64 = parts[0].lengths
        else:
            self.lengths = np.empty(sum(len(part.lengths) for part in parts), np.int64)
            for part in parts:
                self.lengths[slice(None) if part.slots is None else part.slots] = part.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum()) * int(self.parts[0].values[:1].nbytes)

    def compact(self, allocate: Allocate = np.empty) -> tuple[Array, Int64]:
        """All elements, and where each row starts: [sum of lengths, *inner], int64 [rows + 1]."""
        values = self.parts[0].values
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        out = allocate((int(offsets[-1]), *values.shape[1:]), values.dtype)
        self._copy(out, offsets[:-1])
        return out, offsets

    def _copy(self, out: Array, targets: Int64) -> None:
        for part in self.parts:
            place = targets if part.slots is None else targets[part.slots]
            copy_segments(part.values, part.starts, part.lengths, out, place)


class Ragged(_Segmented):
    """Rows that differ in their first dimension: 1-D sequences, 2-D arrays of any number of rows, and so on.

    Attributes:
        lengths: int64 [rows], elements along the first dimension.

    Examples:
        >>> column = Ragged.of([np.array([1.0, 2.0]), np.array([3.0])])
        >>> column.pad()
        array([[1., 2.],
               [3., 0.]])
        >>> column.compact()
        (array([1., 2., 3.]), array([0, 2, 3]))
    """

    @classmethod
    def of(cls, rows: Sequence[Array]) -> Ragged:
        """A column of arrays with the same dtype and the same dimensions except the first."""
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.concatenate(rows) if len(rows) else np.empty(0)
        return cls([RowSlices(values, np.cumsum(lengths) - lengths, lengths)])

    @property
    def field(self) -> Field:
        values = self.parts[0].values
        return Field("ragged", values.dtype.name, values.shape[1:])

    def longest(self, multiple: int = 1) -> int:
        """Elements of the longest row, rounded up to a multiple."""
        return -(-int(self.lengths.max(initial=0)) // multiple) * multiple

    def pad(self, allocate: Allocate = np.empty, *, fill: Any = 0, multiple: int = 1) -> Array:
        """The rows, padded to the longest (rounded up to a multiple): [rows, longest, *inner]."""
        values = self.parts[0].values
        longest = self.longest(multiple)
        out = allocate((len(self), longest, *values.shape[1:]), values.dtype)
        if suits_windows(values, self.lengths, longest):
            for part in self.parts:
                copy_windows(part.values, part.starts, part.lengths, out, slots_of(part), fill)
            return out
        flat = out.reshape(-1, *values.shape[1:])
        self._copy(flat, np.arange(len(self)) * longest)
        end = 0
        for length in self.lengths.tolist():
            end += longest
            if length < longest:
                flat[end - longest + length : end] = fill
        return out

    def rows(self) -> Sequence[Array]:
        values, offsets = self.compact()
        return np.split(values, offsets[1:-1]) if len(self) else []


class Bytes(_Segmented):
    """Byte strings, or UTF-8 text; the parts are slices of uint8.

    Examples:
        >>> Bytes.of([b"ab", b""]).rows()
        [b'ab', b'']
    """

    def __init__(self, parts: Sequence[RowSlices], *, text: bool = False) -> None:
        super().__init__(parts)
        self.text = text

    @classmethod
    def of(cls, rows: Sequence[bytes] | Sequence[str], *, text: bool | None = None) -> Bytes:
        """A column of byte strings or texts; by default the first row decides which."""
        text = bool(rows) and isinstance(rows[0], str) if text is None else text
        encoded = [row.encode() if isinstance(row, str) else row for row in rows]
        lengths = np.array([len(row) for row in encoded], np.int64)
        values = np.frombuffer(b"".join(encoded), np.uint8)
        return cls([RowSlices(values, np.cumsum(lengths) - lengths, lengths)], text=text)

    @property
    def field(self) -> Field:
        return Field("str" if self.text else "bytes")

    def rows(self) -> list[Any]:
        out: list[Any] = [None] * len(self)
        for part in self.parts:
            slots = range(len(part.starts)) if part.slots is None else part.slots.tolist()
            view = memoryview(part.values.data)  # its slices are cheaper than those of an array
            runs = zip(slots, part.starts.tolist(), part.lengths.tolist(), strict=True)
            if not self.text:
                for slot, start, length in runs:
                    out[slot] = bytes(view[start : start + length])
                continue
            for row, (slot, start, length) in enumerate(runs):
                try:
                    out[slot] = str(view[start : start + length], "utf-8")
                except UnicodeDecodeError as error:
                    raise CorruptError(
                        "text is damaged",
                        expected="UTF-8",
                        found=error,
                        where=None if part.place is None else part.place(row),
                        remedy="fetch or write the data again",
                    ) from error
        return out


class Objects(Column):
    """Python objects, such as the samples of a wrapped Dataset."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    @property
    def field(self) -> Field:
        return Field("object")

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Sequence[Any]:
        return self.values


@dataclass(frozen=True)
class Unreadable:
    """Rows without a readable value, such as nulls; reading one raises, the others are read.

    Args:
        rows: bool [rows].
        error: creates the exception for a row.
    """

    rows: npt.NDArray[np.bool_]
    error: Callable[[int], Exception]

    def refuse(self, rows: Int64) -> None:
        """Raise for the first of these rows that is unreadable."""
        hit = self.rows[rows]
        if hit.any():
            raise self.error(int(rows[np.argmax(hit)]))


@dataclass(frozen=True)
class ColumnBuffer:
    """All rows of a column in a file or chunk: as stored, or decoded.

    Args:
        values: dense: [rows, *shape]; ragged: [elements, *shape]; bytes and text: uint8 [bytes]; objects: [rows].
        offsets: int64 [rows + 1], where each row starts; None for dense and objects.
        origin: file and column, for errors.
        extra_bytes: memory of the data that objects are decoded from.
        borrowed: whether another object owns the memory of the values.
        unreadable: rows that cannot be read; None if all can.
        index: int [rows], the value of each row, for dictionary columns: values and offsets are the dictionary's.
        decode: decodes rows int64 [m] to objects [m]; None if the values are decoded.

    Examples:
        >>> buffer = ColumnBuffer(np.frombuffer(b"abcde", np.uint8), np.array([0, 2, 5]))
        >>> column_from_parts(Field("bytes"), [buffer.part(np.array([1, 0]))]).rows()
        [b'cde', b'ab']
    """

    values: Array
    offsets: Int64 | None = None
    origin: str = ""
    extra_bytes: int = 0
    borrowed: bool = False
    unreadable: Unreadable | None = None
    index: npt.NDArray[np.integer[Any]] | None = None
    decode: Callable[[Int64], Array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        values = 0 if self.borrowed or self.decode is not None else int(self.values.nbytes)
        others = sum(int(each.nbytes) for each in (self.offsets, self.index) if each is not None)
        return values + others + self.extra_bytes

    @property
    def rows(self) -> int:
        """Number of rows."""
        if self.index is not None:
            return len(self.index)
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def part(self, rows: Int64, slots: Int64 | None = None) -> RowTake | RowSlices:
        """Some rows, as a part of a column; ``slots`` are the rows of the batch, None for all in order.

        Raises:
            RankfeedError: one of them is unreadable.
        """
        if self.unreadable is not None:
            self.unreadable.refuse(rows)
        if self.index is not None:
            rows = self.index[rows].astype(np.int64, copy=False)
        if self.decode is not None:
            return RowTake(self.decode(rows), np.arange(len(rows)), slots)
        if self.offsets is None:
            return RowTake(self.values, rows, slots)
        starts = self.offsets[rows]
        place = (lambda row: f"{self.origin}, row {rows[row]}") if self.origin else None
        return RowSlices(self.values, starts, self.offsets[rows + 1] - starts, slots, place)


def column_from_parts(field: Field, parts: Sequence[Any]) -> Column:
    """The column with these parts (at least one)."""
    if field.kind == "dense":
        return Dense(parts)
    if field.kind == "ragged":
        return Ragged(parts)
    if field.kind != "object":
        return Bytes(parts, text=field.kind == "str")
    out: list[Any] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        for slot, row in zip(slots_of(part).tolist(), part.rows.tolist(), strict=True):
            out[slot] = part.values[row]
    return Objects(out)
