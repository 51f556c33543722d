"""Who makes the batches: the caller itself, or threads; processes have a module of their own.

An engine is asked for the batches of a stretch of steps and yields them in the order of steps. What is in them
does not depend on the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rankfeed._util.threads import DaemonPool
from rankfeed.loading.maker import Made, Maker
from rankfeed.loading.pace import Pace
from rankfeed.plan import Schedule


class Engine(Protocol):
    """Makes the batches of a schedule, ahead of need if it can."""

    def run(self, schedule: Schedule) -> Iterator[Made]:
        """The batches of all steps, in order. Closing the iterator ends the work."""

    def close(self) -> None:
        """Let go of threads and processes."""


class InlineEngine:
    """The caller makes each batch when it asks for it."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker

    def run(self, schedule: Schedule) -> Iterator[Made]:
        return (self.maker.make(schedule, step) for step in range(len(schedule)))

    def close(self) -> None:
        pass


class ThreadEngine:
    """Threads of this process make batches ahead: numpy's copies run while Python waits.

    They do so all together, or one at a time, or leave it to the consumer: what proves fastest (see ``pace``).

    Args:
        num_workers: threads.
        prefetch_factor: batches (or groups of small ones) that each makes ahead.
    """

    def __init__(self, maker: Maker, num_workers: int, prefetch_factor: int) -> None:
        self.maker = maker
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self._pace = Pace(("together", "alone", "inline") if num_workers > 1 else ("together", "inline"))
        #: Batches that a thread makes in one go: several where they are small, since waking it takes some 50 us.
        self._group = 1

    def run(self, schedule: Schedule) -> Iterator[Made]:
        with closing(_Crew(self, schedule)) as crew:
            step = 0
            while step < len(schedule):
                way, count = self._pace.next()
                steps = range(step, min(step + count, len(schedule)))
                yield from self._timed(
                    crew.inline(steps) if way == "inline" else crew.ahead(steps, way == "alone")
                )
                step = steps.stop

    def _timed(self, batches: Iterator[Made]) -> Iterator[Made]:
        """The batches, while what each took (the consumer's own time included) is noted."""
        means: list[float] = []
        began, count, steps = time.perf_counter(), 0, 0
        for made in batches:
            yield made
            steps += 1
            count += 1
            if count == _TIMED:
                now = time.perf_counter()
                means.append((now - began) / count)
                began, count = now, 0
        self._pace.took(steps, means)

    def close(self) -> None:
        pass


class _Crew:
    """The threads of one iteration."""

    def __init__(self, engine: ThreadEngine, schedule: Schedule) -> None:
        self._engine = engine
        self._schedule = schedule
        self._pool = DaemonPool(engine.num_workers, "rankfeed")
        # Of this iteration: a process forked while a thread of another holds it would never get it.
        self._lock = threading.Lock()

    def inline(self, steps: range) -> Iterator[Made]:
        return (self._engine.maker.make(self._schedule, step) for step in steps)

    def ahead(self, steps: range, alone: bool) -> Iterator[Made]:
        engine = self._engine
        waiting: deque[Future[_Group]] = deque()
        step = steps.start
        while waiting or step < steps.stop:
            while step < steps.stop and len(waiting) <= engine.num_workers * engine.prefetch_factor:
                group = range(step, min(step + engine._group, steps.stop))
                waiting.append(self._pool.submit(self._make, group, alone))
                step = group.stop
            done = waiting.popleft().result()
            yield from done.made
            if done.error is not None:
                raise done.error
            engine._group = max(1, min(_LARGEST_GROUP, round(_GROUP_SECONDS / done.seconds_each)))

    def _make(self, steps: range, alone: bool) -> _Group:
        made: list[Made] = []
        with self._lock if alone else nullcontext():
            began = time.perf_counter()
            try:
                for step in steps:
                    if self._pool.stopped:
                        raise CancelledError
                    made.append(self._engine.maker.make(self._schedule, step))
            except Exception as error:
                return _Group(made, 1.0, error)  # the batches before it are good, and are delivered first
            return _Group(made, max(1e-9, (time.perf_counter() - began) / len(made)))

    def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True)
class _Group:
    made: list[Made]
    seconds_each: float
    error: Exception | None = None


_GROUP_SECONDS = 1e-3
_LARGEST_GROUP = 4
#: Steps whose mean is one measurement.
_TIMED = 16
