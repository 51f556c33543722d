"""Waits for another process's build: with reports and a timeout, or not at all if it would be a deadlock.

A caller that is part of the build it would wait for is detected by the token of the build's lease. A thread knows
the builds it runs; processes started by a build inherit the tokens in an environment variable, which only the main
thread sets: processes that the program starts while another thread builds may rightly wait. A thread started by a
build is not detected; it waits, and says so.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankfeed.errors import PrepareError, RankfeedError
from rankfeed.prepare.swap import BUILD_PREFIX
from rankfeed.storage.lease import LeaseOwner
from rankfeed.topology import Topology

_VARIABLE = "RANKFEED_BUILDING"


class ThreadStack(threading.local):
    """A stack of values for each thread."""

    def __init__(self) -> None:
        self.items: list[Any] = []


#: Lease tokens of the builds that a thread runs.
_builds = ThreadStack()


@contextmanager
def building(token: str) -> Iterator[None]:
    """Mark the code of a ``with`` block, in this thread, as part of a build."""
    exported = threading.current_thread() is threading.main_thread()
    before = os.environ.get(_VARIABLE, "")
    _builds.items.append(token)
    if exported:
        os.environ[_VARIABLE] = f"{before} {token}".strip()
    try:
        yield
    finally:
        _builds.items.remove(token)
        if exported and before:
            os.environ[_VARIABLE] = before
        elif exported:
            os.environ.pop(_VARIABLE, None)


def refuse_reentry(owner: LeaseOwner, path: Path) -> None:
    """Raise PrepareError if waiting for this owner would be a deadlock."""
    if owner.token in _builds.items:
        builder = "this thread"
    elif owner.token in os.environ.get(_VARIABLE, "").split() and owner.pid != os.getpid():
        builder = "the process that started this one"
    else:
        return
    raise PrepareError(
        f"deadlock: {builder} is already preparing this directory",
        where=path,
        remedy="prepare another directory inside the build function, or this one before it",
    )


_log = logging.getLogger("rankfeed")
#: Seconds until the first report in the log; the time is doubled after each.
_FIRST_REPORT = 5.0
#: Seconds between two looks at the file system: at first and at most. In large jobs it is longer, since all ranks
#: look at one file system: that many looks a second over all of them.
_FIRST_PAUSE, _MAX_PAUSE, _LOOKS_PER_SECOND = 0.01, 0.5, 500


class WaitReporter:
    """Reports in the log for which process this one waits; one rank of a node does."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        self._path, self._timeout = path, timeout
        self._began = time.monotonic()
        self.label, self.local_rank, world_size = "", -1, 1
        with suppress(RankfeedError):
            topology = Topology.detect()
            if topology.world_size > 1:
                world_size, self.local_rank = topology.world_size, topology.local_rank
                self.label = f"rank {topology.rank} of {world_size}"
        self._next = _FIRST_REPORT
        self._pause, self._max_pause = _FIRST_PAUSE, max(_MAX_PAUSE, world_size / _LOOKS_PER_SECOND)

    def wait(self, owner: LeaseOwner, control: Path) -> None:
        """Report if it is time to, then sleep until the next look, longer each time."""
        waited = time.monotonic() - self._began
        if self._timeout is not None and waited >= self._timeout:
            raise PrepareError(
                f"timed out after {self._timeout:g} s waiting for the build",
                found=f"{owner} is building, {_progress(control)}",
                where=self._path,
                remedy="raise timeout=, or end that process: another one takes over",
            )
        if waited >= self._next:
            self._next *= 2
            # The lowest local rank of those that wait on this node reports.
            first = 1 if owner.host == socket.gethostname() and owner.local_rank == 0 else 0
            if self.local_rank in (-1, first):
                self._report(owner, control, waited)
        time.sleep(self._pause)
        self._pause = min(self._max_pause, self._pause * 1.5)

    def _report(self, owner: LeaseOwner, control: Path, waited: float) -> None:
        prefix = f"{self.label}: waiting" if self.label else "waiting"
        state = f"{_progress(control)}, waited {waited:.0f} s"
        text = f"{prefix} for {owner} to build {self._path}{_since(owner)}: {state}"
        if owner.is_local and owner.is_current_process:
            text += "; that is this process: a build function must not wait for threads that wait for the build"
        _log.warning("%s", text)


def _since(owner: LeaseOwner) -> str:
    with suppress(ValueError, OverflowError, OSError):  # a clock may have any value
        if owner.since:
            return f" since {time.strftime('%H:%M:%S', time.localtime(owner.since))}"
    return ""


def _progress(control: Path) -> str:
    """Number and size of the files of unfinished builds."""
    count = nbytes = 0
    for build in control.glob(f"{BUILD_PREFIX}*"):
        for place, _, names in os.walk(build):
            for name in names:
                with suppress(OSError):
                    nbytes += os.lstat(os.path.join(place, name)).st_size
                    count += 1
    return f"{count} files and {nbytes / 1e6:,.1f} MB so far"
