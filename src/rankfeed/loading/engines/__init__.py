"""Engines build the batches of a schedule: in the calling thread, in threads, or in processes."""

from typing import Literal

from rankfeed.loading.batch_builder import BatchBuilder
from rankfeed.loading.engines.inline import Engine, InlineEngine
from rankfeed.loading.engines.process import ProcessEngine
from rankfeed.loading.engines.thread import ThreadEngine

WorkerKind = Literal["thread", "process"]

__all__ = ["Engine", "InlineEngine", "ProcessEngine", "ThreadEngine", "WorkerKind", "make_engine"]


def make_engine(builder: BatchBuilder, worker_kind: WorkerKind, num_workers: int, prefetch_factor: int) -> Engine:
    """The engine for the options of a loader."""
    if num_workers == 0:
        return InlineEngine(builder)
    kind = ThreadEngine if worker_kind == "thread" else ProcessEngine
    return kind(builder, num_workers, prefetch_factor)
