"""Where the rows of a column are in memory, and how they are copied into a batch.

One native call copies all rows of a column, from any number of memory-mapped files, and releases the GIL. Without
the native library the rows are copied one by one, with the same result.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.native import CopyJob, address_of, address_or_zero, native_library
from rankfeed.errors import CorruptError

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
#: Names a row in error messages.
Place = Callable[[int], str]
#: Where the content of CPython's byte strings begins; `id` is their address.
_BYTES_OFFSET = bytes.__basicsize__ - 1
_ROWS = struct.Struct("4N2q")
#: Bytes that numpy copies in less time than a native call takes.
_SMALL = 1 << 14
#: The size of all memory.
_ANYWHERE = (1 << 63) - 1
#: What may be wrong with a row, as in _native.c.
_OUT_OF_BOUNDS, _TOO_LONG, _TRUNCATED, _FAULTS = 1, 2, 3, 4


class Memory:
    """A C-contiguous array that rows are in, with what the native function needs, which is looked up once.

    Args:
        array: elements are counted along its first dimension.
    """

    __slots__ = ("array", "has_file", "step", "table")

    def __init__(self, array: Array) -> None:
        self.array, self.step = array, array.itemsize * math.prod(array.shape[1:])
        #: Address and bytes; its file's descriptor (-1: none), mapped bytes and address, the call that checked it.
        file = file_of(array)
        self.has_file = file is not None
        descriptor, mapped, mapping = (
            (-1, 0, 0) if file is None else (file.fileno(), len(file), address_of(np.asarray(file)))
        )
        self.table = np.array([[address_of(array), array.nbytes, descriptor, mapped, mapping, 0]], np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self.array,)


class RowPointers:
    """Rows anywhere in memory: ``lengths[i]`` elements of ``width`` bytes from element ``first[i]`` of an array.

    Bounds are checked when the rows are copied.

    Args:
        memory: the arrays that rows are in.
        first: int64 [rows], in elements of the array.
        lengths: int64 [rows], in elements of ``width`` bytes; None for one each.
        width: bytes of an element; by default those of the array's.
        part: int32 [rows], in which array a row is; None for the first.
        place: names a row in error messages.
        step: bytes that ``first`` counts; by default an element of the arrays.

    Examples:
        >>> rows = RowPointers.into(np.arange(10, dtype=np.int32), np.array([7, 2]), np.array([1, 3]))
        >>> out = np.ones((2, 3), np.int32)
        >>> rows.copy_padded(out)
        >>> out
        array([[7, 0, 0],
               [2, 3, 4]], dtype=int32)
    """

    __slots__ = ("_at", "_count", "_table")

    def __init__(
        self,
        memory: Sequence[Memory],
        first: Int64,
        lengths: Int64 | None = None,
        width: int | None = None,
        part: Int32 | None = None,
        place: Place | None = None,
        step: int | None = None,
    ) -> None:
        self._table = _RowTable(memory, first, lengths, width, part, place, step)
        self._at, self._count = 0, len(first)

    @classmethod
    def into(cls, values: Array, starts: Int64, lengths: Int64, place: Place | None = None) -> RowPointers:
        """``values[starts[i] : starts[i] + lengths[i]]`` of a C-contiguous array."""
        return cls([Memory(values)], starts, lengths, place=place)

    @classmethod
    def into_bytes(
        cls, memory: Memory, starts: Int64, nbytes: Int64, width: int, place: Place | None
    ) -> RowPointers:
        """``nbytes[i]`` bytes from byte ``starts[i]`` of an array of bytes, as elements of ``width`` bytes."""
        lengths = nbytes if width == 1 else nbytes // max(1, width)
        return cls([memory], starts, lengths, width, None, place)

    @classmethod
    def join(cls, parts: Sequence[RowPointers], slots: Sequence[Int64 | None]) -> RowPointers:
        """The rows of several parts at the positions ``slots`` (None for all rows of a single part, in order)."""
        if slots[0] is None:
            return parts[0]
        tables = [part._table for part in parts]
        step = tables[0].step if len({table.step for table in tables}) == 1 else 1
        memory = [piece for table in tables for piece in table.memory]
        before = np.cumsum([0, *(len(table.memory) for table in tables[:-1])], dtype=np.int32)
        numbers = before.repeat([len(part) for part in parts])
        if len(memory) > len(parts):
            numbers += np.concatenate([np.zeros(len(p), np.int32) if p.part is None else p.part for p in parts])

        def place(row: int) -> str:
            places = zip(parts, (np.flatnonzero(rows == row) for rows in slots), strict=True)
            return next(part.place_of(int(matches[0])) for part, matches in places if len(matches))

        order = [np.concatenate([array for array in slots if array is not None])]
        firsts = [part.first if part._table.step == step else part.first * part._table.step for part in parts]
        first = put(firsts, order)
        lengths = put([np.ones(len(p), np.int64) if p.lengths is None else p.lengths for p in parts], order)
        return cls(memory, first, lengths, parts[0].width, put([numbers], order), place, step)

    def __reduce__(self) -> tuple[Any, ...]:
        table, place = self._table, self._table.place
        if place is not None and self._at:
            place = partial(_place_after, place, self._at)
        return RowPointers, (table.memory, self.first, self.lengths, table.width, self.part, place, table.step)

    def __len__(self) -> int:
        return self._count

    def slice(self, first: int, last: int) -> RowPointers:
        """Consecutive rows."""
        rows = RowPointers.__new__(RowPointers)
        rows._table, rows._at, rows._count = self._table, self._at + first, last - first
        return rows

    @property
    def memory(self) -> Sequence[Memory]:
        """The arrays that rows are in."""
        return self._table.memory

    @property
    def first(self) -> Int64:
        """Where each row begins: int64 [rows], in units of ``step`` bytes."""
        return self._table.first[self._at : self._at + self._count]

    @property
    def lengths(self) -> Int64 | None:
        """Elements of each row: int64 [rows]; None for one each."""
        lengths = self._table.lengths
        return None if lengths is None else lengths[self._at : self._at + self._count]

    @property
    def part(self) -> Int32 | None:
        """In which array each row is: int32 [rows]; None for the first."""
        part = self._table.part
        return None if part is None else part[self._at : self._at + self._count]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self._table.width

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        lengths = self.lengths
        return (self._count if lengths is None else int(lengths.sum())) * self.width

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the files that ``memory`` is mapped from."""
        return [descriptor for descriptor in self._table.parts[:, 2].tolist() if descriptor >= 0]

    def place_of(self, row: int) -> str:
        """The name of a row in error messages; "" if it has none."""
        return "" if self._table.place is None else self._table.place(self._at + row)

    def content(self, copies: PendingCopies | None = None) -> list[bytes]:
        """Each row as a byte string."""
        sizes = self._sizes()
        self._check_bounds(sizes)  # before memory is allocated for them
        strings = list(map(_new_bytes(), repeat(None), sizes.tolist()))
        table = self._table
        rows = RowPointers(table.memory, self.first, sizes, 1, self.part, self.place_of, table.step)
        offsets = np.fromiter(map(id, strings), np.int64, len(strings)) + _BYTES_OFFSET
        rows._copy_to(0, offsets, _ANYWHERE, strings, copies)
        return strings

    def take_small(self) -> Array | None:
        """A few small rows of an array that is not in a file, which numpy copies faster; None for others.

        Like numpy's, its negative rows would count from the end: sample ids and dictionaries are checked before.
        """
        table = self._table
        if self._count * table.step > _SMALL or table.lengths is not None or table.part is not None:
            return None
        memory = table.memory[0]
        return None if memory.has_file else memory.array.take(self.first, axis=0)

    # With ``copies``, the copies of the following methods are only begun: `PendingCopies.wait` waits for them.

    def copy_rows(self, out: Array, copies: PendingCopies | None = None) -> None:
        """Copy each row into a row of ``out``, which has its size."""
        self._copy(out, None, self.width, copies)

    def copy_elements(self, out: Array, offsets: Int64, copies: PendingCopies | None = None) -> None:
        """Copy the elements of row i to ``out[offsets[i]:]``, and fill up to ``offsets[i + 1]`` with zeros.

        ``offsets`` are int64 [rows + 1] and begin with 0.
        """
        self._copy(out, offsets, out.nbytes, copies)

    def copy_padded(self, out: Array, copies: PendingCopies | None = None) -> None:
        """Copy each row into a row of ``out``, which has space for the longest, and fill the rest with zeros."""
        self._copy(out, None, self.width * math.prod(out.shape[1:2]), copies)

    def advise(self, *, drop: bool = False) -> None:
        """Let the kernel read the rows' pages of files soon, or ``drop`` those without other rows from its cache.

        Does nothing without the native library.
        """
        if (library := native_library()) is not None:
            library.rankfeed_advise(self._table.native, self._at, self._count, drop)

    def _copy(self, out: Array, offsets: Int64 | None, stride: int, copies: PendingCopies | None) -> None:
        needed = self._count * stride if offsets is None else int(offsets[-1]) * self.width
        if out.nbytes < needed:
            raise IndexError(f"{needed} bytes of rows do not fit into a batch of {out.nbytes}")
        self._copy_to(address_of(out), offsets, stride, out, copies)

    def _copy_to(
        self, address: int, offsets: Int64 | None, stride: int, keep: Any, copies: PendingCopies | None
    ) -> None:
        """Copy row i to element ``offsets[i]`` after an address, or every ``stride`` bytes, and pad it.

        With offsets, ``stride`` is the number of bytes there; _ANYWHERE for rows that do not follow each other and
        are not padded. ``keep`` owns the memory at the address.
        """
        library = native_library()
        if library is None:
            _copy_each(self, address, offsets, stride)
            return
        if copies is not None:
            copies.add(self, address, offsets, stride, keep)
            return
        rows, targets = self._table.native, address_or_zero(offsets)
        code = library.rankfeed_copy_rows(rows, self._at, self._count, targets, address, stride)
        if code:
            row, fault = divmod(code, _FAULTS)
            raise self._error(row, fault, stride)

    def _sizes(self) -> Int64:
        """Bytes of each row."""
        lengths = self.lengths
        return np.full(self._count, self.width) if lengths is None else lengths * self.width

    def _check_bounds(self, sizes: Int64) -> None:
        """What the native function checks of each row before it copies it."""
        limits, first, step = self._of_part(1), self.first, self._table.step
        bad = (first < 0) | (sizes < 0) | (sizes > limits - first * step)
        if step > 1:  # the product may overflow
            bad |= first > limits // step
        if bad.any():
            raise self._error(int(np.argmax(bad)), _OUT_OF_BOUNDS, 0)

    def _of_part(self, column: int) -> Int64:
        """A column of the table of each row's array."""
        part = self.part
        return self._table.parts[:, column].take(0 if part is None else part)

    def _check_files(self) -> None:
        """Check with fstat that no file below the rows was truncated."""
        part = self.part
        for index in [0] if part is None else np.unique(part).tolist():
            descriptor, mapped = self._table.parts[index, 2:4].tolist()
            if descriptor >= 0 and os.fstat(descriptor).st_size < mapped:
                row = 0 if part is None else int(np.argmax(part == index))
                raise self._error(row, _TRUNCATED, 0)

    def _error(self, row: int, fault: int, stride: int) -> Exception:
        if fault == _TOO_LONG:
            return IndexError(f"a row does not fit into {stride} bytes")
        if fault == _OUT_OF_BOUNDS:
            part = self.part
            memory = self._table.memory[0 if part is None else int(part[row])]
            return IndexError(f"a row is not within an array of {len(memory.array)} elements")
        return CorruptError(
            "a file was truncated while it was in use",
            found="fewer bytes than when it was opened",
            where=self.place_of(row) or None,
            remedy="start the job again; do not change data while a job reads them",
        )


class PendingCopies:
    """Copies that are made by threads of the native library, without the GIL.

    The thread that waits for a copy makes parts of it, or of later ones. What copies read and write is kept until
    `wait` returns, which must be called: a finalizer that waits would swallow exceptions of signal handlers.
    """

    def __init__(self, threads: int) -> None:
        # Attributes, since module globals are gone at the interpreter's exit.
        self._threads, self._library, self._begun = threads, native_library(), _BEGUN
        self._jobs: list[CopyJob] = []
        #: Seconds that threads of the library took for the copies which have been made.
        self.seconds = 0.0

    def add(self, rows: RowPointers, address: int, offsets: Int64 | None, stride: int, keep: Any) -> None:
        """Begin a copy; the arguments are those of `RowPointers._copy_to`."""
        table, targets = rows._table.native, address_or_zero(offsets)
        job = CopyJob(table, rows._at, rows._count, targets, address, stride, _LOST, 1)
        # Kept before it is begun: an interrupt may come after each call.
        self._begun[id(job)] = job, rows, offsets, keep
        self._jobs.append(job)
        if not self._library.rankfeed_submit(job, self._threads):  # there is no thread, or no row
            self._jobs.pop()
            del self._begun[id(job)]
            rows._copy_to(address, offsets, stride, keep, None)

    def wait(self) -> bool:
        """Wait for all copies; whether all were made."""
        all_made = True
        while self._jobs:
            job = self._jobs[-1]
            all_made &= bool(self._library.rankfeed_wait(job))
            self.seconds += job.nanoseconds / 1e9
            self._jobs.pop()
            self._begun.pop(id(job), None)
        return all_made


#: Copies that are not waited for yet, and what they read and write, by `id`; if a wait is interrupted, for good.
_BEGUN: dict[int, tuple[Any, ...]] = {}
#: The result of a copy whose thread was left behind by a fork, as in _native.c.
_LOST = -1


class _RowTable:
    """What `RowPointers` of consecutive rows share; the arguments are theirs."""

    __slots__ = ("_native", "first", "lengths", "memory", "part", "parts", "place", "step", "width")

    def __init__(
        self,
        memory: Sequence[Memory],
        first: Int64,
        lengths: Int64 | None,
        width: int | None,
        part: Int32 | None,
        place: Place | None,
        step: int | None,
    ) -> None:
        self.memory, self.part, self.place = memory, part, place
        # The native function takes contiguous int64.
        self.first = np.ascontiguousarray(first, np.int64)
        self.lengths = None if lengths is None else np.ascontiguousarray(lengths, np.int64)
        self.step = memory[0].step if step is None else step
        self.width = self.step if width is None else width
        is_single = len(memory) == 1
        #: The tables of all arrays: int64 [arrays, 6].
        self.parts = memory[0].table if is_single else np.concatenate([piece.table for piece in memory])
        self._native: bytes | None = None

    @property
    def native(self) -> bytes:
        """The ``rows_t`` of the native library."""
        if self._native is None:
            arrays = map(address_or_zero, (self.parts, self.part, self.first, self.lengths))
            self._native = _ROWS.pack(*arrays, self.step, self.width)
        return self._native


def _place_after(place: Place, at: int, row: int) -> str:
    return place(at + row)


def put(values: Sequence[Array], slots: Sequence[Int64 | None]) -> Array:
    """An array with ``values[k][i]`` at ``slots[k][i]``; with None for ``slots``, a single part in order."""
    if slots[0] is None:
        return values[0]
    joined = np.concatenate(values)
    out = np.empty_like(joined)
    out[np.concatenate([rows for rows in slots if rows is not None])] = joined
    return out


@cache
def _new_bytes() -> Callable[[None, int], bytes]:
    """Creates a byte string of a size, whose content is to be written before anyone sees it."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function: Any = prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))
    return function  # type: ignore[no-any-return]


def _copy_each(rows: RowPointers, address: int, offsets: Int64 | None, stride: int) -> None:
    """What the native function does."""
    sizes = rows._sizes()
    rows._check_bounds(sizes)
    sources = rows._of_part(0) + rows.first * rows._table.step
    rows._check_files()
    count = len(sizes)
    targets = np.arange(count + 1) * stride if offsets is None else offsets * rows.width
    spaces = sizes if stride == _ANYWHERE else np.diff(targets)
    if (sizes > spaces).any():
        raise rows._error(int((sizes > spaces).argmax()), _TOO_LONG, stride)
    places = (address + targets[:count]).tolist()
    for target, source, size, space in zip(places, sources.tolist(), sizes.tolist(), spaces.tolist(), strict=True):
        ctypes.memmove(target, source, size)
        ctypes.memset(target + size, 0, space - size)


def file_of(array: Array) -> Any:
    """The memory-mapped file (`MappedFile`) that an array is a view of; None if it is not."""
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return base if hasattr(base, "fileno") else None
