"""Looks up the rows of several steps at once, in sources that only point at them.

Finding the rows of a batch takes a dozen numpy calls for each file. Thousands of rows take hardly more, so the
rows of many steps are looked up together, and each step copies its own. What was looked up keeps its files open.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.handle_cache import open_file_limit
from rankfeed.columns.columns import Columns
from rankfeed.plan import Schedule
from rankfeed.sources import Source

Int64 = npt.NDArray[np.int64]

#: Rows looked up at once, after some smaller groups: the first batch must not wait for them.
_MAX_ROWS = 16384
#: Groups kept: threads that build steps in parallel reach the next group one after another.
_GROUPS = 2


class RowLookup:
    """The rows of each step of a schedule.

    Args:
        source: its ``reads_in_place`` is True.
        columns: names of the columns to read; None for all.
        stride: the steps ``step``, ``step + stride``, ... are built by this process.
    """

    def __init__(self, source: Source, columns: Sequence[str] | None, stride: int) -> None:
        self._source, self._columns, self._stride = source, columns, stride
        self._groups: tuple[tuple[Schedule, dict[int, tuple[int, int]], Int64, Columns], ...] = ()
        self._next_steps = 1

    def rows(self, schedule: Schedule, step: int) -> tuple[Int64, Columns]:
        """Sample ids and rows of this rank at a step."""
        self._source.check_unchanged(at_intervals=True)
        for of, places, ids, rows in self._groups:
            if of is schedule and (place := places.get(step)) is not None:
                return ids[slice(*place)].copy(), rows.slice(*place)
        steps = range(step, min(step + self._next_steps * self._stride, len(schedule)), self._stride)
        batches = [schedule.batch(each) for each in steps]
        ids = np.concatenate(batches)
        try:
            rows = self._source.fetch(ids, self._columns)
        except Exception:  # perhaps of a later step, which raises it when it is its turn
            self._groups, self._next_steps = (), 1
            return batches[0], self._source.fetch(batches[0], self._columns)
        ends = np.cumsum([len(each) for each in batches]).tolist()
        places = dict(zip(steps, zip([0, *ends], ends, strict=False), strict=True))
        self._groups = ((schedule, places, ids, rows), *self._groups[: _GROUPS - 1])  # one assignment: no lock
        most = min(_MAX_ROWS / len(ids), open_file_limit() / _GROUPS / max(1, rows.num_files))
        self._next_steps = max(1, int(len(steps) * min(2.0, most)))
        return batches[0], rows.slice(*places[step])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": (), "_next_steps": 1}
