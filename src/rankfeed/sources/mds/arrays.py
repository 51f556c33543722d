"""Headers of arrays in MDS shards, read for a whole batch at once.

A value is: a byte for the dtype if the column has none; a byte with the number of dimensions (times four) and the
width of their sizes (0 to 3: 1, 2, 4 or 8 bytes); these sizes; the elements.
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

#: Code -> dtype.
DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@dataclass(frozen=True)
class ArrayHeaders:
    """Arrays whose headers start with the same bytes.

    Args:
        which: int64 [m], positions among the requested arrays.
        dtype: of their elements.
        size: of each header, in bytes.
        shapes: int64 [m, dimensions].
    """

    which: Int64
    dtype: str
    size: int
    shapes: Int64

    def rows(self, starts: Int64, lengths: Int64) -> Iterator[tuple[int, int, int, list[int]]]:
        """For each array: its position, start and length of its elements in bytes, and its shape."""
        begin, length = starts[self.which] + self.size, lengths[self.which] - self.size
        return zip(self.which.tolist(), begin.tolist(), length.tolist(), self.shapes.tolist(), strict=True)


def read_headers(
    data: Data, starts: Int64, lengths: Int64, dtype: str | None, where: Callable[[int], str]
) -> list[ArrayHeaders]:
    """Read headers of arrays, and check that the elements fill the rest.

    Args:
        data: uint8, the shard.
        starts: int64 [m], start of each array, inside the shard.
        lengths: int64 [m], bytes of each.
        dtype: of all; None if each has its own.
        where: names the sample of an array.
    """
    first = 1 if dtype else 2

    def check(bad: npt.NDArray[np.bool_], which: Int64, expected: str, found: Callable[[int], object]) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise CorruptError(
                "an array is damaged",
                expected=expected,
                found=found(row),
                where=where(int(which[row])),
                remedy="fetch the shard again, or write the dataset again",
            )

    check(lengths < first, np.arange(len(lengths)), "a header", lambda row: f"{lengths[row]} bytes")
    raw = rows_at(data, starts, first).astype(np.int64)
    codes = raw[:, 0] if dtype else raw[:, 0] << 8 | raw[:, 1]
    headers = []
    for code in np.unique(codes).tolist():
        which = np.flatnonzero(codes == code)
        found = dtype or DTYPES.get(code >> 8)
        ndim, width = (code & 0xFF) >> 2, 1 << (code & 3)
        size = first + ndim * width
        if found is None or ndim == 0:
            check(np.ones(1, np.bool_), which, "a dtype and a shape", lambda _, code=code: f"code {code:#x}")  # type: ignore[misc]
        check(lengths[which] < size, which, f"{size} bytes of header", lambda _: "less")
        itemsize = np.dtype(found).itemsize
        shapes = rows_at(data, starts[which] + first, ndim * width).view(f"<u{width}")
        # As floats: a product of damaged sizes overflows, and valid ones are exact.
        wrong = shapes.astype(np.float64).prod(1) * itemsize != lengths[which] - size
        wrong |= (shapes == 0).any(1)
        check(
            wrong,
            which,
            "as many elements as the value has bytes for",
            lambda row, shapes=shapes: f"shape {shapes[row].tolist()}",  # type: ignore[misc]
        )
        headers.append(ArrayHeaders(which, str(found), size, shapes.astype(np.int64)))
    return headers
