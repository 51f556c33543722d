"""Columns as they lie in a file or in memory: values, and where each row starts in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.column import Bytes, Column, Dense, Objects, Ragged
from rankfeed.columns.field import Field
from rankfeed.columns.parts import Readable, Rows, Runs

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Unreadable:
    """Rows of a column that have no value to give: a null, say. Those beside them are read all the same.

    Args:
        rows: bool [rows], which.
        error: makes what is raised for one of them.
    """

    rows: npt.NDArray[np.bool_]
    error: Callable[[int], Exception]

    def refuse(self, rows: Int64) -> None:
        """Raise for the first of some rows that is one of these."""
        hit = self.rows[rows]
        if hit.any():
            raise self.error(int(rows[np.argmax(hit)]))


@dataclass(frozen=True)
class Stored:
    """A column as it lies in a file, or as it was decoded.

    Args:
        values: dense: [rows, *shape]; ragged: [elements, *shape]; bytes and text: uint8 [bytes]; objects: [rows].
        offsets: int64 [rows + 1], where each row starts; None for dense and objects.
        origin: where they lie, for errors.
        beside: bytes of what objects are decoded from.
        lent: whether the values lie in memory that is held by somebody else, and take none of their own.
        unreadable: rows that cannot be asked for; None where all can, which is the rule.
        index: int [rows], which of the values each row is, where values are shared by rows (a dictionary column);
            values and offsets are then of the dictionary.
        decode: makes objects [m] of the rows int64 [m]; None where the values are there.

    Examples:
        >>> stored = Stored(np.frombuffer(b"abcde", np.uint8), np.array([0, 2, 5]))
        >>> column_of_parts(Field("bytes"), [stored.part(np.array([1, 0]))]).rows()
        [b'cde', b'ab']
    """

    values: Array
    offsets: Int64 | None = None
    origin: str = ""
    beside: int = 0
    lent: bool = False
    unreadable: Unreadable | None = None
    index: npt.NDArray[np.integer[Any]] | None = None
    decode: Callable[[Int64], Array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        values = 0 if self.lent or self.decode is not None else int(self.values.nbytes)
        others = sum(int(each.nbytes) for each in (self.offsets, self.index) if each is not None)
        return values + others + self.beside

    @property
    def rows(self) -> int:
        """How many there are."""
        if self.index is not None:
            return len(self.index)
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def part(self, rows: Int64, slots: Int64 | None = None, region: Readable | None = None) -> Rows | Runs:
        """Some rows, for a column of a batch.

        Args:
            rows: int64 [m], which.
            slots: which rows of the batch they become; None for all, in order.
            region: where their bytes are better read from.

        Raises:
            RankfeedError: one of them is unreadable.
        """
        if self.unreadable is not None:
            self.unreadable.refuse(rows)
        if self.index is not None:
            rows = self.index[rows].astype(np.int64, copy=False)
        if self.decode is not None:
            return Rows(self.decode(rows), np.arange(len(rows)), slots)
        if self.offsets is None:
            return Rows(self.values, rows, slots, region)
        starts = self.offsets[rows]
        place = (lambda row: f"{self.origin}, row {rows[row]}") if self.origin else None
        return Runs(self.values, starts, self.offsets[rows + 1] - starts, slots, region, place)


def column_of_parts(field: Field, parts: Sequence[Any]) -> Column:
    """The column of a batch whose rows lie in these parts (at least one)."""
    if field.kind == "dense":
        return Dense(parts)
    if field.kind == "ragged":
        return Ragged(parts)
    if field.kind == "object":
        return _objects(parts)
    return Bytes(parts, text=field.kind == "str")


def _objects(parts: Sequence[Rows]) -> Objects:
    out: list[Any] = [None] * sum(len(part.rows) for part in parts)
    for part in parts:
        slots = range(len(part.rows)) if part.slots is None else part.slots.tolist()
        for slot, row in zip(slots, part.rows.tolist(), strict=True):
            out[slot] = part.values[row]
    return Objects(out)
