"""Which epoch a pass over a stream is, where workers begin the passes and their parent sets the epochs."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from typing import Any

import torch

from rankfeed.plan import Cursor
from rankfeed.topology import Topology

_TOLD, _EPOCH, _POSITION, _STEPS, _PARENT = range(5)


class Passes:
    """The place that the next pass begins at, the same in a process and in all workers it starts.

    Five integers in memory that the DataLoader's workers share with their parent: a persistent worker was made
    long before ``set_epoch`` is called. It is torch's unnamed shared memory, gone with the last process.

    Workers that are started for each pass cannot count the passes, and workers may not count for each other: of a
    pass that is broken off early, some may never have begun. So nothing is counted once an epoch was set.

    Ranks that were started with a copy (notebooks, ``torch.multiprocessing.spawn``) get memory of their own at the
    first use: one that is ahead must not set the epoch of another's workers.

    Args:
        differ: whether epochs differ at all, so that one read twice is worth a warning.

    Examples:
        >>> passes = Passes(differ=True)
        >>> passes.begin().epoch, passes.begin().epoch
        (0, 1)
        >>> passes.go_to(Cursor(epoch=7))
        >>> passes.begin().epoch, passes.begin().epoch
        (7, 7)
    """

    def __init__(self, differ: bool) -> None:
        self._differ = differ
        self._begun = (0, 0)
        self._owner = os.getpid()
        self._shared = torch.zeros(5, dtype=torch.int64).share_memory_()

    @property
    def told(self) -> bool:
        """Whether somebody set the epoch."""
        return bool(self._shared[_TOLD])

    @property
    def _begun_here(self) -> int:
        """Passes begun in this process: those of its parent are not its own, forked or not."""
        pid, begun = self._begun
        return begun if pid == os.getpid() else 0

    @property
    def next(self) -> Cursor:
        """Where the next pass begins."""
        if not self.told:
            return Cursor(self._begun_here)
        _, epoch, position, steps, _ = self._shared.tolist()
        return Cursor(epoch, position, steps)

    def _own(self) -> None:
        """Leave the memory of the process this one is a copy of, unless this is one of its workers."""
        if self._owner != os.getpid() and torch.utils.data.get_worker_info() is None:
            self._shared = self._shared.clone().share_memory_()
            self._owner = os.getpid()

    def go_to(self, cursor: Cursor) -> None:
        """Begin all passes here from now on."""
        self._own()
        place = [1, cursor.epoch, cursor.position, cursor.steps]
        self._shared[: len(place)] = torch.tensor(place)

    def begin(self) -> Cursor:
        """Begin a pass."""
        self._own()
        begins = self.next
        if not self.told and self._begun_here == 0 and self._differ:
            self._warn_of_repeats()
        self._begun = (os.getpid(), self._begun_here + 1)
        return begins

    def _warn_of_repeats(self) -> None:
        """Say so if an earlier worker of the same parent began the first epoch: this one repeats it."""
        parent = multiprocessing.parent_process()
        if torch.utils.data.get_worker_info() is None or parent is None or Topology.worker()[0]:
            return
        if self._shared[_PARENT] == parent.pid:
            warnings.warn(
                "the DataLoader started new workers, who read epoch 0 again in the same order: call set_epoch() "
                "of the stage before each epoch",
                stacklevel=4,
            )
        self._shared[_PARENT] = parent.pid or 0

    def __getstate__(self) -> dict[str, Any]:
        self._own()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # a copy's memory is its own, and has to be shared anew
