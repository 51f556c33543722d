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


class RowPointers:
    """Rows anywhere in memory: ``lengths[i]`` elements of ``width`` bytes at ``addresses[i]``.

    Args:
        addresses: int64 [rows].
        lengths: int64 [rows].
        width: bytes of an element.
        memory: the arrays that the rows are in; keeps them alive.
        part: int32 [rows], which of these arrays a row is in; None for the first.
        place: names a row in error messages.

    Examples:
        >>> rows = RowPointers.into(np.arange(10, dtype=np.int32), np.array([7, 2]), np.array([1, 3]))
        >>> out = np.zeros((2, 3), np.int32)
        >>> rows.copy_padded(out, fill=-1)
        >>> out
        array([[ 7, -1, -1],
               [ 2,  3,  4]], dtype=int32)
    """

    __slots__ = ("_files", "addresses", "lengths", "memory", "part", "place", "width")

    def __init__(
        self,
        addresses: Int64,
        lengths: Int64,
        width: int,
        memory: Sequence[Array],
        part: Int32 | None = None,
        place: Place | None = None,
    ) -> None:
        self.addresses, self.lengths, self.width = addresses, lengths, width
        self.memory, self.part, self.place = memory, part, place
        self._files: Int64 | None = None

    @classmethod
    def into(
        cls, values: Array, starts: Int64, lengths: Int64, place: Place | None = None, *, width: int | None = None
    ) -> RowPointers:
        """``values[starts[i] : starts[i] + lengths[i]]`` of a C-contiguous array, as elements of ``width`` bytes.

        Without ``width``, the elements are those of the array.
        """
        item = values.itemsize * math.prod(values.shape[1:])
        if len(starts):  # as unsigned numbers, negative ones are too large; then the sum cannot overflow
            largest = max(int(each.view(np.uint64).max()) for each in (starts, lengths))
            if largest > len(values) or int((starts + lengths).max()) > len(values):
                raise IndexError(f"a row is not within an array of {len(values)} elements")
        addresses = _address(values) + starts * item
        if width is not None:
            lengths, item = lengths * item // max(1, width), width
        return cls(addresses, lengths, item, (values,), None, place)

    @classmethod
    def of_rows(
        cls, arrays: Sequence[Array], rows: Sequence[Int64], slots: Sequence[Int64 | None] = (None,)
    ) -> RowPointers:
        """``arrays[k][rows[k][i]]`` of C-contiguous arrays with rows of one size, at position ``slots[k][i]``.

        As `join` of `into` for each array, with less work: a batch may have many parts.
        """
        counts = [len(some) for some in rows]
        width = max(array.nbytes // max(1, len(array)) for array in arrays)
        which, limits = np.repeat(np.arange(len(arrays), dtype=np.int32), counts), [len(array) for array in arrays]
        wanted = np.concatenate(rows)
        if (wanted.view(np.uint64) >= np.array(limits, np.uint64)[which]).any():  # negative numbers are too large
            raise IndexError(f"a row is not within an array of {min(limits)} elements")
        addresses = np.array([_address(array) for array in arrays])[which] + wanted * width
        positions = [each for each in slots if each is not None]
        if positions:
            order = np.concatenate(positions)
            addresses[order], which[order] = addresses.copy(), which.copy()
        return cls(addresses, np.ones(len(wanted), np.int64), width, arrays, which)

    @classmethod
    def join(cls, parts: Sequence[RowPointers], slots: Sequence[Int64 | None]) -> RowPointers:
        """The rows of several parts; ``slots`` are the positions of theirs (None for all rows, in order)."""
        if len(parts) == 1 and slots[0] is None:
            return parts[0]
        pairs = [
            (part, np.arange(len(part)) if some is None else some) for part, some in zip(parts, slots, strict=True)
        ]
        addresses = np.empty(sum(len(some) for _, some in pairs), np.int64)
        lengths = np.empty_like(addresses)
        number = np.empty(len(addresses), np.int32)
        memory: list[Array] = []
        for part, some in pairs:
            addresses[some], lengths[some] = part.addresses, part.lengths
            number[some] = len(memory) if part.part is None else part.part + len(memory)
            memory += part.memory

        def place(row: int) -> str:
            part, some = next((part, some) for part, some in pairs if row in some)
            return part.place_of(int(np.flatnonzero(some == row)[0]))

        return cls(addresses, lengths, parts[0].width, memory, number, place)

    def __len__(self) -> int:
        return len(self.lengths)

    def slice(self, first: int, last: int) -> RowPointers:
        """Consecutive rows."""
        rows = RowPointers(
            self.addresses[first:last],
            self.lengths[first:last],
            self.width,
            self.memory,
            None if self.part is None else self.part[first:last],
            None if self.place is None else lambda row: self.place_of(first + row),
        )
        rows._files = self.files
        return rows

    def place_of(self, row: int) -> str:
        """The name of a row in error messages; "" if it has none."""
        return "" if self.place is None else self.place(row)

    @property
    def files(self) -> Int64:
        """Of each array of ``memory``, its file's descriptor (-1 for none) and mapped size: int64 [arrays, 3].

        The native function notes in the last column which files it has checked.
        """
        if self._files is None:
            self._files = np.array([(*file_of(array), 0) for array in self.memory], np.int64).reshape(-1, 3)
        return self._files

    def content(self) -> list[bytes]:
        """Each row as a byte string."""
        self._check_files()
        return list(map(_bytes_at(), self.addresses.tolist(), (self.lengths * self.width).tolist()))

    def copy_rows(self, out: Array) -> None:
        """Copy each row into a row of ``out``, which has its size."""
        self._copy(out, None, self.width)

    def copy_elements(self, out: Array, offsets: Int64) -> None:
        """Copy the elements of each row to ``out[offsets[i]]`` and behind; ``offsets`` are int64 [rows + 1]."""
        self._copy(out, offsets, 0)

    def copy_padded(self, out: Array, *, fill: Any = 0) -> None:
        """Copy each row into a row of ``out``, which has room for the longest, and fill the rest of that."""
        self._copy(out, None, self.width * math.prod(out.shape[1:2]), fill)

    def _copy(self, out: Array, offsets: Int64 | None, stride: int, fill: Any = 0) -> None:
        rows = len(self)
        needed = rows * stride if offsets is None else int(offsets[-1]) * self.width
        if out.nbytes < needed:
            raise IndexError(f"{needed} bytes of rows do not fit into a batch of {out.nbytes}")
        if native_library() is None:
            self._check_files()
            _copy_each(self, out, offsets, stride, fill)
            return
        pattern = b"" if fill == 0 else np.asarray(fill, out.dtype).tobytes()
        files = self.files
        bad = native_library().rankfeed_copy_rows(
            _address(self.addresses),
            _address(self.lengths),
            None if offsets is None else _address(offsets),
            rows,
            self.width,
            _address(out),
            stride,
            pattern,
            len(pattern),
            None if self.part is None else _address(self.part),
            _address(files),
        )
        if bad >= rows:
            raise IndexError(f"a row does not fit into {stride} bytes")
        if bad >= 0:
            raise self._truncated(bad)

    def _check_files(self) -> None:
        """Check with fstat that no file below the rows was truncated."""
        for number in [0] if self.part is None else np.unique(self.part).tolist():
            descriptor, size, _ = self.files[number].tolist()
            if descriptor >= 0 and os.fstat(descriptor).st_size < size:
                raise self._truncated(0 if self.part is None else int(np.argmax(self.part == number)))

    def _truncated(self, row: int) -> CorruptError:
        return CorruptError(
            "a file was truncated while it was in use",
            found="fewer bytes than when it was opened",
            where=self.place_of(row) or None,
            remedy="start the job again; do not change data while a job reads them",
        )


@cache
def native_library() -> Any:
    """The library of ``_copy_rows.c``; None if it was not built."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_copy_rows.so")))
    except OSError:
        return None
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int64
    function = library.rankfeed_copy_rows
    function.argtypes = [pointer] * 3 + [number] * 2 + [pointer, number, ctypes.c_char_p, number] + [pointer] * 2
    function.restype = number
    return library


@cache
def _bytes_at() -> Callable[[int, int], bytes]:
    """What `ctypes.string_at` does, which takes a size of 32 bits and so cuts off larger ones."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    function: Any = prototype(("PyBytes_FromStringAndSize", ctypes.pythonapi))
    return function  # type: ignore[no-any-return]


def _copy_each(rows: RowPointers, out: Array, offsets: Int64 | None, stride: int, fill: Any) -> None:
    """What the native function does."""
    sizes = rows.lengths * rows.width
    if offsets is None:
        if int(sizes.max(initial=0)) > stride:
            raise IndexError(f"a row does not fit into {stride} bytes")
        starts = np.arange(len(sizes)) * stride
        if (sizes < stride).any():
            out[...] = fill
    else:
        starts = offsets[:-1] * rows.width
    targets = (_address(out) + starts).tolist()
    for target, address, size in zip(targets, rows.addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, address, size)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def file_of(array: Array) -> tuple[int, int]:
    """Descriptor and size of the memory-mapped file that an array is a view of; (-1, 0) if it is not."""
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return (base.fileno(), len(base)) if hasattr(base, "fileno") else (-1, 0)
