"""What this process was handed, on disk at each step: the ledger that ``rankfeed verify`` reads.

One file for each process and folder. A step is one unbuffered write of 32 bytes before its batch is handed over,
so a SIGKILL loses nothing that was delivered, and at most one step is written down that its caller never saw.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed._util.validate import check_path, invalid
from rankfeed.errors import ArgumentError, AuditError
from rankfeed.plan import Schedule
from rankfeed.sources import Source
from rankfeed.storage import digest_of
from rankfeed.storage import ledger as format
from rankfeed.topology import Topology
from rankfeed.topology.job import launch_id

if TYPE_CHECKING:
    from rankfeed.loading.loader import Loader

#: Under which the ranks of a process group agree on a name for their launch.
_KEY = "rankfeed/ledger-launch"


def folder_of(audit: Any) -> Path | None:
    """The folder that a loader's ``audit=`` names, if it does; a relative one stays where it is now.

    Raises:
        ArgumentError: it is neither True, False nor a path.
    """
    if isinstance(audit, bool):
        return None
    try:
        return Path(os.path.abspath(check_path("audit", audit)))
    except ArgumentError:
        raise invalid("audit", "True, False or a folder for ledgers", audit) from None


class LedgerPass:
    """A pass over an epoch that is being written down.

    Raises:
        AuditError: the ledger cannot be written.
    """

    def __init__(self, folder: Path, loader: Loader, schedule: Schedule) -> None:
        self._ledger = _LEDGERS.of(folder, loader.topology)
        self._number, self._seed = self._ledger.begin(loader, schedule)
        self._schedule = schedule

    def delivered(self, step: int) -> None:
        """Write down that a step's batch is handed over now.

        Raises:
            AuditError: it cannot be written.
        """
        position = self._schedule.position_after(step)
        self._ledger.write(format.encode_step(self._number, self._seed, step, position, time.time_ns()))


class Ledger:
    """The file of one process.

    Args:
        folder: where it goes; made if it is not there.
        topology: of who writes first, for the name.

    Raises:
        AuditError: it cannot be made.
    """

    def __init__(self, folder: Path, topology: Topology) -> None:
        self._process = secrets.token_hex(8)
        self._launch = _launch()
        self._passes = 0
        self._loaders: WeakKeyDictionary[Loader, int] = WeakKeyDictionary()
        self._numbered = 0
        self._lock = threading.Lock()
        ranks = f"rank-{topology.rank:05}-of-{topology.world_size:05}"
        place = f"{ranks}-{self._launch[:8] or 'alone'}-{self._process[:8]}"
        self.path = folder / (place + format.SUFFIX)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise self._failed(error.strerror or error) from error

    def begin(self, loader: Loader, schedule: Schedule) -> tuple[int, int]:
        """Write the header of a pass. Returns its number, and the seed of its steps' checksums.

        Raises:
            AuditError: it cannot be written.
        """
        topology, plan, source = loader.topology, loader.plan, loader.source
        with self._lock:
            if loader not in self._loaders:
                self._loaders[loader] = self._numbered
                self._numbered += 1
            number, self._passes = self._passes, self._passes + 1
        content = format.PassInfo(
            launch=self._launch,
            process=self._process,
            host=socket.gethostname(),
            pid=os.getpid(),
            rank=topology.rank,
            world_size=topology.world_size,
            launcher=topology.launcher,
            loader=self._loaders[loader],
            plan=plan.describe(),
            plan_fingerprint=plan.fingerprint,
            source=source.fingerprint,
            data=_called(source),
            epoch=schedule.epoch,
            start=schedule.start,
            batch_size=schedule.batch_size,
            tail=schedule.tail,
            time_ns=time.time_ns(),
        )
        head, seed = format.encode_header(number, content)
        self.write(head)
        return number, seed

    def write(self, content: bytes) -> None:
        """Append a few bytes in one write.

        Raises:
            AuditError: not all of them were taken.
        """
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise self._failed(error.strerror or error) from error
        if written < len(content):
            raise self._failed(f"{written} of {len(content)} bytes were taken: the disk is full")

    def _failed(self, found: object) -> AuditError:
        return AuditError(
            "the ledger of what is delivered cannot be written",
            found=found,
            where=self.path,
            remedy="make room, or name another folder with audit=; without a ledger: leave audit out",
        )


class _Ledgers:
    """Those of this process, by folder: a forked child writes its own."""

    def start_anew(self) -> None:
        self._lock = threading.Lock()
        self._by_folder: dict[Path, Ledger] = {}

    def of(self, folder: Path, topology: Topology) -> Ledger:
        with self._lock:
            if folder not in self._by_folder:
                self._by_folder[folder] = Ledger(folder, topology)
            return self._by_folder[folder]


_LEDGERS = _Ledgers()
init_in_each_process(_LEDGERS.start_anew)


def _called(source: Source) -> str:
    """What a source is called; its own repr may go through all of the data."""
    path = getattr(source, "path", None)
    place = f"{os.fspath(path)!r}, " if isinstance(path, (str, os.PathLike)) else ""
    return f"{type(source).__name__}({place}{len(source)} samples)"[:1000]


def _launch() -> str:
    """A name for the launch of this process, the same on all its ranks; empty where nobody knows one.

    No collective: ranks may begin at any time, and some of them never.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(Exception):  # a store of another kind, or one that is gone
            store = dist.distributed_c10d._get_default_store()
            said: bytes = store.compare_set(_KEY, "", secrets.token_hex(8))
            return said.decode()
    name = launch_id()
    return digest_of(name.encode())[:16] if name else ""
