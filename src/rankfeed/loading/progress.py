"""Progress of a loader: which epoch, how far in it, and which iteration advances it."""

from __future__ import annotations

from rankfeed._util.validate import check_int
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
