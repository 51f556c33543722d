"""Arrays in tar shards, read in place: a batch points at their elements in the mapped files.

Members lie at multiples of 512 bytes and their elements behind a header of 128, so rows are no array of their own
kind; but all rows at one remainder of the row's size are rows of one view. A batch is cut by remainders.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Column, Dense, Field, Ragged, RowSlices, RowTake
from rankfeed.errors import RankfeedError
from rankfeed.sources.npy.header import Header, check_size, read_header
from rankfeed.sources.tar.columns import Part, blamed, unlike

Int64 = npt.NDArray[np.int64]

#: What numpy writes before the elements, where shapes and names are short.
_HEAD = 128
#: Headers that are kept: one for each length that was met.
_KEPT = 1 << 14


class NpyColumns:
    """Reads `.npy` members of one extension.

    Args:
        extension: of the members.
        field: what they hold: dense or ragged.
    """

    def __init__(self, extension: str, field: Field) -> None:
        self.extension = extension
        self.field = field
        self._headers: dict[bytes, Header] = {}

    def column(self, parts: Sequence[Part]) -> Column | None:
        """A column that points into the shards; None where that cannot be (other byte order, nothing to point at).

        Raises:
            CorruptError, UnsafeError, SourceError: an array is damaged or unlike the others.
        """
        dtype, inner = np.dtype(self.field.dtype), self.field.shape
        item = dtype.itemsize
        for extent in inner:
            item *= extent
        if item == 0:
            return None
        rows: list[RowTake] = []
        runs: list[RowSlices] = []
        for part in parts:
            found = self._offsets(part)
            if found is None:
                return None
            begin, lengths = found
            numbers = np.arange(len(begin)) if part.slots is None else part.slots
            remainders = begin % item
            for remainder in np.unique(remainders).tolist() or [0]:
                some = remainders == remainder
                slots = part.slots if some.all() else numbers[some]
                whole = (len(part.shard.data) - remainder) // item * item
                view = part.shard.data[remainder : remainder + whole].view(dtype).reshape(-1, *inner)
                places = begin[some] // item
                if self.field.kind == "dense":
                    rows.append(RowTake(view, places, slots))
                else:
                    runs.append(RowSlices(view, places, lengths[some], slots))
        return Dense(rows) if self.field.kind == "dense" else Ragged(runs)

    def _offsets(self, part: Part) -> tuple[Int64, Int64] | None:
        """Where the elements of each array begin, and its length along the first dimension."""
        if not len(part.starts):
            return part.starts, part.starts
        if (part.sizes < _HEAD).any():
            return None
        headers = [self._header(part, number, head) for number, head in enumerate(_heads(part))]
        if any((header.fortran and len(header.shape) > 1) or not header.dtype.isnative for header in headers):
            return None
        offsets = np.array([header.offset for header in headers], np.int64)
        lengths = np.array([header.shape[0] if header.shape else 1 for header in headers], np.int64)
        return part.starts + offsets, lengths

    def _header(self, part: Part, number: int, head: bytes) -> Header:
        header = self._headers.get(head)
        try:
            if header is None:
                start, size = int(part.starts[number]), int(part.sizes[number])
                header = read_header(io.BytesIO(part.shard.read(start, min(size, 1 << 20))), "")
                self._check_alike(header, part, number)
                if header.offset <= _HEAD and len(self._headers) < _KEPT:
                    self._headers[head] = header
            check_size(header, int(part.sizes[number]), "")
        except RankfeedError as error:
            raise blamed(error, part.where(number, self.extension)) from error
        return header

    def _check_alike(self, header: Header, part: Part, number: int) -> None:
        field = self.field
        shape = header.shape[1:] if field.kind == "ragged" else header.shape
        same_rank = field.kind != "ragged" or len(header.shape) == len(field.shape) + 1
        if header.dtype.name != field.dtype or shape != field.shape or not same_rank:
            found = f"{header.dtype.name}{list(header.shape)}"
            raise unlike(field, found, part.where(number, self.extension), self.extension)


def _heads(part: Part) -> list[bytes]:
    """The first bytes of each array."""
    view: Any = part.shard.data.data
    return [bytes(view[start : start + _HEAD]) for start in part.starts.tolist()]
