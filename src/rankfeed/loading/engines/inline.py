"""The interface of engines, and the engine that builds each batch when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.plan import Schedule


class Engine(Protocol):
    """Builds the batches of a schedule, ahead of need if it can; their content does not depend on the engine."""

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        """The batches of all steps, in order. Closing the iterator ends the work."""


class InlineEngine:
    """Builds each batch when it is asked for, in the calling thread."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        """The batches of all steps."""
        return (self._builder.build_step(schedule, step) for step in range(len(schedule)))
