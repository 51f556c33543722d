"""The progress of a loader through its epochs, and the iterator over one epoch that advances it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from rankfeed._util.validate import check_int
from rankfeed.loading.batch_builder import BatchResult
from rankfeed.loading.device import to_device
from rankfeed.loading.stats import LoaderStats
from rankfeed.plan import Cursor


class EpochProgress:
    """A position in the data that the latest iteration advances.

    Attributes:
        begun: where the current epoch was begun: its start, or a loaded position.
        cursor: the position after the last delivered batch.
        previous: the position before it; where a consumer is that reads one batch ahead.
        generation: number of the latest iteration; only that one advances the progress. A number instead of a
            reference, so that an abandoned iterator is freed at once, and its workers with it.
        is_new: whether nothing has chosen the start yet: no iteration, no loaded state, no `set_epoch`.

    Examples:
        >>> progress = EpochProgress()
        >>> progress.set_epoch(3)
        >>> progress.cursor.epoch
        3
    """

    def __init__(self) -> None:
        self.begun = self.cursor = self.previous = Cursor()
        self.generation = 0
        self.is_new = True
        #: Whether the latest iteration has been asked for its first batch.
        self._started = True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; in the current one a loaded position is kept."""
        epoch = check_int("epoch", epoch, at_least=0)
        self.is_new = False
        if epoch != self.cursor.epoch:
            self.go_to(Cursor(epoch))

    def go_to(self, cursor: Cursor) -> None:
        """Continue somewhere else. An iteration that has started goes on, but no longer advances the progress.

        One that has not started yet moves along: frameworks call ``iter`` before ``set_epoch``.
        """
        self.begun = self.cursor = self.previous = cursor
        self.is_new = False
        if self._started:
            self.generation += 1

    def new_iteration(self) -> int:
        """The generation of a new iteration; an epoch that was left before its end begins again."""
        self.is_new = False
        if self.cursor != self.begun:
            self.go_to(Cursor(self.cursor.epoch))
        self.generation += 1
        self._started = False
        return self.generation

    def start(self, generation: int) -> bool:
        """Note that an iteration is asked for its first batch. Returns whether it is the latest one."""
        if self.generation == generation:
            self._started = True
        return self.generation == generation

    def advance(self, generation: int, cursor: Cursor) -> None:
        """Move behind a delivered batch, if the latest iteration delivered it."""
        if self.generation == generation:
            self.previous, self.cursor = self.cursor, cursor

    def finish(self, generation: int) -> None:
        """Move to the next epoch, if the latest iteration is exhausted."""
        if self.generation == generation:
            ended = self.cursor
            self.go_to(ended.next_epoch())
            self.previous = ended


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
