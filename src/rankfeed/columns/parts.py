"""Where the rows of a batch lie: some of one array's, or runs of its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of one array: ``values[rows[i]]`` is row ``slots[i]`` of the batch (``i`` where slots is None).

    Where ``region`` is given, the bytes of ``values`` are better read from there (they are the same).
    """

    values: Array
    rows: Int64
    slots: Int64 | None = None
    region: Readable | None = None


class Runs(NamedTuple):
    """Runs of one array: ``values[starts[i] : starts[i] + lengths[i]]`` is row ``slots[i]`` of the batch.

    Where ``region`` is given, as with :class:`Rows`. ``place(i)`` tells where such a row lies, for errors.
    """

    values: Array
    starts: Int64
    lengths: Int64
    slots: Int64 | None = None
    region: Readable | None = None
    place: Callable[[int], str] | None = None


class Readable(Protocol):
    """A stretch of a file: bytes at an offset in it, as a new object or into a buffer."""

    def read(self, size: int, offset: int) -> bytes: ...
    def read_into(self, view: memoryview, offset: int) -> None: ...


def read_runs(region: Readable, size: int, starts: Int64, lengths: Int64, out: Array, targets: Int64) -> None:
    """Read runs of elements of ``size`` bytes to where they are wanted."""
    view = out.reshape(-1).view(np.uint8).data
    places = ((each * size).tolist() for each in (starts, lengths, targets))
    for start, length, target in zip(*places, strict=True):
        region.read_into(view[target : target + length], start)


def slots_of(part: Rows | Runs) -> Int64:
    """Which rows of the batch a part has."""
    count = len(part.rows if isinstance(part, Rows) else part.starts)
    return np.arange(count) if part.slots is None else part.slots
