"""Who holds a lease, as its file tells, and by what an observer knows whether that process is still alive."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rankfeed._util.process_info import boot_id, pid_namespace, process_start_time
from rankfeed.errors import RankfeedError
from rankfeed.storage import is_gone
from rankfeed.storage.decodable import decodable
from rankfeed.topology import Topology


@decodable
class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds a lease, as it stands in the file.

    Args:
        name: of the holder, used once.
        host: its name.
        boot: of the running kernel; empty where that cannot be told.
        space: of process numbers: they mean something in there alone.
        pid: number of the process.
        born: clock ticks from the kernel's start to the process's.
        locked: whether it holds a lock of the operating system.
        who: its place in the job, for those who wait.
        attempt: which attempt of which job this is; empty where no launcher says.
        since: seconds since 1970 by its own clock, for those who wait.
    """

    name: str
    host: str
    boot: str
    space: int
    pid: int
    born: int
    locked: bool
    who: str
    attempt: str
    since: float

    @classmethod
    def here(cls, who: str, attempt: str) -> Holder:
        """This process, under a new name."""
        return cls(
            name=secrets.token_hex(8),
            host=socket.gethostname(),
            boot=boot_id(),
            space=pid_namespace(),
            pid=os.getpid(),
            born=process_start_time(os.getpid()),
            locked=False,
            who=who,
            attempt=attempt,
            since=time.time(),
        )

    @property
    def is_of_this_host(self) -> bool:
        """Whether it runs, or ran, under the kernel and the name that this process does, both being told."""
        return self.host == socket.gethostname() and self.boot == boot_id() != ""

    @property
    def is_visible(self) -> bool:
        """Whether its number means the same process here."""
        return self.is_of_this_host and self.space != 0 and self.space == pid_namespace()

    @property
    def is_of_this_process(self) -> bool:
        """Whether a visible holder is this process."""
        return self.pid == os.getpid() and self.born == process_start_time(self.pid)

    @property
    def is_gone(self) -> bool | None:
        """Whether a visible holder has ended; None where the system does not tell."""
        found = process_start_time(self.pid)
        return None if found == -1 else found != self.born

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.who})" if self.who else "")


def place_in_job() -> str:
    """Which rank of how many this process is, in words; empty where it is alone, or nobody says."""
    try:
        topology = Topology.detect()
    except RankfeedError:
        return ""
    return f"rank {topology.rank} of {topology.world_size}" if topology.world_size > 1 else ""


class Lock:
    """A lock of the operating system on a file of one's own; a file system may have none."""

    def __init__(self, path: Path) -> None:
        from filelock import FileLock

        self.path = path
        self._lock = FileLock(path)
        self.held = False

    def acquire(self) -> bool:
        """Whether it could be had; at once."""
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        except (NotImplementedError, OSError, Warning):
            # There are many ways to say that a file system has no locks; a warning is raised by `python -W error`.
            return False
        self.held = True
        return True

    def release(self) -> None:
        if self.held:
            self.held = False
            with suppress(OSError):
                self._lock.release()


@dataclass
class Watch:
    """What an observer remembers of a holder: when it last saw a sign of life."""

    name: str = ""
    sign: int = -1
    seen: float = field(default_factory=time.monotonic)


def read_holder(path: Path) -> Holder | None:
    """Who stands in a file; None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except (msgspec.DecodeError, msgspec.ValidationError):
        return _unknown(path)


def _unknown(path: Path) -> Holder:
    """A lease that cannot be read: not yet whole, or damaged. Its holder lives as long as it changes."""
    return Holder(f"unknown-{path.name}", "an unknown host", "", 0, 0, 0, False, "", "", 0.0)
