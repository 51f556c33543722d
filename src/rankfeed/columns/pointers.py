"""Where the rows of a column are in memory, and how they are copied into a batch.

One native call copies all rows of a column, from any number of memory-mapped files, and releases the GIL. Its
library (``_copy_rows.c``) is built when the package is installed with a C compiler; without it, the rows are
copied one by one, with the same result.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError

Array = npt.NDArray[Any]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
#: Names a row in error messages.
Place = Callable[[int], str]
#: Where the content of CPython's byte strings begins; `id` is their address.
_BYTES_OFFSET = bytes.__basicsize__ - 1
_Nothing = ctypes.c_char * 0
#: Bytes that numpy copies in less time than a native call takes.
_SMALL = 1 << 14
#: The size of all memory.
_ANYWHERE = (1 << 63) - 1
#: What may be wrong with a row, as in _copy_rows.c.
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
        descriptor, mapped = file_of(array)
        self.has_file = descriptor >= 0
        mapping = _address(np.asarray(_base(array))) if self.has_file else 0
        self.table = np.array([[_address(array), array.nbytes, descriptor, mapped, mapping, 0]], np.int64)

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
        >>> out = np.zeros((2, 3), np.int32)
        >>> rows.copy_padded(out, fill=-1)
        >>> out
        array([[ 7, -1, -1],
               [ 2,  3,  4]], dtype=int32)
    """

    __slots__ = ("_addresses", "_tables", "first", "lengths", "memory", "part", "place", "step", "width")

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
        self.memory, self.part, self.place = memory, part, place
        # The native function takes contiguous int64.
        self.first = np.ascontiguousarray(first, np.int64)
        self.lengths = None if lengths is None else np.ascontiguousarray(lengths, np.int64)
        self.step = memory[0].step if step is None else step
        self.width = self.step if width is None else width
        self._tables: Int64 | None = None
        #: Of `tables`, `part`, `first` and `lengths`; 0 for None.
        self._addresses: tuple[int, int, int, int] | None = None

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
        step = parts[0].step if len({part.step for part in parts}) == 1 else 1
        memory = [each for part in parts for each in part.memory]
        before = np.cumsum([0, *(len(part.memory) for part in parts[:-1])], dtype=np.int32)
        numbers = before.repeat([len(part) for part in parts])
        if len(memory) > len(parts):
            numbers += np.concatenate([np.zeros(len(p), np.int32) if p.part is None else p.part for p in parts])

        def place(row: int) -> str:
            number, at = locate(slots, row)
            return parts[number].place_of(at)

        order = [np.concatenate([each for each in slots if each is not None])]
        first = put([part.first if part.step == step else part.first * part.step for part in parts], order)
        lengths = put([np.ones(len(p), np.int64) if p.lengths is None else p.lengths for p in parts], order)
        return cls(memory, first, lengths, parts[0].width, put([numbers], order), place, step)

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.memory, self.first, self.lengths, self.width, self.part, self.place, self.step
        return RowPointers, given  # addresses are those of this process

    def __len__(self) -> int:
        return len(self.first)

    def slice(self, first: int, last: int) -> RowPointers:
        """Consecutive rows."""
        rows = RowPointers.__new__(RowPointers)  # what is known of these needs no checks
        rows.memory, rows.width, rows.step, rows._tables = self.memory, self.width, self.step, self.tables
        rows.first = self.first[first:last]
        rows.lengths = None if self.lengths is None else self.lengths[first:last]
        rows.part = None if self.part is None else self.part[first:last]
        rows.place = None if self.place is None else lambda row: self.place_of(first + row)
        tables, part, firsts, lengths = self.addresses
        rows._addresses = tables, part and part + 4 * first, firsts + 8 * first, lengths and lengths + 8 * first
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return (len(self) if self.lengths is None else int(self.lengths.sum())) * self.width

    def place_of(self, row: int) -> str:
        """The name of a row in error messages; "" if it has none."""
        return "" if self.place is None else self.place(row)

    @property
    def tables(self) -> Int64:
        """The tables of all parts of ``memory``: int64 [parts, 6]."""
        if self._tables is None:
            one = len(self.memory) == 1
            self._tables = self.memory[0].table if one else np.concatenate([each.table for each in self.memory])
        return self._tables

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Addresses of ``tables``, ``part``, ``first`` and ``lengths``; 0 for None."""
        if self._addresses is None:
            arrays = self.part, self.first, self.lengths
            part, first, lengths = (0 if each is None else _address(each) for each in arrays)
            self._addresses = _address(self.tables), part, first, lengths
        return self._addresses

    def content(self) -> list[bytes]:
        """Each row as a byte string."""
        sizes = self._sizes()
        self._check_bounds(sizes)  # before memory is allocated for them
        strings = list(map(_new_bytes(), repeat(None), sizes.tolist()))
        rows = RowPointers(self.memory, self.first, sizes, 1, self.part, self.place, self.step)
        rows._tables = self.tables
        rows._copy_to(0, np.fromiter(map(id, strings), np.int64, len(strings)) + _BYTES_OFFSET, _ANYWHERE)
        return strings

    def take_small(self) -> Array | None:
        """A few small rows of an array that is not in a file, which numpy copies faster; None for others.

        Like numpy's, its negative rows would count from the end: sample ids and dictionaries are checked before.
        """
        memory, rows = self.memory[0], self.first
        if self.part is not None or len(rows) * self.step > _SMALL or memory.has_file or self.lengths is not None:
            return None
        return memory.array.take(rows, axis=0)

    def copy_rows(self, out: Array) -> None:
        """Copy each row into a row of ``out``, which has its size."""
        self._copy(out, None, self.width)

    def copy_elements(self, out: Array, offsets: Int64) -> None:
        """Copy the elements of each row to ``out[offsets[i]]`` and behind; ``offsets`` are int64 [rows + 1]."""
        self._copy(out, offsets, out.nbytes)

    def copy_padded(self, out: Array, *, fill: Any = 0) -> None:
        """Copy each row into a row of ``out``, which has space for the longest, and fill the rest of that."""
        pattern = b"" if fill == 0 else np.asarray(fill, out.dtype).tobytes()
        self._copy(out, None, self.width * math.prod(out.shape[1:2]), pattern)

    def advise(self, *, drop: bool = False) -> None:
        """Let the kernel read the rows' pages of files soon, or ``drop`` those without other rows from its cache.

        Does nothing without the native library.
        """
        if (library := native_library()) is not None:
            library.rankfeed_advise(*self._arguments(), drop)

    def _arguments(self) -> tuple[Any, ...]:
        """The rows as the native functions take them."""
        tables, part, first, lengths = self.addresses
        return tables, part, first, self.step, lengths, len(self.first), self.width

    def _copy(self, out: Array, offsets: Int64 | None, stride: int, fill: bytes = b"") -> None:
        needed = len(self) * stride if offsets is None else int(offsets[-1]) * self.width
        if out.nbytes < needed:
            raise IndexError(f"{needed} bytes of rows do not fit into a batch of {out.nbytes}")
        self._copy_to(_address(out), offsets, stride, fill)

    def _copy_to(self, address: int, offsets: Int64 | None, stride: int, fill: bytes = b"") -> None:
        """Copy row i to element ``offsets[i]`` after an address; without these, every ``stride`` bytes, padded.

        With offsets, ``stride`` is the number of bytes there.
        """
        library = native_library()
        if library is None:
            _copy_each(self, address, offsets, stride, fill)
            return
        target = None if offsets is None else _address(offsets)
        found = library.rankfeed_copy_rows(*self._arguments(), target, address, stride, fill, len(fill))
        if found:
            row, fault = divmod(found, _FAULTS)
            raise self._error(row, fault, stride)

    def _sizes(self) -> Int64:
        """Bytes of each row."""
        return np.full(len(self), self.width) if self.lengths is None else self.lengths * self.width

    def _check_bounds(self, sizes: Int64) -> None:
        """What the native function checks of each row before it copies it."""
        limits = self.tables[:, 1].take(0 if self.part is None else self.part)
        bad = (self.first < 0) | (sizes < 0) | (sizes > limits - self.first * self.step)
        if self.step > 1:  # the product may overflow
            bad |= self.first > limits // self.step
        if bad.any():
            raise self._error(int(np.argmax(bad)), _OUT_OF_BOUNDS, 0)

    def _check_files(self) -> None:
        """Check with fstat that no file below the rows was truncated."""
        for number in [0] if self.part is None else np.unique(self.part).tolist():
            descriptor, mapped = self.tables[number, 2:4].tolist()
            if descriptor >= 0 and os.fstat(descriptor).st_size < mapped:
                row = 0 if self.part is None else int(np.argmax(self.part == number))
                raise self._error(row, _TRUNCATED, 0)

    def _error(self, row: int, fault: int, stride: int) -> Exception:
        if fault == _TOO_LONG:
            return IndexError(f"a row does not fit into {stride} bytes")
        if fault == _OUT_OF_BOUNDS:
            memory = self.memory[0 if self.part is None else int(self.part[row])]
            return IndexError(f"a row is not within an array of {len(memory.array)} elements")
        return CorruptError(
            "a file was truncated while it was in use",
            found="fewer bytes than when it was opened",
            where=self.place_of(row) or None,
            remedy="start the job again; do not change data while a job reads them",
        )


def put(values: Sequence[Array], slots: Sequence[Int64 | None]) -> Array:
    """An array with ``values[k][i]`` at ``slots[k][i]``; with None for ``slots``, a single part in order."""
    if slots[0] is None:
        return values[0]
    joined = np.concatenate(values)
    found = np.empty_like(joined)
    found[np.concatenate([each for each in slots if each is not None])] = joined
    return found


def locate(slots: Sequence[Int64 | None], row: int) -> tuple[int, int]:
    """The part that a row is in, and its position there, where ``slots`` are as in `put`."""
    if slots[0] is None:
        return 0, row
    found = (np.flatnonzero(some == row) for some in slots)
    return next((number, int(at[0])) for number, at in enumerate(found) if len(at))


@cache
def native_library() -> Any:
    """The library of ``_copy_rows.c``; None if it was not built."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_copy_rows.so")))
    except OSError:
        return None
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int64
    rows = [pointer, pointer, pointer, number, pointer, number, number]
    library.rankfeed_copy_rows.argtypes = [*rows, pointer, pointer, number, ctypes.c_char_p, number]
    library.rankfeed_copy_rows.restype = number
    library.rankfeed_advise.argtypes = [*rows, ctypes.c_int32]
    library.rankfeed_advise.restype = None
    return library


@cache
def _new_bytes() -> Callable[[None, int], bytes]:
    """Creates a byte string of a size, whose content is to be written before anyone sees it."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function: Any = prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))
    return function  # type: ignore[no-any-return]


def _copy_each(rows: RowPointers, address: int, offsets: Int64 | None, stride: int, fill: bytes) -> None:
    """What the native function does."""
    sizes = rows._sizes()
    rows._check_bounds(sizes)
    sources = rows.tables[:, 0].take(0 if rows.part is None else rows.part) + rows.first * rows.step
    rows._check_files()
    if offsets is None and int(sizes.max(initial=0)) > stride:
        raise rows._error(int(sizes.argmax()), _TOO_LONG, stride)
    targets = address + (np.arange(len(sizes)) * stride if offsets is None else offsets[: len(sizes)] * rows.width)
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
        if offsets is None and size < stride:
            rest = (fill or b"\0") * ((stride - size) // max(1, len(fill)))
            ctypes.memmove(target + size, rest, stride - size)


def _address(array: Array) -> int:
    try:
        return ctypes.addressof(_Nothing.from_buffer(array.data))  # a fifth of the time of what follows
    except (TypeError, ValueError, BufferError):  # read-only
        address: int = array.__array_interface__["data"][0]
        return address


def file_of(array: Array) -> tuple[int, int]:
    """Descriptor and size of the memory-mapped file that an array is a view of; (-1, 0) if it is not."""
    base = _base(array)
    return (base.fileno(), len(base)) if hasattr(base, "fileno") else (-1, 0)


def _base(array: Array) -> Any:
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return base
