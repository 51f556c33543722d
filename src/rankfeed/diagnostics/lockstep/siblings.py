"""Processes of other ranks on this host: their end is known at once, by a pidfd."""

import os
import select
from contextlib import suppress

from rankfeed._util.process_info import is_stopped, process_start_time
from rankfeed.diagnostics.lockstep.status import PeerState


class SiblingProcesses:
    """Watches processes of this host by pidfds; without those (not on Linux) it watches none."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self.dead: set[int] = set()

    def add(self, rank: int, pid: int, born: int) -> None:
        """Watch the process of a rank, given its process id and start time."""
        if rank in self._pids:
            return
        with suppress(OSError, AttributeError):  # no more descriptors, or not on Linux
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self.dead.add(rank)
            self._pids[rank] = pid
            if born > 0 and process_start_time(pid) not in (-1, born):
                self.dead.add(rank)  # its number belongs to another process

    def wait(self, seconds: float) -> bool:
        """Wait for the end of one of them; returns whether one has ended."""
        fds = {fd: rank for rank, fd in self._fds.items() if rank not in self.dead}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = {fds[fd] for fd, _ in poll.poll(1000 * seconds)}
        self.dead |= ended
        return bool(ended)

    def states(self) -> dict[int, PeerState]:
        pids = list(self._pids.items())
        return {r: "dead" if r in self.dead else "stopped" if is_stopped(pid) else "alive" for r, pid in pids}

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
