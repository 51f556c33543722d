"""The columns of a batch: where each row lies, and how it gets from there into one array.

A column does not hold the rows but points at them: *parts*, each an array that is already there (a memory-mapped
file, a decoded row group) with the rows wanted from it. So a batch is copied once, from the file's pages into
the buffer that becomes the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.field import Field
from rankfeed.columns.gather import copy_segments, copy_windows, suits_windows, take_rows
from rankfeed.columns.parts import Rows, Runs, read_runs, slots_of
from rankfeed.errors import CorruptError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
#: Makes room for an array: (shape, dtype) -> uninitialised array.
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

#: Up to this many numbers numpy finds room for them sooner than anybody else.
_FEW_ROWS = 4096
#: From this many bytes a row on, a Python loop that copies once beats two vectorised copies.
_LARGE_ROW = 16384


class Column(ABC):
    """One column of a batch."""

    @property
    @abstractmethod
    def field(self) -> Field:
        """What it holds."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, where that is known."""
        return 0

    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """Each row by itself, as the sample that a transform or a Dataset's user gets."""


class Dense(Column):
    """Rows of one shape.

    Examples:
        >>> column = Dense([Rows(np.array([10, 11, 12, 13]), np.array([3, 0]))])
        >>> column.gather()
        array([13, 10])
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts

    @property
    def field(self) -> Field:
        """What it holds."""
        values = self.parts[0].values
        return Field("dense", values.dtype.name, values.shape[1:])

    @classmethod
    def of(cls, array: Array) -> Dense:
        """All rows of an array, in order."""
        return cls([Rows(array, np.arange(len(array)))])

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        return len(self) * int(self.parts[0].values[:1].nbytes)

    def gather(self, allocate: Allocate = np.empty) -> Array:
        """The rows in one array: [rows, *shape]."""
        parts = self.parts
        values, rows, slots, region = parts[0]
        if slots is None and region is None:
            if values.ndim == 1 and len(rows) <= _FEW_ROWS:
                return values.take(rows, 0, None, "clip")
            out = allocate((len(rows), *values.shape[1:]), values.dtype)
            take_rows(values, rows, out)
            return out
        out = allocate((len(self), *values.shape[1:]), values.dtype)
        if region is not None:
            for part in parts:
                assert part.region is not None
                one = np.ones(len(part.rows), np.int64)
                read_runs(part.region, int(part.values[:1].nbytes), part.rows, one, out, slots_of(part))
        elif out.nbytes >= _LARGE_ROW * len(out):
            for part in parts:
                for row, slot in zip(part.rows.tolist(), slots_of(part).tolist(), strict=True):
                    out[slot] = part.values[row]
        else:
            # First part by part, then into the batch's order: a second copy, but one that stays in the cache.
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

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        return int(self.lengths.sum()) * int(self.parts[0].values[:1].nbytes)

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
            if part.region is None:
                copy_segments(part.values, part.starts, part.lengths, out, place)
                continue
            read_runs(part.region, int(part.values[:1].nbytes), part.starts, part.lengths, out, place)


class Ragged(_Segmented):
    """Rows that differ in their first dimension: 1-D sequences, or 2-D tensors with varying rows, and so on.

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

    @property
    def field(self) -> Field:
        """What it holds."""
        values = self.parts[0].values
        return Field("ragged", values.dtype.name, values.shape[1:])

    @classmethod
    def of(cls, rows: Sequence[Array]) -> Ragged:
        """A column of arrays that agree in dtype and in all dimensions but the first."""
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.concatenate(rows) if len(rows) else np.empty(0)
        return cls([Runs(values, np.cumsum(lengths) - lengths, lengths)])

    def longest(self, multiple: int = 1) -> int:
        """Elements of the longest row, rounded up to a multiple."""
        return -(-int(self.lengths.max(initial=0)) // multiple) * multiple

    def pad(self, allocate: Allocate = np.empty, *, fill: Any = 0, multiple: int = 1) -> Array:
        """The rows side by side, filled up to the longest (or a multiple): [rows, longest, *inner]."""
        values = self.parts[0].values
        longest = self.longest(multiple)
        out = allocate((len(self), longest, *values.shape[1:]), values.dtype)
        if all(part.region is None for part in self.parts) and suits_windows(values, self.lengths, longest):
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
    """Byte strings, or text in UTF-8; its parts are runs of uint8.

    Examples:
        >>> Bytes.of([b"ab", b""]).rows()
        [b'ab', b'']
    """

    def __init__(self, parts: Sequence[Runs], *, text: bool = False) -> None:
        super().__init__(parts)
        self.text = text

    @property
    def field(self) -> Field:
        """What it holds."""
        return Field("str" if self.text else "bytes")

    @classmethod
    def of(cls, rows: Sequence[bytes] | Sequence[str], *, text: bool | None = None) -> Bytes:
        """A column of byte strings or of texts; the first row decides if the kind is not given."""
        text = bool(rows) and isinstance(rows[0], str) if text is None else text
        encoded = [row.encode() if isinstance(row, str) else row for row in rows]
        lengths = np.array([len(row) for row in encoded], np.int64)
        values = np.frombuffer(b"".join(encoded), np.uint8)
        return cls([Runs(values, np.cumsum(lengths) - lengths, lengths)], text=text)

    def rows(self) -> list[Any]:
        out: list[Any] = [None] * len(self)
        for part in self.parts:
            starts, lengths = part.starts.tolist(), part.lengths.tolist()
            slots = range(len(starts)) if part.slots is None else part.slots.tolist()
            if part.region is not None:
                pieces: Any = map(part.region.read, lengths, starts)
            else:
                # A memoryview's slices are cheaper than an array's.
                view = memoryview(part.values.data)
                pieces = (view[start : start + length] for start, length in zip(starts, lengths, strict=True))
                pieces = pieces if self.text else map(bytes, pieces)
            if self.text:
                pieces = _texts(part, pieces)
            for slot, piece in zip(slots, pieces, strict=True):
                out[slot] = piece
        return out


def _texts(part: Runs, pieces: Iterable[Any]) -> Iterator[str]:
    for row, piece in enumerate(pieces):
        try:
            yield str(piece, "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptError(
                "text is damaged",
                expected="UTF-8",
                found=error,
                where=None if part.place is None else part.place(row),
                remedy="fetch the data anew, or write them again",
            ) from error


class Objects(Column):
    """Whatever a wrapped Dataset returned: a list."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    @property
    def field(self) -> Field:
        """What it holds."""
        return Field("object")

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Sequence[Any]:
        return self.values
