"""Processes of other ranks on this host: their end is known at once, by a pidfd."""

import os
import select
import time
from collections.abc import Mapping
from typing import Literal

from rankfeed._util.process_info import is_stopped, process_start_time

#: How many of the following ranks on its host a rank watches, besides rank 0.
_WATCHED = 8


class SiblingProcesses:
    """Watches processes of this host. Without pidfds (not on Linux) none is ever seen to end."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._fds: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self.dead: set[int] = set()

    def add(self, processes: Mapping[int, tuple[int, int]]) -> None:
        """Watch rank 0 and the next ranks among those of this host, given their process ids and start times."""
        others = sorted(processes.keys() - {self._rank}, key=lambda rank: (rank < self._rank, rank))
        for rank in {*others[:_WATCHED], *(rank for rank in others if rank == 0)} - self._pids.keys():
            pid, born = processes[rank]
            self._pids[rank] = pid
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self.dead.add(rank)
            except (OSError, AttributeError):  # no more descriptors, or not on Linux
                continue
            if born > 0 and process_start_time(pid) not in (-1, born):
                self.dead.add(rank)  # its number belongs to another process

    def wait(self, seconds: float) -> bool:
        """Wait for the end of one of them; returns whether one has ended."""
        fds = {fd: rank for rank, fd in self._fds.items() if rank not in self.dead}
        if not fds:
            time.sleep(seconds)
            return False
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ended = [fds[fd] for fd, _ in poll.poll(1000 * seconds)]
        self.dead.update(ended)
        return bool(ended)

    def missing(self) -> dict[int, Literal["dead", "stopped"]]:
        """Ranks whose process has ended or is stopped."""
        stopped = (rank for rank, pid in list(self._pids.items()) if rank not in self.dead and is_stopped(pid))
        return {**dict.fromkeys(stopped, "stopped"), **dict.fromkeys(tuple(self.dead), "dead")}

    def close(self) -> None:
        """Close the descriptors."""
        while self._fds:
            os.close(self._fds.popitem()[1])
