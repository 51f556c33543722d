"""The columns of a batch (dense, ragged, bytes, objects): where each row is, and copying rows into one array.

A column does not hold its rows but points at them, in memory-mapped files or decoded row groups. So a batch is
copied once, from the pages of the files into the buffer that becomes the tensor.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rankfeed.columns.chunk_groups import ChunkGroups, Group
from rankfeed.columns.field import Field
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
from rankfeed.columns.pointers import Int32, Memory, PendingCopies, RowPointers, put
from rankfeed.errors import ArgumentError, CorruptError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
#: Allocates an array: (shape, dtype) -> uninitialised array.
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

#: Rows of a column: where they are in memory, or the objects.
Part = RowPointers | Array


class Column(ABC):
    """One column of a batch."""

    field: Field  # type of the column

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, 0 if unknown."""
        return 0

    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """Each row as a sample contains it."""

    @abstractmethod
    def slice(self, first: int, last: int) -> Self:
        """Consecutive rows."""


class PointedColumn(Column):
    """Rows of bytes in memory."""

    def __init__(self, pointers: RowPointers, field: Field) -> None:
        self.pointers, self.field = pointers, field

    def __len__(self) -> int:
        return len(self.pointers)

    @property
    def nbytes(self) -> int:
        return self.pointers.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an element; bytes and text consist of uint8."""
        return _numpy_dtype(self.field.dtype or "uint8")

    def slice(self, first: int, last: int) -> Self:
        return type(self)(self.pointers.slice(first, last), self.field)


class Dense(PointedColumn):
    """Rows of one shape.

    Examples:
        >>> Dense.of(np.array([10, 11, 12, 13]), np.array([3, 0])).gather()
        array([13, 10])
    """

    @classmethod
    def of(cls, array: Array, rows: Int64 | None = None) -> Dense:
        """Some rows of an array, or all in order."""
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        first = np.arange(len(array)) if rows is None else rows
        return cls(RowPointers([Memory(array)], first), Field("dense", array.dtype.name, array.shape[1:]))

    def gather(self, allocate: Allocate = np.empty, copies: PendingCopies | None = None) -> Array:
        """The rows in one array: [rows, *shape]."""
        small = self.pointers.take_small()
        if small is not None:
            return small
        out = allocate((len(self), *self.field.shape), self.dtype)
        self.pointers.copy_rows(out, copies)
        return out

    def rows(self) -> Sequence[Any]:
        return list(self.gather())


class Segmented(PointedColumn):
    """Rows that differ in length."""

    @property
    def lengths(self) -> Int64:
        """Elements of each row along the first dimension: int64 [rows]."""
        assert self.pointers.lengths is not None
        return self.pointers.lengths

    def compact(self, allocate: Allocate = np.empty, copies: PendingCopies | None = None) -> tuple[Array, Int64]:
        """All elements, and where each row starts: [sum of lengths, *inner], int64 [rows + 1]."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        out = allocate((int(offsets[-1]), *self.field.shape), self.dtype)
        self.pointers.copy_elements(out, offsets, copies)
        return out, offsets


class Ragged(Segmented):
    """Rows that differ in their first dimension.

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
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        pointers = RowPointers.into(values, np.cumsum(lengths) - lengths, lengths)
        return cls(pointers, Field("ragged", values.dtype.name, values.shape[1:]))

    def pad(
        self, allocate: Allocate = np.empty, copies: PendingCopies | None = None, *, multiple: int = 1
    ) -> Array:
        """The rows, padded with zeros to the longest (rounded up to a multiple): [rows, longest, *inner]."""
        longest = -(-int(self.lengths.max(initial=0)) // multiple) * multiple
        out = allocate((len(self), longest, *self.field.shape), self.dtype)
        self.pointers.copy_padded(out, copies)
        return out

    def pad_steps(
        self,
        edges: Sequence[int],
        allocate: Allocate = np.empty,
        copies: PendingCopies | None = None,
        *,
        multiple: int = 1,
    ) -> list[Array]:
        """What `pad` returns of each interval of rows between two edges, by one call for all.

        Examples:
            >>> column = Ragged.of([np.array([1, 2]), np.array([3]), np.array([4])])
            >>> column.pad_steps([0, 2, 3])
            [array([[1, 2],
                   [3, 0]]), array([[4]])]
        """
        starts, rows = np.array(edges[:-1]), np.diff(edges)
        longest = -(-np.maximum.reduceat(self.lengths, starts) // multiple) * multiple
        ends = np.cumsum(rows * longest)
        first = ends - rows * longest  # element of the first row of each interval
        offsets = np.append(np.repeat(first - starts * longest, rows), ends[-1])
        offsets[:-1] += np.arange(len(self)) * np.repeat(longest, rows)
        out = allocate((int(ends[-1]), *self.field.shape), self.dtype)
        self.pointers.copy_elements(out, offsets, copies)
        places = zip(first.tolist(), ends.tolist(), rows.tolist(), longest.tolist(), strict=True)
        return [out[low:high].reshape(count, length, *self.field.shape) for low, high, count, length in places]

    def rows(self) -> Sequence[Array]:
        values, offsets = self.compact()
        return np.split(values, offsets[1:-1]) if len(self) else []


class Bytes(Segmented):
    """Byte strings, or UTF-8 text.

    Examples:
        >>> Bytes.of([b"ab", b""]).rows()
        [b'ab', b'']
        >>> Bytes.of([b"ab", b""]).views()
        [array([97, 98], dtype=uint8), array([], dtype=uint8)]
    """

    @classmethod
    def of(cls, rows: Sequence[bytes] | Sequence[str], *, text: bool | None = None) -> Bytes:
        """A column of byte strings or texts; by default the first row decides which."""
        text = bool(rows) and isinstance(rows[0], str) if text is None else text
        encoded = [row.encode() if isinstance(row, str) else row for row in rows]
        lengths = np.array([len(row) for row in encoded], np.int64)
        values = np.frombuffer(b"".join(encoded), np.uint8)
        pointers = RowPointers.into(values, np.cumsum(lengths) - lengths, lengths)
        return cls(pointers, Field("str" if text else "bytes"))

    def views(self, allocate: Allocate = np.empty, copies: PendingCopies | None = None) -> list[Array]:
        """Each row as an array of uint8, all of which are views of one buffer."""
        values, offsets = self.compact(allocate, copies)
        return [values[first:last] for first, last in pairwise(offsets.tolist())]

    @staticmethod
    def views_of(rows: Sequence[bytes], allocate: Allocate = np.empty) -> list[Array]:
        """The same of byte strings (at least one)."""
        offsets = [0, *accumulate(map(len, rows))]
        values = allocate((offsets[-1],), np.dtype(np.uint8))
        np.concatenate([np.frombuffer(row, np.uint8) for row in rows], out=values)
        return [values[first:last] for first, last in pairwise(offsets)]

    def rows(self, copies: PendingCopies | None = None) -> list[Any]:
        if self.field.kind == "bytes":
            return self.pointers.content(copies)
        texts = []
        for row, content in enumerate(self.pointers.content()):
            try:
                texts.append(content.decode())
            except UnicodeDecodeError as error:
                raise CorruptError(
                    "text is damaged",
                    expected="UTF-8",
                    found=error,
                    where=self.pointers.place_of(row) or None,
                    remedy="fetch or write the data again",
                ) from error
        return texts


class Objects(Column):
    """Python objects, such as the samples of a wrapped Dataset."""

    field = Field("object")

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Sequence[Any]:
        return self.values

    def slice(self, first: int, last: int) -> Self:
        return type(self)(self.values[first:last])


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
        others = sum(int(array.nbytes) for array in (self.offsets, self.index) if array is not None)
        return values + others + self.extra_bytes

    @property
    def rows(self) -> int:
        """Number of rows."""
        if self.index is not None:
            return len(self.index)
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @cached_property
    def memory(self) -> Memory:
        """Where the values are."""
        return Memory(self.values)

    @cached_property
    def is_plain(self) -> bool:
        """Whether row i is element i of the values."""
        return self.offsets is None and self.index is None and self.unreadable is None

    def segments(self, rows: Int64) -> tuple[Int64, Int64 | None]:
        """First element and number of elements of some rows (None for one each); raises for an unreadable one."""
        if self.unreadable is not None:
            self.unreadable.refuse(rows)
        if self.index is not None:
            rows = self.index[rows].astype(np.int64, copy=False)
        if self.offsets is None:
            return rows, None
        starts = self.offsets[rows]
        return starts, self.offsets[rows + 1] - starts

    def part(self, rows: Int64) -> Part:
        """Some rows, as a part of a column; raises for an unreadable one."""
        starts, lengths = self.segments(rows)
        if self.decode is not None:
            return self.decode(starts)
        if self.values.dtype.hasobject:
            return self.values[starts]
        return RowPointers([self.memory], starts, lengths, place=partial(_place_in, [self], rows, None))


_POINTED: dict[str, type[PointedColumn]] = {"dense": Dense, "ragged": Ragged, "bytes": Bytes, "str": Bytes}


def column_from_parts(field: Field, parts: Sequence[Part], slots: Sequence[Int64 | None] = (None,)) -> Column:
    """The column of parts (at least one), whose rows have these positions (None for all rows, in order)."""
    if field.kind == "object":
        return Objects(put([part for part in parts if isinstance(part, np.ndarray)], slots).tolist())
    pointers = RowPointers.join([part for part in parts if isinstance(part, RowPointers)], slots)
    return _POINTED[field.kind](pointers, field)


def _place_in(chunks: Sequence[ColumnBuffer], rows: Int64, part: Int32 | None, row: int) -> str:
    """The name of a row of a batch in error messages."""
    origin = chunks[0 if part is None else part[row]].origin
    return f"{origin}, row {rows[row]}" if origin else ""


def columns_from_buffers(
    fields: Mapping[str, Field],
    names: Sequence[str],
    groups: Sequence[Group],
    buffers: Sequence[Mapping[str, ColumnBuffer]],
) -> dict[str, Column]:
    """The columns of a batch out of the ``buffers`` of several chunks.

    ``groups`` have for each chunk its number, the rows in it, and their positions in the batch (None for all).
    """
    if isinstance(groups, ChunkGroups):
        shared, part = groups.rows, groups.part  # of all columns
    else:
        slots = [slots for _, _, slots in groups]
        shared, part = put([rows for _, rows, _ in groups], slots), None
        if len(groups) > 1:
            part = put(
                [np.arange(len(groups), dtype=np.int32).repeat([len(rows) for _, rows, _ in groups])], slots
            )
    columns: dict[str, Column] = {}
    for name in names:
        field, chunks = fields[name], [chunk[name] for chunk in buffers]
        if field.kind == "object":
            parts = [chunk.part(rows) for chunk, (_, rows, _) in zip(chunks, groups, strict=True)]
            columns[name] = column_from_parts(field, parts, [slots for _, _, slots in groups])
            continue
        first, lengths = shared, None
        if not all(map(_is_plain, chunks)):
            segments = [chunk.segments(rows) for chunk, (_, rows, _) in zip(chunks, groups, strict=True)]
            slots = [slots for _, _, slots in groups]
            first = put([starts for starts, _ in segments], slots)
            if field.kind != "dense":
                lengths = put([sizes for _, sizes in segments if sizes is not None], slots)
        place = partial(_place_in, chunks, shared, part)
        pointers = RowPointers(list(map(_memory, chunks)), first, lengths, None, part, place)
        columns[name] = _POINTED[field.kind](pointers, field)
    return columns


# A batch has many columns, and each of these calls takes a microsecond otherwise.
_is_plain, _memory, _numpy_dtype = attrgetter("is_plain"), attrgetter("memory"), cache(np.dtype)


class Columns(dict[str, Column]):
    """The columns of a batch by name, all with the same number of rows.

    Examples:
        >>> batch = Columns.from_samples([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        >>> batch["x"].gather(), batch.samples()[1]["name"]
        (array([1., 2.]), 'b')
    """

    def __init__(self, columns: Mapping[str, Column], num_rows: int, *, as_dicts: bool = True) -> None:
        super().__init__(columns)
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
        declared = fields or {}
        columns = {
            name: make_column(name, [sample[name] for sample in samples], declared.get(name))
            for name in samples[0]
        }
        return cls(columns, len(samples))

    @property
    def num_files(self) -> int:
        """Number of files that the rows point into, which stay open meanwhile."""
        pointed = [column.pointers for column in self.values() if isinstance(column, PointedColumn)]
        return len({descriptor for pointers in pointed for descriptor in pointers.descriptors})

    def advise(self, *, drop: bool = False) -> int:
        """Let the kernel read the rows' files soon, or ``drop`` their pages from its cache; returns the bytes.

        Rows smaller than a page, on average, are not read: the kernel does so around each, at less cost.
        """
        nbytes = 0
        for column in self.values():
            if isinstance(column, PointedColumn) and (drop or column.nbytes >= len(column) * mmap.PAGESIZE):
                column.pointers.advise(drop=drop)
                nbytes += column.nbytes
        return nbytes

    def slice(self, first: int, last: int) -> Columns:
        """Consecutive rows."""
        columns = {name: column.slice(first, last) for name, column in self.items()}
        return Columns(columns, last - first, as_dicts=self.as_dicts)

    def samples(self) -> list[Any]:
        """Each row as a sample: a dict, unless samples are something else."""
        if not self.as_dicts:
            return list(self[""].rows())
        rows = [column.rows() for column in self.values()]
        if not rows:
            return [{} for _ in range(self.num_rows)]
        return [dict(zip(self, row, strict=True)) for row in zip(*rows, strict=True)]


def _column_of_arrays(values: Sequence[Any]) -> Column | None:
    """The column of numpy arrays of one dtype; None for others, whose common field `infer_layout` finds."""
    dtype = values[0].dtype if type(values[0]) is np.ndarray else None
    if dtype is None or not dtype.isnative or dtype.kind not in "biuf" or dtype.itemsize > 8:
        return None
    if any(type(value) is not np.ndarray or value.dtype != dtype for value in values):
        return None
    shapes = {value.shape for value in values}
    if len(shapes) == 1:
        return Dense.of(np.stack(values))
    return Ragged.of(values) if () not in shapes and len({shape[1:] for shape in shapes}) == 1 else None


def make_column(name: str, values: Sequence[Any], field: Field | None = None) -> Column:
    """The column of some values (at least one without a field); raises Mismatch if there is none."""
    if field is not None and not len(values):
        empty = np.empty((0, *field.shape), field.dtype or (object if field.kind == "object" else np.uint8))
        offsets = None if field.kind in ("dense", "object") else np.zeros(1, np.int64)
        return column_from_parts(field, [ColumnBuffer(empty, offsets).part(np.empty(0, np.int64))])
    if field is None and (column := _column_of_arrays(values)) is not None:
        return column
    if field is None or (field.kind in ("dense", "ragged") and not field.dtype):
        declared = None if field is None else {name: field}
        inferred = flat_fields(resolve_dtypes(infer_layout([{name: value} for value in values], declared)))
        if inferred is None:
            as_array(name, values[0])  # raises a more precise error for most values
            raise ArgumentError(f"{name!r} is not a number, string, bytes or numeric array")
        field = inferred[name]
    rows: Any = fit_values(values, leaf_of_field(field), (name,))
    if field.kind == "object":
        return Objects(rows)
    if field.kind in ("bytes", "str"):
        return Bytes.of(rows, text=field.kind == "str")
    if field.kind == "ragged":
        return Ragged.of(rows)
    return Dense.of(rows if isinstance(rows, np.ndarray) else np.stack(rows))
