"""What becomes of the watches of a process when it fails, ends or forks."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Protocol

from rankfeed.diagnostics.lockstep import wake as waking
from rankfeed.errors import LockstepError


class Watching(Protocol):
    """What this needs to know of a watch."""

    over: bool
    pid: int

    def fail(self, error: BaseException) -> LockstepError | None:
        """Tell the others of an error; returns what to raise instead."""

    def close(self) -> None:
        """Tell the others that this rank begins no other step."""

    def linger(self) -> None:
        """Wait until the others need this process no more."""

    def stop(self) -> None:
        """End its threads."""

    def is_back(self) -> bool:
        """Whether what is to be raised here has been."""


_watches: list[Watching] = []
_first: list[Watching] = []


def remember(watch: Watching) -> None:
    """Tell the others by it when this process fails or ends."""
    if not isinstance(sys.excepthook, _Report):
        sys.excepthook = _Report(sys.excepthook)
    if not _watches:
        atexit.register(_leave)
        if multiprocessing.parent_process() is not None:  # forked children leave out what atexit was told
            Finalize(None, _leave, exitpriority=0)
    _first[:] = [each for each in _first if not each.is_back()]
    _watches[:] = [each for each in _watches if not each.over]
    _watches.append(watch)


def tells_first(watch: Watching) -> bool:
    """Whether no other watch of this process has raised: one error is enough."""
    if not _first:
        _first.append(watch)
    return _first[0] is watch


def say(words: str) -> None:
    """Write on stderr, which may be closed."""
    with suppress(OSError, ValueError):
        sys.stderr.write(words)
        sys.stderr.flush()


class _Report:
    """What ends this process is known to the others before it does; and it is shown as what it comes from.

    Each knows the hook before it: another one, set in between, may call the first of these in its turn.
    """

    def __init__(
        self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]
    ) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for watch in _watches:
            with suppress(Exception):
                if not watch.over and (told := watch.fail(error)) is not None:
                    told.__cause__ = error
                    kind, error, trace = type(told), told, None
        self._previous(kind, error, trace)


def _leave() -> None:
    for watch in _watches:
        with suppress(Exception):
            if watch.pid == os.getpid() and not watch.over:
                watch.close()
                watch.linger()
            watch.stop()


def _forget() -> None:
    """In a forked child there are none of the threads."""
    for watch in _watches:
        watch.over = True
    _watches.clear()
    waking.take_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
