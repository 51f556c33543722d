"""Where the rows of a column are in memory, and how they are copied into a batch.

One native call copies all rows of a column, from any number of memory-mapped files, and releases the GIL. Its
library (``_copy_rows.c``) is built when the package is installed with a C compiler; without it, the rows are
copied one by one, with the same result.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
#: Names a row in error messages.
Place = Callable[[int], str]


class RowPointers(NamedTuple):
    """Rows anywhere in memory: ``lengths[i]`` elements of ``width`` bytes at ``addresses[i]``.

    Examples:
        >>> rows = RowPointers.into(np.arange(10, dtype=np.int32), np.array([7, 2]), np.array([1, 3]))
        >>> out = np.zeros((2, 3), np.int32)
        >>> rows.copy_padded(out, fill=-1)
        >>> out
        array([[ 7, -1, -1],
               [ 2,  3,  4]], dtype=int32)
    """

    addresses: Int64
    lengths: Int64
    width: int
    owner: object  # keeps the memory alive
    place: Place | None = None

    @classmethod
    def into(cls, values: Array, starts: Int64, lengths: Int64, place: Place | None = None) -> "RowPointers":
        """``values[starts[i] : starts[i] + lengths[i]]`` of a C-contiguous array."""
        width = values.itemsize * math.prod(values.shape[1:])
        if len(starts):  # as unsigned numbers, negative ones are too large; then the sum cannot overflow
            largest = max(int(each.view(np.uint64).max()) for each in (starts, lengths))
            if largest > len(values) or int((starts + lengths).max()) > len(values):
                raise IndexError(f"a row is not within an array of {len(values)} elements")
        return cls(_address(values) + starts * width, lengths, width, values, place)

    @classmethod
    def into_bytes(
        cls, data: Array, starts: Int64, nbytes: Int64, width: int, place: Place | None = None
    ) -> "RowPointers":
        """The ``nbytes[i]`` bytes from byte ``starts[i]`` of an array of uint8, as elements of ``width`` bytes."""
        rows = cls.into(data, starts, nbytes, place)
        return rows._replace(lengths=nbytes // max(1, width), width=width)

    @classmethod
    def join(cls, parts: Sequence["RowPointers"], slots: Sequence[Int64 | None]) -> "RowPointers":
        """The rows of several parts; ``slots`` are the positions of theirs (None for all rows, in order)."""
        if len(parts) == 1 and slots[0] is None:
            return parts[0]
        pairs = [
            (part, np.arange(len(part.lengths)) if some is None else some)
            for part, some in zip(parts, slots, strict=True)
        ]
        addresses = np.empty(sum(len(some) for _, some in pairs), np.int64)
        lengths = np.empty_like(addresses)
        for part, some in pairs:
            addresses[some], lengths[some] = part.addresses, part.lengths

        def place(row: int) -> str:
            part, some = next((part, some) for part, some in pairs if row in some)
            return part.place_of(int(np.flatnonzero(some == row)[0]))

        return cls(addresses, lengths, parts[0].width, [part.owner for part in parts], place)

    def slice(self, first: int, last: int) -> "RowPointers":
        """Consecutive rows."""
        return self._replace(
            addresses=self.addresses[first:last],
            lengths=self.lengths[first:last],
            place=None if self.place is None else lambda row: self.place_of(first + row),
        )

    def place_of(self, row: int) -> str:
        """The name of a row in error messages; "" if it has none."""
        return "" if self.place is None else self.place(row)

    def content(self) -> list[bytes]:
        """Each row as a byte string."""
        return list(map(ctypes.string_at, self.addresses.tolist(), (self.lengths * self.width).tolist()))

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
        needed = len(self.lengths) * stride if offsets is None else int(offsets[-1]) * self.width
        if out.nbytes < needed or (offsets is None and int(self.lengths.max(initial=0)) * self.width > stride):
            raise IndexError(f"{needed} bytes of rows do not fit into a batch of {out.nbytes}")
        copy_rows = native_copy_rows()
        if copy_rows is None:
            _copy_each(self, out, offsets, stride, fill)
            return
        pattern = b"" if fill == 0 else np.asarray(fill, out.dtype).tobytes()
        bad = copy_rows(
            _address(self.addresses),
            _address(self.lengths),
            None if offsets is None else _address(offsets),
            len(self.lengths),
            self.width,
            _address(out),
            stride,
            pattern,
            len(pattern),
        )
        if bad >= 0:
            raise CorruptError(
                "a file was truncated while it was read",
                found="fewer bytes than when it was opened",
                where=self.place_of(bad) or None,
                remedy="do not change data while a job reads them",
            )


@cache
def native_copy_rows() -> Any:
    """The native function; None if it was not built."""
    try:
        function = ctypes.CDLL(str(Path(__file__).with_name("_copy_rows.so"))).rankfeed_copy_rows
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, number, number, pointer, number, ctypes.c_char_p, number]
    function.restype = number
    return function


def _copy_each(rows: RowPointers, out: Array, offsets: Int64 | None, stride: int, fill: Any) -> None:
    """What the native function does."""
    sizes = rows.lengths * rows.width
    if offsets is None:
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
