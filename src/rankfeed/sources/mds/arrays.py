"""The headers of arrays in MDS shards, read for a whole batch at once.

Where the column has no type of its own, a value starts with a byte for it; then come a byte with the number of
dimensions (times four) and the width of their numbers (0 to 3: 1, 2, 4 or 8 bytes), these numbers, the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError
from rankfeed.sources.scattered import rows_at

Data = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: The byte that stands for a type.
DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """What the headers of some arrays say that start with the same bytes.

    Args:
        which: int64 [m], of the arrays asked for.
        dtype: of their elements.
        size: of the header, in bytes.
        shapes: int64 [m, dimensions].
    """

    which: Int64
    dtype: str
    size: int
    shapes: Int64

    def rows(self, starts: Int64, lengths: Int64) -> Iterator[tuple[int, int, int, list[int]]]:
        """For each array its number, where its elements lie and how many bytes they are, and its shape."""
        begin, length = starts[self.which] + self.size, lengths[self.which] - self.size
        return zip(self.which.tolist(), begin.tolist(), length.tolist(), self.shapes.tolist(), strict=True)


def headers(
    data: Data, starts: Int64, lengths: Int64, dtype: str | None, where: Callable[[int], str]
) -> list[Header]:
    """Read the headers of arrays, and check that their elements fill the rest.

    Args:
        data: uint8, the shard.
        starts: int64 [m], where each array lies, inside the shard.
        lengths: int64 [m], bytes of each.
        dtype: of all; None where each says its own.
        where: names the sample of an array.

    Raises:
        CorruptError: a header is damaged; names the sample.
    """
    size = 1 if dtype else 2
    short = lengths < size
    if short.any():
        raise _damaged("a header", f"{lengths.min()} bytes", where(int(np.argmax(short))))
    codes = rows_at(data, starts, size).astype(np.int64)
    codes = codes[:, 0] if dtype else codes[:, 0] << 8 | codes[:, 1]
    return [
        _header(data, starts, lengths, np.flatnonzero(codes == code), code, dtype, where)
        for code in np.unique(codes).tolist()
    ]


def _header(
    data: Data,
    starts: Int64,
    lengths: Int64,
    which: Int64,
    code: int,
    dtype: str | None,
    where: Callable[[int], str],
) -> Header:
    found = dtype or DTYPES.get(code >> 8)
    ndim, width = (code & 0xFF) >> 2, 1 << (code & 3)
    first = 1 if dtype else 2
    size = first + ndim * width
    if found is None or ndim == 0:
        raise _damaged("a type and a shape", f"code {code:#x}", where(int(which[0])))
    short = lengths[which] < size
    if short.any():
        raise _damaged(f"{size} bytes of header", "less", where(int(which[np.argmax(short)])))
    raw = rows_at(data, starts[which] + first, ndim * width).view(f"<u{width}")
    elements = (lengths[which] - size) // np.dtype(found).itemsize
    # As floats, since a product of damaged numbers overflows; numbers that can be right are exact.
    wrong = raw.astype(np.float64).prod(1) * np.dtype(found).itemsize != lengths[which] - size
    wrong |= (raw == 0).any(1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise _damaged(f"{elements[row]} elements", f"shape {raw[row].tolist()}", where(int(which[row])))
    return Header(which, found, size, raw.astype(np.int64))


def _damaged(expected: object, found: object, where: str) -> CorruptError:
    remedy = "fetch the shard anew, or write the data set again"
    return CorruptError("an array is damaged", expected=expected, found=found, where=where, remedy=remedy)
