"""Reads and decodes values at arbitrary byte offsets of a mapped file."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankfeed.columns.pointers import Int64, Memory, Place, RowPointers
from rankfeed.errors import CorruptError, MissingExtraError, RankfeedError, describe_error, with_where

Bytes = npt.NDArray[np.uint8]


class ByteSlices(NamedTuple):
    """Slices of a file: ``data[starts[i] : starts[i] + lengths[i]]`` is the value of row ``slots[i]``."""

    memory: Memory
    starts: Int64
    lengths: Int64
    slots: Int64 | None = None  # None for all rows of the batch, in order
    place: Place | None = None

    @property
    def data(self) -> Bytes:
        """The bytes of the file."""
        return self.memory.array

    def pointers(self, width: int = 1) -> RowPointers:
        """The slices as rows of elements of ``width`` bytes; a missing value, of negative length, is empty."""
        return RowPointers.into_bytes(self.memory, self.starts, np.maximum(self.lengths, 0), width, self.place)

    @property
    def positions(self) -> Int64:
        """The rows of the batch that the values are for."""
        return np.arange(len(self.starts)) if self.slots is None else self.slots


def rows_at(data: Bytes, starts: Int64, size: int) -> Bytes:
    """Runs of equal size as rows of bytes: uint8 [m, size]."""
    return data.take(starts[:, None] + np.arange(size), mode="clip")


def decode_each(part: ByteSlices, decode: Callable[[bytes], Any]) -> Iterator[Any]:
    """Decoded values of slices of bytes; None for a negative length. Errors name the value."""
    for row, (start, length) in enumerate(zip(part.starts.tolist(), part.lengths.tolist(), strict=True)):
        try:
            yield None if length < 0 else decode(part.data[start : start + length].tobytes())
        except MissingExtraError:
            raise
        except Exception as error:  # decoders are libraries' and users' functions, and may execute a pickle
            raise undecodable(error, part, row) from error


def undecodable(error: Exception, part: ByteSlices, row: int) -> RankfeedError:
    """The error for a value that cannot be decoded, with its place."""
    if isinstance(error, RankfeedError):
        return with_where(error, place_of(part, row))
    return CorruptError(
        "a value cannot be decoded",
        found=describe_error(error)[:300],
        where=place_of(part, row),
        remedy="fetch the file or write the sample again; or take its bytes with decode=False",
    )


def place_of(part: ByteSlices, row: int) -> str:
    """The name of a row in error messages; "" if it has none."""
    return "" if part.place is None else part.place(row)
