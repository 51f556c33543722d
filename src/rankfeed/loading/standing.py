"""Where a loader stands: which epoch, how far in it, and which of its iterations moves it."""

from __future__ import annotations

from rankfeed._util.validate import check_int
from rankfeed.plan import Cursor


class Standing:
    """A place in the data that iterations move, one of them at a time.

    Examples:
        >>> class Reader(Standing):
        ...     pass
        >>> reader = Reader()
        >>> reader.set_epoch(3)
        >>> reader.epoch
        3
    """

    def __init__(self) -> None:
        #: Where the epoch in hand was begun (its start, or a loaded place), and where it stands now.
        self._begun = self._cursor = Cursor()
        #: Where it stood before it was last asked for a batch: the place of who reads one ahead.
        self._before = Cursor()
        #: Counts iterations and moves: only the iteration that has the turn moves the loader. A number, not the
        #: iteration itself, so that one that is left early is gone at once, and its workers with it.
        self._turn = 0
        #: Whether the iteration that has the turn has begun to deliver.
        self._under_way = True
        #: Whether nothing has said yet where to begin: no iteration, no loaded state, no `set_epoch`.
        self._is_new = True

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers, or the one in hand."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch: to the start of another one; in the current one a loaded place stays."""
        epoch = check_int("epoch", epoch, at_least=0)
        self._is_new = False
        if epoch != self._cursor.epoch:
            self._go_to(Cursor(epoch))

    def _go_to(self, cursor: Cursor) -> None:
        """Stand somewhere else. An iteration under way goes on, but no longer moves the loader.

        One that has delivered nothing yet comes along: frameworks call ``iter`` first and ``set_epoch`` then.
        """
        self._begun = self._cursor = self._before = cursor
        self._is_new = False
        if self._under_way:
            self._turn += 1

    def _next_turn(self) -> int:
        """The number of an iteration that begins now; the place where it does is that of the epoch in hand."""
        self._is_new = False
        if self._cursor != self._begun:
            self._go_to(Cursor(self._cursor.epoch))
        self._turn += 1
        self._under_way = False
        return self._turn

    def _moved(self, turn: int, position: int) -> None:
        if self._turn == turn:
            self._before, self._cursor = self._cursor, self._cursor.after(position)

    def _exhausted(self, turn: int) -> None:
        if self._turn == turn:
            ended = self._cursor
            self._go_to(ended.next_epoch())
            self._before = ended
