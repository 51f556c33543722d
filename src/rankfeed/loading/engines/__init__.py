"""Engines build the batches of a schedule: in the calling thread, in threads, or in processes."""

from collections.abc import Iterator
from typing import Literal, Protocol

from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.loading.engines.process import ProcessEngine
from rankfeed.loading.engines.thread import ThreadEngine
from rankfeed.plan import Schedule

WorkerKind = Literal["thread", "process"]


class Engine(Protocol):
    """Builds the batches of a schedule, ahead of need if it can; their content does not depend on the engine."""

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        """The batches of all steps, in order. Closing the iterator ends the work."""


class InlineEngine:
    """Builds each batch when it is asked for, in the calling thread."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        return (self._builder.build_step(schedule, step) for step in range(len(schedule)))


def make_engine(builder: BatchBuilder, worker_kind: WorkerKind, num_workers: int, prefetch_factor: int) -> Engine:
    """The engine for the options of a loader."""
    if num_workers == 0:
        return InlineEngine(builder)
    kind = ThreadEngine if worker_kind == "thread" else ProcessEngine
    return kind(builder, num_workers, prefetch_factor)
