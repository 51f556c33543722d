"""Groups the rows of a batch by the chunk (shard, file, row group) that they are in."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rankfeed._util.native import address_of, native_library
from rankfeed.columns.pointers import Int32, Int64

#: Number of a chunk, the rows in it, and their positions in the batch (None for all, in order).
Group = tuple[int, Int64, Int64 | None]


class ChunkGroups(Sequence[Group]):
    """The rows of a batch grouped by chunk; they are sorted when a group is first asked for."""

    def __init__(self, numbers: list[int], rows: Int64, part: Int32 | None) -> None:
        self.numbers = numbers  # of the chunks, ascending
        self.rows = rows  # int64 [rows], each row within its chunk, in the order of the batch
        self.part = part  # int32 [rows], the position in `numbers` of each row's chunk; None if there is one

    @cached_property
    def _groups(self) -> list[Group]:
        if self.part is None:
            return [(self.numbers[0], self.rows, None)]
        # numpy sorts uint16 with a radix sort.
        order = self.part.astype(np.uint16 if len(self.numbers) < 2**16 else np.int32).argsort(kind="stable")
        ends = np.cumsum(np.bincount(self.part, minlength=len(self.numbers))).tolist()
        rows, places = self.rows[order], zip([0, *ends], ends, strict=False)
        return [(chunk, rows[a:b], order[a:b]) for chunk, (a, b) in zip(self.numbers, places, strict=True)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self._groups[index]


def by_chunk(ids: Int64, starts: Int64) -> ChunkGroups:
    """Group sample ids by the chunk that contains them.

    Args:
        ids: int64 [rows].
        starts: int64 [chunks + 1], the first id of each chunk, and the number of ids.

    Returns:
        for each chunk: its number, the rows in it, and their positions in ``ids`` (None for all). For no ids, no
        rows of the first chunk that is not empty.

    Examples:
        >>> list(by_chunk(np.array([5, 0, 4]), np.array([0, 2, 6])))
        [(0, array([0]), array([1])), (1, array([3, 2]), array([0, 2]))]
        >>> list(by_chunk(np.array([], int), np.array([0, 0, 2, 6])))
        [(1, array([], dtype=int64), None)]
    """
    if len(starts) == 2:
        return ChunkGroups([0], ids, None)
    chunk, rows = _find_chunks(ids, starts)
    if not len(ids) or (chunk == chunk[0]).all():
        only = int(chunk[0] if len(ids) else np.argmax(starts[1:] > 0))
        return ChunkGroups([only], rows, None)
    if len(starts) > 8 * len(ids):
        distinct, part = np.unique(chunk, return_inverse=True)
        return ChunkGroups(distinct.tolist(), rows, part.astype(np.int32))
    used = np.bincount(chunk, minlength=len(starts)) > 0  # no sort
    numbers = np.flatnonzero(used)
    if numbers[-1] >= len(numbers):  # some chunk before it has no row
        chunk = (np.cumsum(used) - 1)[chunk].astype(np.int32)
    return ChunkGroups(numbers.tolist(), rows, chunk)


def _find_chunks(ids: Int64, starts: Int64) -> tuple[Int32, Int64]:
    """For each id the chunk that contains it, and the row in that."""
    library = native_library()
    if library is None:
        chunk = starts[1:-1].searchsorted(ids, side="right").astype(np.int32)
        return chunk, ids - starts[chunk]
    ids, starts = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(starts, np.int64)
    chunk, rows = np.empty(len(ids), np.int32), np.empty_like(ids)
    outputs = address_of(chunk), address_of(rows)
    library.rankfeed_find_chunks(address_of(ids), len(ids), address_of(starts), len(starts) - 1, *outputs)
    return chunk, rows
