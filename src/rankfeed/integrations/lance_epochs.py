"""Which epoch an iteration is, where only worker processes see it begin.

torch's DataLoader tells an iterable data set nothing: not that an epoch has begun, not which. Its workers are new
processes at each epoch, or the same ones again, and the object in the parent is never touched. So the workers
of a rank write down in a file without a name, which all of them have open, that they begin; the first decides.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from rankfeed.topology import Topology

#: Rank, the iteration's key (two numbers), epoch.
_RECORD = struct.Struct("<qqqq")
#: Instead of a rank: from here on it is this epoch, for all.
_SET = -1


class Epochs:
    """Counts the iterations that were begun, over all processes that this travels to from here.

    It travels by fork and to child processes that multiprocessing starts; pickled otherwise, it counts anew.

    Args:
        first: the epoch that begins first.

    Examples:
        >>> epochs = Epochs()
        >>> epochs.begin(rank=0), epochs.begin(rank=0), epochs.begin(rank=1)
        (0, 1, 0)
        >>> epochs.set(5)
        >>> epochs.begin(rank=0), epochs.next(rank=0)
        (5, 6)
    """

    def __init__(self, first: int = 0) -> None:
        self._file = _nameless_file()
        self._lock = threading.Lock()
        self._begun = (os.getpid(), 0)
        if first:
            self.set(first)

    def begin(self, rank: int) -> int:
        """The epoch of the iteration that begins here and now.

        All workers of a rank get the same answer, and in the next iteration the next one, also where an iteration
        was left before all of its workers had begun.
        """
        pid, begun = self._begun
        begun = begun if pid == os.getpid() else 0
        self._begun = (os.getpid(), begun + 1)
        key = _iteration(), begun
        with self._locked():
            epoch, known = 0, None
            for other, *its_key, its_epoch in self._records():
                if other == _SET:
                    epoch, known = its_epoch, None
                elif other == rank:
                    epoch = its_epoch + 1
                    known = its_epoch if tuple(its_key) == key else known
            if known is None:
                self._append(rank, *key, epoch)
            return epoch if known is None else known

    def next(self, rank: int | None = None) -> int:
        """The epoch that the next iteration of a rank will be; of any, where none is given."""
        epoch = 0
        with self._locked():
            for other, *_, its_epoch in self._records():
                if other == _SET:
                    epoch = its_epoch
                elif rank in (None, other):
                    epoch = its_epoch + 1
        return epoch

    def set(self, epoch: int) -> None:
        """Have the next iteration be this epoch; workers that live on hear of it too."""
        with self._locked():
            self._append(_SET, 0, 0, epoch)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _records(self) -> Iterator[tuple[int, ...]]:
        return _RECORD.iter_unpack(os.pread(self._file.fileno(), self._size(), 0))

    def _append(self, *record: int) -> None:
        os.pwrite(self._file.fileno(), _RECORD.pack(*record), self._size())

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return {"next": self.next()}
        return {"file": reduction.DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" not in state:
            self.__init__(state["next"])  # type: ignore[misc]
            return
        self._file = FileIO(state["file"].detach(), "r+")
        self._lock = threading.Lock()
        self._begun = (os.getpid(), 0)


def _iteration() -> int:
    """What workers of one iteration have in common, and no others: the seed that the DataLoader draws for it.

    A process that is no worker has only itself. (Workers that live on keep their seed: they count besides. Where a
    script sets the same seed before each epoch, new workers look like the last ones, unless the epoch is set too.)
    """
    worker, _ = Topology.worker()
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return -os.getpid() if info is None else int(info.seed) - worker


def _nameless_file() -> FileIO:
    if hasattr(os, "memfd_create"):
        return FileIO(os.memfd_create("rankfeed-epochs"), "r+")
    with tempfile.TemporaryFile() as file:
        return FileIO(os.dup(file.fileno()), "r+")
