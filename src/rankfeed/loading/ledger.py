"""Writes which batches a process was given to disk at each step: the ledger that ``rankfeed verify`` reads.

One file per process and folder (format: `rankfeed.storage.ledger`). Each step is one unbuffered write before the
batch is delivered, so a SIGKILL loses no delivered step, and at most one step is recorded whose batch the caller
never saw.
"""

import itertools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.errors import AuditError
from rankfeed.plan import Plan, Schedule
from rankfeed.sources import SelectSource, Source
from rankfeed.storage import ledger as format
from rankfeed.storage.checksum import digest_of
from rankfeed.topology import Topology
from rankfeed.topology.job import launch_id

#: Key of the process group's store under which its ranks agree on a name for their launch.
_LAUNCH_KEY = "rankfeed/ledger-launch"


class EpochLedger:
    """Records one iteration over an epoch; ``owner`` identifies the loader within this process."""

    def __init__(
        self, folder: Path, schedule: Schedule, plan: Plan, source: Source, topology: Topology, *, owner: object
    ) -> None:
        self._file = _LEDGERS.of(folder, topology)
        self._number, loader = self._file.number(owner)
        content = format.PassInfo(
            launch=self._file.launch,
            process=self._file.process,
            host=socket.gethostname(),
            pid=os.getpid(),
            rank=topology.rank,
            world_size=topology.world_size,
            launcher=topology.launcher,
            loader=loader,
            plan=plan.describe(),
            plan_fingerprint=plan.fingerprint,
            source=source.fingerprint,
            data=_describe_source(source),
            epoch=schedule.epoch,
            start=schedule.start,
            batch_size=schedule.batch_size,
            tail=schedule.tail,
            time_ns=time.time_ns(),
        )
        header, self._seed = format.encode_header(self._number, content)
        self._file.write(header)

    def record(self, step: int, position: int, unproven: str = "") -> None:
        """Record that the batch of a step is delivered now; ``position`` is the one after it.

        ``unproven`` is the user's function that returned a batch which may lack some of its samples.
        """
        self._file.write(format.encode_step(self._number, self._seed, step, position, time.time_ns(), unproven))


class LedgerFile:
    """The ledger of one process in one folder, which is created; the name has the ranks of the first topology."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self.process, self.launch = secrets.token_hex(8), _launch_id()
        self._iterations, self._loader_numbers = itertools.count(), itertools.count()
        self._loaders: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        ranks = f"rank-{topology.rank:05}-of-{topology.world_size:05}"
        self._path = folder / f"{ranks}-{self.launch[:8] or 'alone'}-{self.process[:8]}{format.SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise self._error(error.strerror or error) from error
        weakref.finalize(self, os.close, self._file).atexit = False

    @property
    def exists(self) -> bool:
        """Whether nothing has deleted the file."""
        return self._path.exists()

    def number(self, owner: object) -> tuple[int, int]:
        """Numbers of a new iteration, and of its loader."""
        if owner not in self._loaders:
            self._loaders[owner] = next(self._loader_numbers)
        return next(self._iterations), self._loaders[owner]

    def write(self, content: bytes) -> None:
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise self._error(error.strerror or error) from error
        if written < len(content):
            raise self._error(f"{written} of {len(content)} bytes were written: the disk is full")

    def _error(self, reason: object) -> AuditError:
        return AuditError(
            "the ledger of delivered batches cannot be written",
            found=reason,
            where=self._path,
            remedy="free disk space, or name another folder with audit=; to have no ledger, leave audit out",
        )


class _LedgerFiles:
    """The ledgers of this process, by folder; a forked child writes its own."""

    def init(self) -> None:
        self._lock = threading.Lock()
        self._by_folder: dict[Path, LedgerFile] = {}

    def of(self, folder: Path, topology: Topology) -> LedgerFile:
        with self._lock:
            file = self._by_folder.get(folder)
            if file is None or not file.exists:
                file = self._by_folder[folder] = LedgerFile(folder, topology)
            return file


_LEDGERS = _LedgerFiles()
init_in_each_process(_LEDGERS.init)


def _describe_source(source: Source) -> str:
    """Type, path and length of a source; its own repr may read all of the data."""
    if isinstance(source, SelectSource):
        return f"{len(source)} of {_describe_source(source.source)}"[:1000]
    path = getattr(source, "path", None)
    shown = f"{os.fspath(path)!r}, " if isinstance(path, (str, os.PathLike)) else ""
    return f"{type(source).__name__}({shown}{len(source)} samples)"[:1000]


def _launch_id() -> str:
    """A name for the launch of this process, the same on all its ranks; empty if it is unknown. No collective."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(Exception):  # a store of another kind, or one that is gone
            store = dist.distributed_c10d._get_default_store()
            name: bytes = store.compare_set(_LAUNCH_KEY, "", secrets.token_hex(8))
            return name.decode()
    launch = launch_id()
    return digest_of(launch.encode())[:16] if launch else ""
