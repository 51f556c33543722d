"""A batch as columns: where each row is, and how it is copied into one array.

A column does not hold its rows but points at them: *parts*, each an existing array (a memory-mapped file, a
decoded row group) with the rows wanted from it. So a batch is copied once, from the pages of the file into the
buffer that becomes the tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns.field import Field
from rankfeed.columns.gather import copy_padded, copy_segments, take_rows
from rankfeed.columns.layout import (
    Branch,
    as_array,
    check_keys,
    fit_values,
    flat_fields,
    infer_layout,
    leaf_of_field,
    resolve_dtypes,
)
from rankfeed.errors import ArgumentError, CorruptError

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
    """Slices of an array: ``values[starts[i] : starts[i] + lengths[i]]`` is row ``slots[i]`` of the batch."""

    values: Array
    starts: Int64
    lengths: Int64
    slots: Int64 | None = None
    place: Callable[[int], str] | None = None  # names row i in errors


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
        values, rows, slots = self.parts[0]
        if slots is None and values.ndim == 1 and len(rows) <= _FEW_ROWS:
            return values.take(rows, 0, None, "clip")
        out = allocate((len(self), *values.shape[1:]), values.dtype)
        if slots is None:
            take_rows(values, rows, out)
        elif out.nbytes >= _LARGE_ROW * len(out):
            for part in self.parts:
                for row, slot in zip(part.rows.tolist(), slots_of(part).tolist(), strict=True):
                    out[slot] = part.values[row]
        else:
            # First part by part, then into the order of the batch: the second copy stays in the cache.
            by_part, first = allocate(out.shape, out.dtype), 0
            for part in self.parts:
                last = first + len(part.rows)
                take_rows(part.values, part.rows, by_part[first:last])
                first = last
            place = np.empty(len(out), np.int64)
            place[np.concatenate([slots_of(part) for part in self.parts])] = np.arange(len(out))
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
                self.lengths[slots_of(part)] = part.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        values = self.parts[0].values  # may have no elements, while those of other parts have
        return int(self.lengths.sum()) * values.itemsize * math.prod(values.shape[1:])

    def compact(self, allocate: Allocate = np.empty) -> tuple[Array, Int64]:
        """All elements, and where each row starts: [sum of lengths, *inner], int64 [rows + 1]."""
        values = self.parts[0].values
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        out = allocate((int(offsets[-1]), *values.shape[1:]), values.dtype)
        for part in self.parts:
            copy_segments(part.values, part.starts, part.lengths, out, offsets[slots_of(part)])
        return out, offsets


class Ragged(_Segmented):
    """Rows that differ in their first dimension; ``lengths`` (int64 [rows]) are the elements along it.

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
        out = allocate((len(self), self.longest(multiple), *values.shape[1:]), values.dtype)
        for part in self.parts:
            copy_padded(part.values, part.starts, part.lengths, out, slots_of(part), fill)
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
            view = memoryview(part.values.data)  # its slices are cheaper than those of an array
            slices = zip(slots_of(part).tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True)
            if not self.text:
                for slot, start, length in slices:
                    out[slot] = bytes(view[start : start + length])
                continue
            for row, (slot, start, length) in enumerate(slices):
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
    """Rows without a readable value, such as nulls; reading one raises, the others are read."""

    rows: npt.NDArray[np.bool_]
    error: Callable[[int], Exception]  # creates the exception for a row

    def refuse(self, rows: Int64) -> None:
        """Raise for the first of these rows that is unreadable."""
        hit = self.rows[rows]
        if hit.any():
            raise self.error(int(rows[np.argmax(hit)]))


@dataclass(frozen=True)
class ColumnBuffer:
    """All rows of a column in a file or chunk: as stored, or decoded."""

    #: Dense: [rows, *shape]; ragged: [elements, *shape]; bytes and text: uint8 [bytes]; objects: [rows].
    values: Array
    offsets: Int64 | None = None  # int64 [rows + 1], where each row starts; None for dense and objects
    origin: str = ""  # file and column, for errors
    extra_bytes: int = 0  # memory of the data that objects are decoded from
    borrowed: bool = False  # whether another object owns the memory of the values
    unreadable: Unreadable | None = None
    #: Int [rows], the value of each row, for dictionary columns: values and offsets are the dictionary's.
    index: npt.NDArray[np.integer[Any]] | None = None
    decode: Callable[[Int64], Array] | None = None  # decodes rows int64 [m] to objects [m]

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
        """Some rows, as the part of a column that fills ``slots``; raises for an unreadable one."""
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


class Columns(Mapping[str, Column]):
    """The columns of a batch by name, all with the same number of rows.

    Examples:
        >>> batch = Columns.from_samples([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        >>> batch["x"].gather(), batch.samples()[1]["name"]
        (array([1., 2.]), 'b')
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int, *, as_dicts: bool = True) -> None:
        self._columns = dict(columns)
        self.num_rows = num_rows
        self.as_dicts = as_dicts

    @classmethod
    def of_objects(cls, samples: Sequence[Any]) -> Columns:
        """Samples that are not dicts of columns: one column "", with ``as_dicts`` False."""
        return cls({"": Objects(samples)}, len(samples), as_dicts=False)

    @classmethod
    def from_samples(
        cls, samples: Sequence[Mapping[str, Any]], fields: Mapping[str, Field] | None = None
    ) -> Columns:
        """Columns of dicts that have the same keys.

        Args:
            samples: dicts of numbers, strings, bytes, arrays, tensors, (nested) lists of numbers.
            fields: types of some of them, to which values are converted without loss; the dtype of a ragged one
                may be left empty.

        Raises:
            Mismatch: keys differ, or a value does not fit its column; names field and row.
        """
        if not samples:
            return cls({}, 0)
        first = Branch(dict, samples[0])
        for row, sample in enumerate(samples):
            check_keys(first, sample.keys(), (), row)
        known = fields or {}
        columns = {
            name: make_column(name, [each[name] for each in samples], known.get(name)) for name in samples[0]
        }
        return cls(columns, len(samples))

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def samples(self) -> list[Any]:
        """Each row as a sample: a dict, unless samples are something else."""
        if not self.as_dicts:
            return list(self._columns[""].rows())
        rows = [column.rows() for column in self._columns.values()]
        if not rows:
            return [{} for _ in range(self.num_rows)]
        return [dict(zip(self._columns, row, strict=True)) for row in zip(*rows, strict=True)]


def make_column(name: str, values: Sequence[Any], field: Field | None = None) -> Column:
    """The column of some values (at least one); raises Mismatch if there is none."""
    if field is None or (field.kind in ("dense", "ragged") and not field.dtype):
        known = None if field is None else {name: field}
        found = flat_fields(resolve_dtypes(infer_layout([{name: value} for value in values], known)))
        if found is None:
            as_array(name, values[0])  # raises a more precise error for most values
            raise ArgumentError(f"{name!r} is not a number, string, bytes or numeric array")
        field = found[name]
    rows: Any = fit_values(values, leaf_of_field(field), (name,))
    if field.kind == "object":
        return Objects(rows)
    if field.kind in ("bytes", "str"):
        return Bytes.of(rows, text=field.kind == "str")
    if field.kind == "ragged":
        return Ragged.of(rows)
    return Dense.of(rows if isinstance(rows, np.ndarray) else np.stack(rows))
