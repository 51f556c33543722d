"""Reports of the monitors of a process when it fails, ends or forks."""

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


#: Each is a RankMonitor, whose module imports this one.
_monitors: list[Any] = []


def register(monitor: Any) -> None:
    """Report to a monitor when this process fails or ends."""
    if not isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(sys.excepthook)
    if not _monitors:
        atexit.register(_leave)
        if multiprocessing.parent_process() is not None:  # children of multiprocessing do not run atexit functions
            Finalize(None, _leave, exitpriority=0)
    _monitors[:] = [each for each in _monitors if not each.over]
    _monitors.append(monitor)


class _ExceptHook:
    """Publishes the error that ends this process, and shows the cause instead if that is another rank.

    Each hook calls the previous one: another hook that was set in between may call the first of these.
    """

    def __init__(self, previous: _Hook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for monitor in _monitors:
            with suppress(Exception):
                if not monitor.over and (cause := monitor.fail(error)) is not None:
                    cause.__cause__ = error
                    kind, error, trace = type(cause), cause, None
        self._previous(kind, error, trace)


def _leave() -> None:
    for monitor in _monitors:
        with suppress(Exception):
            if monitor.pid == os.getpid() and not monitor.over:
                monitor.close()
                monitor.drain()
            monitor.stop()


def _forget() -> None:
    """A forked child has none of the threads."""
    for monitor in _monitors:
        monitor.over = True
    _monitors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
