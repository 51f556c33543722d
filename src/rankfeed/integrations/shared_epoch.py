"""Counts epochs of an iterable dataset, where only the DataLoader's workers see them begin.

torch's DataLoader does not inform an iterable dataset that an epoch begins, or which one. Its workers are new
processes in each epoch, or persistent ones, and the object in the parent is never touched. So the workers of a
rank record in an unnamed file, which all of them have open, that they begin; the first of an iteration decides
which epoch it is.
"""

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

from torch.utils.data import get_worker_info

from rankfeed.plan import Cursor

#: Rank, key of the iteration (two numbers), and where it begins: epoch, position, steps.
_RECORD = struct.Struct("<6q")
#: Instead of a rank: the next iteration of all ranks begins there; or each one from then on.
_NEXT, _EVERY = -1, -2


class SharedEpoch:
    """Where iterations begin, the same in a process and in its DataLoader workers.

    Each iteration begins the next epoch, unless `set` decides. It is shared with processes that are forked from
    here and with DataLoader workers that are spawned. A process that is not a worker, such as a rank that was
    started with a copy, has its own from its first use on.

    Where torch's seed is set to the same number before each epoch, new workers cannot distinguish an iteration
    from the last one: there `set` is needed.
    """

    def __init__(self) -> None:
        self._own(_unnamed_file(b""))

    def _own(self, file: FileIO, owner: int | None = None) -> None:
        self._file = file
        self._owner = owner or os.getpid()
        self._lock = threading.Lock()
        self._begun = 0  # iterations that this process has begun

    def begin(self, rank: int) -> Cursor:
        """Where the iteration that begins now starts; the same for all workers of a rank."""
        self._separate()
        if self._owner != os.getpid():  # a forked worker
            self._own(self._file)
        info = get_worker_info()
        # What workers of one iteration have in common: the seed that the DataLoader draws for it, or the process.
        key = (-os.getpid() if info is None else int(info.seed) - info.id), self._begun
        self._begun += 1
        with self._locked():
            start, running = self._start(rank, key)
            if running is None:
                self._append(rank, *key, start)
            return start if running is None else running

    def next(self, rank: int | None = None) -> Cursor:
        """Where the next iteration of a rank starts; of any rank, if none is given."""
        with self._locked():
            return self._start(rank, None)[0]

    def set(self, cursor: Cursor, *, every: bool = False) -> None:
        """Let the next iteration start there, or every one from now on; persistent workers follow too."""
        self._separate()
        with self._locked():
            self._append(_EVERY if every else _NEXT, 0, 0, cursor)

    @property
    def is_set(self) -> bool:
        with self._locked():
            return any(record[0] < 0 for record in _RECORD.iter_unpack(self._records()))

    @property
    def has_begun(self) -> bool:
        with self._locked():
            return any(record[0] >= 0 for record in _RECORD.iter_unpack(self._records()))

    def _start(self, rank: int | None, key: tuple[int, int] | None) -> tuple[Cursor, Cursor | None]:
        """Where the next iteration of a rank starts, and where the one with this key does, if it has begun."""
        start, running, is_common = Cursor(), None, False
        for record_rank, *its_key, epoch, position, steps in _RECORD.iter_unpack(self._records()):
            if record_rank < 0:
                start, running, is_common = Cursor(epoch, position, steps), None, record_rank == _EVERY
            elif rank in (None, record_rank) and not is_common:
                start = Cursor(epoch + 1)
                if tuple(its_key) == key:
                    running = Cursor(epoch, position, steps)
        return start, running

    def _separate(self) -> None:
        """Leave the file of the process that this one is a copy of, unless this one is its worker."""
        if self._owner != os.getpid() and get_worker_info() is None:
            with self._locked():
                records = self._records()
            self._own(_unnamed_file(records))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _records(self) -> bytes:
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)

    def _append(self, rank: int, key: int, begun: int, at: Cursor) -> None:
        record = _RECORD.pack(rank, key, begun, at.epoch, at.position, at.steps)
        os.pwrite(self._file.fileno(), record, os.fstat(self._file.fileno()).st_size)

    def __getstate__(self) -> dict[str, Any]:
        self._separate()
        if get_spawning_popen() is not None:
            return {"file": reduction.DupFd(self._file.fileno()), "owner": self._owner}
        with self._locked():
            return {"records": self._records()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "file" in state:
            self._own(FileIO(state["file"].detach(), "r+"), state["owner"])
        else:
            self._own(_unnamed_file(state["records"]))


def _unnamed_file(records: bytes) -> FileIO:
    if hasattr(os, "memfd_create"):
        file = FileIO(os.memfd_create("rankfeed-epochs"), "r+")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = FileIO(os.dup(temporary.fileno()), "r+")
    os.pwrite(file.fileno(), records, 0)
    return file
