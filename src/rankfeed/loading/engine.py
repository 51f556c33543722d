"""Who makes the batches: the caller itself, or threads; processes have a module of their own.

An engine is asked for the batches of a stretch of steps and yields them in the order of steps. What is in them
does not depend on the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from rankfeed.loading.maker import Made, Maker
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

    Waking a thread costs some 50 us, and of a batch that takes little longer most is Python. So small batches are
    made a few at a time, by one thread after the other: two at once would only fight for Python's lock.

    Args:
        num_workers: threads.
        prefetch_factor: batches (or groups of small ones) that each makes ahead.
    """

    def __init__(self, maker: Maker, num_workers: int, prefetch_factor: int) -> None:
        self.maker = maker
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self._group = 1

    def run(self, schedule: Schedule) -> Iterator[Made]:
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="rankfeed")
        waiting: deque[Future[_Group]] = deque()
        # Of this iteration alone: a process forked while a thread holds it would never get it.
        alone = threading.Lock()
        step = 0
        try:
            while waiting or step < len(schedule):
                while step < len(schedule) and len(waiting) <= self.num_workers * self.prefetch_factor:
                    steps = range(step, min(step + self._group, len(schedule)))
                    waiting.append(pool.submit(self._make, schedule, steps, alone))
                    step = steps.stop
                group = waiting.popleft().result()
                yield from group.made
                if group.error is not None:
                    raise group.error
                self._group = max(1, min(_LARGEST_GROUP, round(_GROUP_SECONDS / group.seconds_each)))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, schedule: Schedule, steps: range, alone: threading.Lock) -> _Group:
        made: list[Made] = []
        try:
            with alone if len(steps) > 1 else nullcontext():
                began = time.perf_counter()
                for step in steps:
                    made.append(self.maker.make(schedule, step))
        except Exception as error:
            # The batches before it are good, and are delivered first.
            return _Group(made, 1.0, error)
        return _Group(made, max(1e-9, (time.perf_counter() - began) / len(made)))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _Group:
    made: list[Made]
    seconds_each: float
    error: Exception | None = None


_GROUP_SECONDS = 8e-4
_LARGEST_GROUP = 4
