"""Looks up where the rows of the next steps are, several steps at once, and lets the kernel read them ahead.

Finding the rows of a batch takes a dozen numpy calls for each file. Thousands of rows take hardly more, so the
rows of many steps are looked up together, and each step copies its own. What was looked up keeps its files open.

Where a copy waited for a disk, the kernel is told of the rows of the next steps, so that it reads them meanwhile.
Not of data in its cache: that takes as long as the copy of a small row.
"""

import resource
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rankfeed._util.handle_cache import open_file_limit
from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.columns import Columns
from rankfeed.plan import Schedule
from rankfeed.sources import Source
from rankfeed.sources.source import Int64

#: Rows looked up at once, after some smaller groups: the first batch must not wait for them.
_MAX_ROWS = 16384
#: Groups kept: threads that build steps in parallel reach the next group one after another.
_GROUPS = 2
#: Of later steps that are read ahead: bytes in all, and steps that one step announces. After one that waited, so
#: many steps do it.
_AHEAD_BYTES, _ANNOUNCED_STEPS, _COLD_STEPS = 64 << 20, 4, 256


@dataclass
class _ReadAhead:
    """What is read ahead of a schedule: until which step, and the steps that were announced, with their bytes."""

    schedule: Schedule
    until: int = 0
    announced: deque[tuple[int, int]] = field(default_factory=deque)
    nbytes: int = 0  # of these steps


@dataclass
class _Group:
    """Steps that were looked up together: their ids and rows, and where those of each begin and end."""

    schedule: Schedule
    steps: range
    edges: Sequence[int]
    ids: Int64
    rows: Columns

    def take(self, steps: range) -> tuple[Int64, Columns, list[int]]:
        """What `RowLookup.rows` returns."""
        index = self.steps.index(steps[0])
        edges = self.edges[index : index + len(steps) + 1]
        first, last = edges[0], edges[-1]
        return self.ids[first:last], self.rows.slice(first, last), [edge - first for edge in edges[1:]]


class RowLookup:
    """The rows of a schedule's steps ``step``, ``step + stride``, ..., of a source that reads in place."""

    def __init__(self, source: Source, columns: Sequence[str] | None, stride: int) -> None:
        self._source, self._columns, self._stride = source, columns, stride
        self._groups: tuple[_Group, ...] = ()
        self._next_steps = 1
        self._lock, self._faults = threading.Lock(), _major_faults()
        #: Of the schedule that waited last.
        self._ahead: _ReadAhead | None = None

    def rows(self, schedule: Schedule, steps: range) -> tuple[Int64, Columns, list[int]]:
        """Sample ids and rows of this rank at some steps, and where the rows of each step end.

        At least those of the first step; more if they were looked up together.
        """
        self._source.check_unchanged(at_intervals=True)
        result = self._find(schedule, steps)
        faults = _major_faults()
        waited, self._faults = faults > self._faults, faults
        ahead, step = self._ahead, steps[0]
        is_cold = ahead is not None and ahead.schedule is schedule and step < ahead.until
        # One thread does it for all.
        if (waited or is_cold) and self._lock.acquire(blocking=False):
            try:
                if ahead is None or ahead.schedule is not schedule:
                    ahead = self._ahead = _ReadAhead(schedule)
                if waited:
                    ahead.until = step + _COLD_STEPS * self._stride
                self._announce(ahead, step)
            finally:
                self._lock.release()
        return result

    def _announce(self, ahead: _ReadAhead, step: int) -> None:
        """Announce the rows of some later steps to the kernel, as far as they fit into the budget."""
        schedule, announced = ahead.schedule, ahead.announced
        while announced and announced[0][0] <= step:
            ahead.nbytes -= announced.popleft()[1]
        last = announced[-1][0] if announced else step
        end = min(len(schedule), last + _ANNOUNCED_STEPS * self._stride + 1)
        for later in range(last + self._stride, end, self._stride):
            groups = self._groups
            ranges = [group.steps for group in groups if group.schedule is schedule]
            # A later step was looked up, or can be without losing the group of this one.
            may_find = any(later in steps for steps in ranges) or (ranges and step in ranges[0])
            if ahead.nbytes >= _AHEAD_BYTES or not may_find:
                return
            try:
                nbytes = self._find(schedule, range(later, later + 1))[1].advise()
            except Exception as error:  # which the step raises when it is its turn
                reraise_interrupt(error)
                self._groups = groups
                nbytes = 0
            if not nbytes:
                ahead.until = 0
                return
            announced.append((later, nbytes))
            ahead.nbytes += nbytes

    def _find(self, schedule: Schedule, steps: range) -> tuple[Int64, Columns, list[int]]:
        step = steps[0]
        for group in self._groups:
            if group.schedule is schedule and step in group.steps:
                return group.take(steps)
        group_steps = range(step, min(step + self._next_steps * self._stride, len(schedule)), self._stride)
        ids, edges = schedule.batches(group_steps)
        try:
            rows = self._source.fetch(ids, self._columns)
        except Exception as error:  # perhaps of a later step, which raises it when it is its turn
            reraise_interrupt(error)
            self._groups, self._next_steps = (), 1
            ids = ids[: edges[1]]
            return ids, self._source.fetch(ids, self._columns), [len(ids)]
        group = _Group(schedule, group_steps, edges, ids, rows)
        self._groups = group, *self._groups[: _GROUPS - 1]  # one assignment: no lock
        most = min(_MAX_ROWS / len(ids), open_file_limit() / _GROUPS / max(1, rows.num_files))
        self._next_steps = max(1, int(len(group_steps) * min(2.0, most)))
        return group.take(steps)


def _major_faults() -> int:
    """How often a thread of this process waited until a page was read from a file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
