"""Batches of a stream, made ahead: one thread reads, and threads or processes make batches of what it has read.

The stream is open once a rank, whatever the number of workers, and read in its own order: so workers change
nothing, and they see samples only when those are read. Work that should be done in parallel belongs in
``transform``.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from rankfeed._util.threads import DaemonPool
from rankfeed.errors import StreamError, safe_str
from rankfeed.loading.maker import Made, Maker, Share
from rankfeed.loading.processes import Crew, dismiss

_Note = TypeVar("_Note")
Make = Callable[[Share], Made]


def made_now(shares: Iterator[tuple[Share, _Note]], make: Make) -> Iterator[tuple[Made, _Note]]:
    """Each batch when it is asked for."""
    return ((make(share), note) for share, note in shares)


def made_ahead(
    shares: Iterator[tuple[Share, _Note]], reading: DaemonPool, make: Make, threads: int, depth: int
) -> Iterator[tuple[Made, _Note]]:
    """Batches in the order of their shares, up to ``depth`` of them made before they are asked for.

    Args:
        shares: read in order.
        reading: the one thread that reads them.
        make: called by several threads.
        threads: how many.
        depth: batches ahead.
    """
    making = DaemonPool(threads, "rankfeed")

    def one(read: Future[tuple[Share, _Note] | None]) -> tuple[Made, _Note] | None:
        found = read.result()
        return None if found is None else (make(found[0]), found[1])

    waiting: deque[Future[tuple[Made, _Note] | None]] = deque()
    try:
        while True:
            while len(waiting) <= depth:
                waiting.append(making.submit(one, reading.submit(next, shares, None)))
            made = waiting.popleft().result()
            if made is None:
                return
            yield made
    finally:
        making.close()


class ProcessMake:
    """Makes batches in worker processes, each of which gets one share at a time.

    With more than one under way, a worker that sends a large batch and a parent that sends it large samples would
    wait for each other.

    Args:
        maker: sent to each worker.
        rank: of this process.
        count: worker processes; all are started now, while there are few threads.
    """

    def __init__(self, maker: Maker, rank: int, count: int) -> None:
        self._crew = Crew(maker, rank, None, [])
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._owner = os.getpid()
        for index in range(count):
            self._crew.workers.append(self._crew.start())
            self._idle.put(index)

    @property
    def ours(self) -> bool:
        """Whether this process started them, and not one that it was forked from."""
        return self._owner == os.getpid()

    def __call__(self, share: Share) -> Made:
        """The batch of a share; called by as many threads as there are workers."""
        index = self._idle.get()
        try:
            try:
                self._crew.ask(index, share)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise StreamError(
                    "samples of the stream cannot be sent to a worker process",
                    found=f"{type(error).__name__}: {safe_str(error)}",
                    where=share.where,
                    remedy="let the stream yield what pickles, or take worker_kind='thread'",
                ) from error
            return self._crew.receive(index, share)
        finally:
            self._idle.put(index)

    def close(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers, in whatever they are doing; at exit multiprocessing has ended them already."""
        if exiting() or self._crew.closed or not self.ours:
            return
        self._crew.closed = True
        for worker in self._crew.workers:
            worker.process.kill()
        taken = [self._idle.get() for _ in self._crew.workers]  # whoever waited for a batch has an error now
        dismiss(self._crew.workers)
        for index in taken:
            self._idle.put(index)

    def __del__(self) -> None:
        self.close()
