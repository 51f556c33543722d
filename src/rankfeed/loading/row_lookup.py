"""Looks up the rows of several steps at once, in sources that only point at them.

Finding the rows of a batch takes a dozen numpy calls for each file. Thousands of rows take hardly more, so the
rows of many steps are looked up together, and each step copies its own. What was looked up keeps its files open.

Where a copy waited for a disk, the kernel is told of the rows of the next steps, so that it reads them meanwhile.
Not of data in its cache: that takes as long as the copy of a small row.
"""

import resource
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
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
#: Bytes of later steps that are read ahead, at most, and for how many steps after one that waited.
_AHEAD_BYTES, _AHEAD_STEPS = 64 << 20, 256


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
        self._lock, self._thread = threading.Lock(), threading.local()
        self._cold_until = 0
        #: Steps of this schedule that were announced, and their bytes.
        self._announced: tuple[Schedule | None, deque[tuple[int, int]]] = None, deque()

    def rows(self, schedule: Schedule, step: int) -> tuple[Int64, Columns]:
        """Sample ids and rows of this rank at a step."""
        self._source.check_unchanged(at_intervals=True)
        found = self._find(schedule, step)
        faults = _major_faults()
        if faults > getattr(self._thread, "faults", faults):
            self._cold_until = step + _AHEAD_STEPS * self._stride
        self._thread.faults = faults
        # One thread does it for all.
        if step < self._cold_until and self._lock.acquire(blocking=False):
            try:
                self._read_ahead(schedule, step)
            finally:
                self._lock.release()
        return found

    def _read_ahead(self, schedule: Schedule, step: int) -> None:
        """Announce the rows of later steps to the kernel, as far as they fit into the budget."""
        of, announced = self._announced
        if of is not schedule:
            announced = deque()
            self._announced = schedule, announced
        while announced and announced[0][0] <= step:
            announced.popleft()
        ahead = sum(nbytes for _, nbytes in announced)
        later = (announced[-1][0] if announced else step) + self._stride
        with suppress(Exception):  # which the step raises when it is its turn
            while ahead < _AHEAD_BYTES and later < len(schedule) and self._may_find(schedule, step, later):
                _, rows = self._find(schedule, later)
                rows.advise()
                announced.append((later, rows.nbytes))
                ahead, later = ahead + rows.nbytes, later + self._stride

    def _may_find(self, schedule: Schedule, step: int, later: int) -> bool:
        """Whether a later step was looked up, or can be without losing the group of this one."""
        groups = [places for of, places, _, _ in self._groups if of is schedule]
        return any(later in places for places in groups) or (bool(groups) and step in groups[0])

    def _find(self, schedule: Schedule, step: int) -> tuple[Int64, Columns]:
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

    def __reduce__(self) -> tuple[Any, ...]:
        return RowLookup, (self._source, self._columns, self._stride)


def _major_faults() -> int:
    """How often this thread waited until a page was read from a file."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_majflt
