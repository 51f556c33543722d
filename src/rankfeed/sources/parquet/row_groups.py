"""The parts in which the row groups of Parquet files are decoded: large ones are cut, small ones combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rankfeed.errors import CorruptError

_MOST_PARTS = 1 << 20


@dataclass(frozen=True)
class RowGroupPart:
    """Some rows of a row group, or all rows of several."""

    file: int  # number of the file
    group: int  # number of the (first) row group
    first: int  # row, counted from the start of the row group
    rows: int
    step: int  # rows of each part of the row group, except the last
    totals: tuple[int, ...]  # rows of each row group
    before: int  # rows of the file before the row group

    def __str__(self) -> str:
        last = self.group + self.groups - 1
        return f"row group {self.group}" if self.groups == 1 else f"row groups {self.group} to {last}"

    @property
    def groups(self) -> int:
        return len(self.totals)

    def with_next_group(self, rows: int) -> RowGroupPart:
        return replace(self, rows=self.rows + rows, step=self.step + rows, totals=(*self.totals, rows))

    def by_group(self) -> list[RowGroupPart]:
        if self.groups == 1:
            return [self]
        starts = accumulate(self.totals, initial=self.before)
        return [
            RowGroupPart(self.file, self.group + offset, 0, rows, max(1, rows), (rows,), before)
            for offset, (rows, before) in enumerate(zip(self.totals, starts, strict=False))
        ]


def cut_row_groups(
    files: Sequence[tuple[Sequence[int], Sequence[int]]], most_bytes: int, factor: int, path: Callable[[int], str]
) -> list[RowGroupPart]:
    """The parts of all files, given the rows and approximate decoded bytes of the row groups of each.

    Parts have at most about ``most_bytes``, and fewer rows by a ``factor``; with 0, small row groups are combined.
    """
    parts: list[RowGroupPart] = []
    for file, (group_rows, sizes) in enumerate(files):
        before = combined = 0
        for group, (rows, nbytes) in enumerate(zip(group_rows, sizes, strict=True)):
            step = max(1, rows // max(1, -(-nbytes // most_bytes)) // max(1, factor))
            if rows // step > _MOST_PARTS:
                raise CorruptError(
                    "a row group has too many rows",
                    found=f"{rows} rows, {nbytes} bytes",
                    where=f"{path(file)}, row group {group}",
                )
            if group and not factor and combined + nbytes <= most_bytes:
                parts[-1] = parts[-1].with_next_group(rows)
                combined += nbytes
            else:
                parts += [
                    RowGroupPart(file, group, first, min(step, rows - first), step, (rows,), before)
                    for first in range(0, max(rows, 1), step)
                ]
                combined = nbytes
            before += rows
    return parts
