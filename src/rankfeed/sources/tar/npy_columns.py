"""Columns of `.npy` members, read in place: a batch points at their elements in the mapped shards.

Members begin at multiples of 512 bytes and their elements 128 bytes later, so rows of a column are not rows of one
array. But all rows at the same remainder of the row size are rows of one view, so a batch is split by remainders.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Column, Dense, Field, Ragged, RowSlices, RowTake
from rankfeed.errors import RankfeedError
from rankfeed.sources.npy.header import Header, check_size, read_header
from rankfeed.sources.tar.columns import Members, unlike_others, with_member

Int64 = npt.NDArray[np.int64]

#: Bytes before the elements, unless shapes or field names are long.
_HEAD = 128
_MOST_CACHED_HEADERS = 1 << 14


class NpyColumns:
    """Reads `.npy` members of one extension; ``field`` is dense or ragged."""

    def __init__(self, extension: str, field: Field) -> None:
        self.extension = extension
        self.field = field
        self._headers: dict[bytes, Header] = {}

    def column(self, parts: Sequence[Members]) -> Column | None:
        """A column that points into the shards; None if that is not possible (other byte order, empty rows)."""
        dtype, shape = np.dtype(self.field.dtype), self.field.shape
        item = dtype.itemsize * math.prod(shape)
        if item == 0:
            return None
        rows: list[RowTake] = []
        runs: list[RowSlices] = []
        for part in parts:
            found = self._offsets(part)
            if found is None:
                return None
            begin, lengths = found
            slots_of_part = np.arange(len(begin)) if part.slots is None else part.slots
            remainders = begin % item
            for remainder in np.unique(remainders).tolist() or [0]:
                some = remainders == remainder
                slots = part.slots if some.all() else slots_of_part[some]
                end = remainder + (len(part.shard.data) - remainder) // item * item
                view = part.shard.data[remainder:end].view(dtype).reshape(-1, *shape)
                places = begin[some] // item
                if self.field.kind == "dense":
                    rows.append(RowTake(view, places, slots))
                else:
                    runs.append(RowSlices(view, places, lengths[some], slots))
        return Dense(rows) if self.field.kind == "dense" else Ragged(runs)

    def _offsets(self, part: Members) -> tuple[Int64, Int64] | None:
        """Offset of the elements of each array, and its length along the first dimension."""
        if not len(part.starts):
            return part.starts, part.starts
        if (part.sizes < _HEAD).any():
            return None
        view: Any = part.shard.data.data
        heads = [bytes(view[start : start + _HEAD]) for start in part.starts.tolist()]
        headers = [self._header(part, number, head) for number, head in enumerate(heads)]
        if any((header.fortran and len(header.shape) > 1) or not header.dtype.isnative for header in headers):
            return None
        offsets = np.array([header.offset for header in headers], np.int64)
        lengths = np.array([header.shape[0] if header.shape else 1 for header in headers], np.int64)
        return part.starts + offsets, lengths

    def _header(self, part: Members, number: int, head: bytes) -> Header:
        header = self._headers.get(head)
        try:
            if header is None:
                start, size = int(part.starts[number]), int(part.sizes[number])
                header = read_header(io.BytesIO(part.shard.read(start, min(size, 1 << 20))), "")
                if not header.fits(self.field):
                    where = part.where(number, self.extension)
                    raise unlike_others(self.field, header, where, self.extension)
                if header.offset <= _HEAD and len(self._headers) < _MOST_CACHED_HEADERS:
                    self._headers[head] = header
            check_size(header, int(part.sizes[number]), "")
        except RankfeedError as error:
            raise with_member(error, part.where(number, self.extension)) from error
        return header
