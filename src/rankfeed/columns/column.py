"""The columns of a batch: where each row lies, and how it gets from there into one array.

A column does not hold the rows but points at them: *parts*, each an array that is already there (a memory-mapped
file, a decoded row group) with the rows wanted from it. So a batch is copied once, from the file's pages into
the buffer that becomes the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.field import Field
from rankfeed.columns.gather import copy_segments, take_rows

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
#: Makes room for an array: (shape, dtype) -> uninitialised array.
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


#: From this many bytes a row on, a Python loop that copies once beats two vectorised copies.
_LARGE_ROW = 16384


@dataclass(frozen=True)
class Rows:
    """Rows of one array: ``values[rows[i]]`` is row ``slots[i]`` of the batch (``i`` where slots is None)."""

    values: Array
    rows: Int64
    slots: Int64 | None = None


@dataclass(frozen=True)
class Runs:
    """Runs of one array: ``values[starts[i] : starts[i] + lengths[i]]`` is row ``slots[i]`` of the batch."""

    values: Array
    starts: Int64
    lengths: Int64
    slots: Int64 | None = None


def _slots(part: Rows) -> Int64:
    assert part.slots is not None
    return part.slots


class Column(ABC):
    """One column of a batch.

    Attributes:
        field: what it holds.
    """

    field: Field

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """Each row by itself, as the sample that a transform or a Dataset's user gets."""


class Dense(Column):
    """Rows of one shape.

    Example:
        >>> column = Dense([Rows(np.array([10, 11, 12, 13]), np.array([3, 0]))])
        >>> column.gather()
        array([13, 10])
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self._length = sum(len(part.rows) for part in parts)
        values = parts[0].values
        self.field = Field("dense", values.dtype.name, values.shape[1:])

    @classmethod
    def of(cls, array: Array) -> Dense:
        """All rows of an array, in order."""
        return cls([Rows(array, np.arange(len(array)))])

    def __len__(self) -> int:
        return self._length

    def gather(self, allocate: Allocate = np.empty) -> Array:
        """The rows in one array: [rows, *shape]."""
        parts, shape = self.parts, self.parts[0].values.shape[1:]
        out = allocate((self._length, *shape), parts[0].values.dtype)
        if parts[0].slots is None:
            take_rows(parts[0].values, parts[0].rows, out)
        elif out.nbytes >= _LARGE_ROW * len(out):
            for part in parts:
                for row, slot in zip(part.rows.tolist(), _slots(part).tolist(), strict=True):
                    out[slot] = part.values[row]
        else:
            # First part by part, then into the batch's order: a second copy, but one that stays in the cache.
            by_part = allocate(out.shape, out.dtype)
            place = np.empty(len(out), np.int64)
            first = 0
            for part in parts:
                last = first + len(part.rows)
                take_rows(part.values, part.rows, by_part[first:last])
                place[_slots(part)] = np.arange(first, last)
                first = last
            take_rows(by_part, place, out)
        return out

    def rows(self) -> Sequence[Any]:
        return list(self.gather())


class _Segmented(Column):
    """Rows that are runs of elements."""

    def __init__(self, parts: Sequence[Runs]) -> None:
        self.parts = parts
        if len(parts) == 1 and parts[0].slots is None:
            self.lengths: Int64 = parts[0].lengths
        else:
            self.lengths = np.empty(sum(len(part.lengths) for part in parts), np.int64)
            for part in parts:
                self.lengths[slice(None) if part.slots is None else part.slots] = part.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def compact(self, allocate: Allocate = np.empty) -> tuple[Array, Int64]:
        """All elements in a row, and where each row starts: [sum of lengths, *inner], int64 [rows + 1]."""
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
    """Rows that differ in their first dimension: 1-D sequences, or 2-D tensors with varying rows, and so on.

    Attributes:
        lengths: int64 [rows], elements along the first dimension.

    Example:
        >>> column = Ragged.of([np.array([1.0, 2.0]), np.array([3.0])])
        >>> column.pad()
        array([[1., 2.],
               [3., 0.]])
        >>> column.compact()
        (array([1., 2., 3.]), array([0, 2, 3]))
    """

    def __init__(self, parts: Sequence[Runs]) -> None:
        super().__init__(parts)
        values = parts[0].values
        self.field = Field("ragged", values.dtype.name, values.shape[1:])

    @classmethod
    def of(cls, rows: Sequence[Array]) -> Ragged:
        """A column of arrays that agree in dtype and in all dimensions but the first."""
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.concatenate(rows) if len(rows) else np.empty(0)
        return cls([Runs(values, np.cumsum(lengths) - lengths, lengths)])

    def pad(self, allocate: Allocate = np.empty, *, fill: Any = 0) -> Array:
        """The rows side by side, filled up to the longest: [rows, longest, *inner]."""
        values = self.parts[0].values
        longest = int(self.lengths.max(initial=0))
        out = allocate((len(self), longest, *values.shape[1:]), values.dtype)
        self._copy(out.reshape(-1, *values.shape[1:]), np.arange(len(self)) * longest)
        for row, length in enumerate(self.lengths.tolist()):
            if length < longest:
                out[row, length:] = fill
        return out

    def rows(self) -> Sequence[Array]:
        values, offsets = self.compact()
        return np.split(values, offsets[1:-1])


class Bytes(_Segmented):
    """Byte strings, or text in UTF-8; its parts are runs of uint8.

    Example:
        >>> Bytes.of([b"ab", b""]).rows()
        [b'ab', b'']
    """

    def __init__(self, parts: Sequence[Runs], *, text: bool = False) -> None:
        super().__init__(parts)
        self.text = text
        self.field = Field("str" if text else "bytes")

    @classmethod
    def of(cls, rows: Sequence[bytes] | Sequence[str]) -> Bytes:
        """A column of byte strings, or of texts."""
        text = bool(rows) and isinstance(rows[0], str)
        encoded = [row.encode() if isinstance(row, str) else row for row in rows]
        lengths = np.array([len(row) for row in encoded], np.int64)
        values = np.frombuffer(b"".join(encoded), np.uint8)
        return cls([Runs(values, np.cumsum(lengths) - lengths, lengths)], text=text)

    def rows(self) -> list[Any]:
        out: list[Any] = [None] * len(self)
        for part in self.parts:
            # A memoryview's slices are cheaper than an array's.
            view = memoryview(part.values.data)
            slots = range(len(part.starts)) if part.slots is None else part.slots.tolist()
            for slot, start, length in zip(slots, part.starts.tolist(), part.lengths.tolist(), strict=True):
                piece = view[start : start + length]
                out[slot] = str(piece, "utf-8") if self.text else bytes(piece)
        return out


class Objects(Column):
    """Whatever a wrapped Dataset returned: a list."""

    field = Field("object")

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Sequence[Any]:
        return self.values
