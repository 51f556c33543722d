"""The progress of a loader through its epochs, and the iteration of one epoch that advances it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rankfeed._util.signals import remember_handlers, reraise_interrupt
from rankfeed._util.validate import check_int
from rankfeed.errors import RankfeedError, describe_error
from rankfeed.loading.device import to_device
from rankfeed.loading.map_feed import MapFeed
from rankfeed.loading.stats import LoaderStats
from rankfeed.plan import Cursor

if TYPE_CHECKING:
    from rankfeed.loading.streams.feed import StreamFeed


class EpochProgress:
    """A position in the data that the latest iteration advances."""

    def __init__(self) -> None:
        #: Where the current epoch was begun: its start, or a loaded position.
        self.begun = Cursor()
        #: After the last delivered batch, and before it: there is a consumer that reads one batch ahead.
        self.cursor = self.previous = Cursor()
        self.generation = 0  # number of the latest iteration; only that one advances the progress
        #: Whether nothing has chosen the start yet: no iteration, no loaded state, no `set_epoch`.
        self.is_new = True
        #: Whether the latest iteration has been asked for its first batch.
        self.started = True
        #: Whether `begun` was loaded within an epoch, and neither named by `set_epoch` nor read from: if it is the
        #: end of its epoch, the next iteration is of the next epoch.
        self.is_loaded = False
        #: Whether the last batch of the epoch has been delivered; a loop that counts does not ask for another one.
        self.is_complete = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; in the current one a loaded position is kept, even that of its end."""
        epoch = check_int("epoch", epoch, at_least=0)
        self.is_new = self.is_loaded = False
        if epoch != self.cursor.epoch or self.is_complete:
            self.go_to(Cursor(epoch))

    def go_to(self, cursor: Cursor) -> None:
        """Continue somewhere else; an iteration that has started no longer advances the progress."""
        # One that has not started yet moves along: frameworks call `iter` before `set_epoch`.
        self.begun = self.cursor = self.previous = cursor
        self.is_new = self.is_loaded = self.is_complete = False
        if self.started:
            self.generation += 1

    def load(self, cursor: Cursor) -> None:
        """Continue at the position of a state."""
        self.go_to(cursor)
        self.is_loaded = cursor.position > 0

    def after_loading(self, cursor: Cursor, is_end: Callable[[Cursor], bool]) -> Cursor:
        """A current position; instead of a loaded one at the end of its epoch, the start of the next epoch."""
        return cursor.next_epoch() if self.is_loaded and is_end(cursor) else cursor

    def skip_ended_epoch(self) -> Cursor:
        """Let the latest iteration begin the next epoch, since the loaded position is the end of its epoch."""
        self.begun = self.cursor = self.previous = self.begun.next_epoch()
        self.is_loaded = False
        return self.begun

    def restart(self) -> None:
        """Go to the next epoch, or to the start of this one if it was left before its end."""
        if self.is_complete:
            self.go_to(self.cursor.next_epoch())
        elif self.cursor != self.begun:
            self.go_to(Cursor(self.cursor.epoch))

    def new_iteration(self) -> int:
        """The generation of a new iteration."""
        self.is_new = False
        self.restart()
        self.generation += 1
        self.started = False
        return self.generation


class EpochIterator:
    """The batches of one iteration. After an error it ends with an error too, not as a complete epoch does."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self._failure = batches, ""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure:
            raise RankfeedError(
                "this iterator of a Loader has failed before, and has no more batches",
                found=self._failure,
                remedy="to continue with the step that failed: loader.load_state_dict(loader.state_dict()), then "
                "iter(loader); to begin the epoch again: iter(loader)",
            )
        try:
            for batch in self._batches:  # unlike a call of next, it lets no signal handler run after the batch
                return batch
        except BaseException as error:
            self._failure = describe_error(error)
            raise
        raise StopIteration


def iterate_epoch(
    feed: MapFeed | StreamFeed, progress: EpochProgress, stats: LoaderStats, device: torch.device | None
) -> Iterator[Any]:
    """A new iteration, which delivers batches and advances the progress as long as it is the latest one."""
    remember_handlers()
    generation, begun = progress.new_iteration(), progress.begun
    feed.steps_left(begun)  # raises here if there are fewer samples than ranks

    # Holds no reference to the loader: an iterator that is abandoned is freed at once, and its workers with it.
    def batches(begun: Cursor) -> Iterator[Any]:
        is_latest = progress.generation == generation
        if is_latest:
            progress.started = True
            begun = progress.begun
            if progress.is_loaded and feed.is_end(begun):
                begun = progress.skip_ended_epoch()
        steps = feed.steps_left(begun)
        if is_latest:
            stats.begin(begun, steps)
        results = feed.run(begun)
        while True:
            stats.request()
            try:
                result, cursor = next(results)
                built = time.perf_counter()
                batch = result.batch if device is None else to_device(result.batch, device)
            except StopIteration:
                if progress.generation == generation:
                    if progress.is_loaded:  # at the end of a stream, which only reading it shows
                        begun = progress.skip_ended_epoch()
                        stats.begin(begun, steps)
                        results = feed.run(begun)
                        continue
                    ended = progress.cursor
                    progress.go_to(ended.next_epoch())
                    progress.previous = ended
                return
            except Exception as error:
                reraise_interrupt(error)
                raise
            finally:
                stats.answer()
            stats.deliver(result, time.perf_counter() - built)
            if progress.generation == generation:
                progress.previous, progress.cursor = progress.cursor, cursor
                progress.is_loaded, progress.is_complete = False, result.step + 1 == steps
            if result.step + 1 == steps:
                # A framework that counts steps (Lightning) does not ask once more: free the workers and audit now.
                next(results, None)
            del result
            yield batch
            del batch

    return EpochIterator(batches(begun))
