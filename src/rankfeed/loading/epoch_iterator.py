"""One iteration of a loader over what is left of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from rankfeed.loading.batch_builder import BatchResult
from rankfeed.loading.device import to_device
from rankfeed.loading.progress import EpochProgress
from rankfeed.loading.stats import LoaderStats
from rankfeed.plan import Cursor


class EpochFeed(Protocol):
    """The batches of a loader, from a source that is read by sample id or from a stream."""

    def steps_left(self, begun: Cursor) -> int | None:
        """Steps of the epoch from a position on; None for a stream."""

    def run(self, begun: Cursor) -> Iterator[tuple[BatchResult, Cursor]]:
        """The batches from a position on, each with the position after it. Closing the iterator ends the work."""


class EpochIterator:
    """Delivers batches and advances the progress of their loader.

    Args:
        feed: makes the batches.
        progress: advanced by each batch, as long as this is the latest iteration.
        stats: counts the batches and the time waited for them.
        device: where tensors are moved; None to leave them.
    """

    def __init__(
        self, feed: EpochFeed, progress: EpochProgress, stats: LoaderStats, device: torch.device | None
    ) -> None:
        self._feed, self._progress, self._stats, self._device = feed, progress, stats, device
        self._generation = progress.new_iteration()
        self._begun = progress.begun
        self._steps = feed.steps_left(self._begun)
        self._batches: Iterator[tuple[BatchResult, Cursor]] | None = None
        self._over = False

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._batches is None:
            self._batches = self._start()
        self._stats.request()
        try:
            result, cursor = next(self._batches)
            batch = result.batch if self._device is None else to_device(result.batch, self._device)
        except BaseException as error:
            self._over = True
            self._stats.answer()
            if isinstance(error, StopIteration):
                self._progress.finish(self._generation)
            raise
        self._stats.deliver(result)
        self._progress.advance(self._generation, cursor)
        if result.step + 1 == self._steps:
            # A framework that counts steps (Lightning) does not ask once more: free the workers and audit now.
            next(self._batches, None)
        return batch

    def _start(self) -> Iterator[tuple[BatchResult, Cursor]]:
        if self._progress.start(self._generation):
            self._begun = self._progress.begun
            self._steps = self._feed.steps_left(self._begun)
            self._stats.begin(self._begun, self._steps)
        return self._feed.run(self._begun)
