"""File lease: exactly one process of all hosts holds it, and another one takes over if that process dies.

A lease is a small file. It is created whole, by a hard link, which succeeds in one process only. To take over from
a dead owner, a process creates the file ``<token of the dead owner>.next`` in the same way. Nothing is removed to
take over and no token is used twice, so an owner has at most one successor. The end of this chain holds the lease.

How an observer decides that an owner is dead:

- On the same host and in the same PID namespace: no process has the owner's PID and start time.
- Otherwise: the owner's file has had no heartbeat for `duration` seconds of the observer's monotonic clock. Clocks
  of different hosts are never compared. An owner that returns after it was taken for dead (because it held the
  GIL) reports that, and each report doubles the time.

A lease that is renewed by progress also expires while its owner is alive but hangs.

A lease does not stop an owner that lost it: check `HeldLease.is_held` before each step that cannot be undone.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from rankfeed._util.process_info import boot_id, pid_namespace, process_start_time
from rankfeed.storage.commit import TEMPORARY, fsync_dir
from rankfeed.storage.decodable import decodable
from rankfeed.storage.network_fs import is_gone, stat_uncached

#: Seconds between heartbeats, and without one after which an owner on another host has lost the lease.
HEARTBEAT, DURATION = 3.0, 45.0

_FIRST, _SUCCESSOR = "lease", ".next"
#: Suffix of the file by which an owner reports that it is alive although it lost the lease.
_RETURNED = ".returned"
_MAX_DOUBLINGS = 6
#: Attempts to acquire a lease whose directory other processes remove, and seconds after an attempt.
_ATTEMPTS, _AFTER_RACE = 5, 0.01
#: File descriptors kept for the release, should the process run out of them.
_RESERVED_FDS = 8
#: How file systems report that they have no hard links.
_NO_HARD_LINKS = (errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Heartbeats move the file's time by 2 s each, the coarsest resolution of a file system.
_TICK_NS = 2_000_000_000
#: Tokens of the leases that this process holds or is about to create.
_live_tokens: set[str] = set()


@decodable
class LeaseOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process that owns a lease, as recorded in the lease file.

    Args:
        token: name of this ownership, used once.
        file: name of its lease file.
        host: host name.
        boot_id: of the running kernel; empty if unknown.
        pid_namespace: inode of the PID namespace; 0 if unknown.
        pid: process id.
        start_time: of the process, in clock ticks since boot; -1 if unknown.
        label: rank of the process, for messages; empty if it is alone.
        local_rank: of the process; -1 if unknown.
        since: Unix time of the acquisition by the owner's clock, for messages.
    """

    token: str
    file: str
    host: str
    boot_id: str = ""
    pid_namespace: int = 0
    pid: int = 0
    start_time: int = -1
    label: str = ""
    local_rank: int = -1
    since: float = 0.0

    @classmethod
    def current(cls, file: str = _FIRST, label: str = "", local_rank: int = -1) -> LeaseOwner:
        """The running process, with a new token."""
        pid = os.getpid()
        return cls(
            token=secrets.token_hex(8),
            file=file,
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            pid=pid,
            start_time=process_start_time(pid),
            label=label,
            local_rank=local_rank,
            since=time.time(),
        )

    @property
    def is_local(self) -> bool:
        """Whether its PID refers to the same process here: same host, kernel and PID namespace."""
        same_host = self.host == socket.gethostname() and self.boot_id == boot_id() != ""
        return same_host and self.pid_namespace == pid_namespace() != 0

    @property
    def is_current_process(self) -> bool:
        """Whether a local owner is this process."""
        return self.pid == os.getpid() and self.start_time == process_start_time(self.pid)

    @property
    def has_ended(self) -> bool | None:
        """Whether the process has ended; None if that cannot be determined from here."""
        if not self.is_local or (start_time := process_start_time(self.pid)) == -1:
            return None
        return start_time != self.start_time

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.label})" if self.label else "")


class StallDetector:
    """For how long each of several counters has not changed, by this process's clock.

    Args:
        clock: returns seconds.

    Examples:
        >>> times = iter([0.0, 2.5, 3.0, 4.0])
        >>> stalls = StallDetector(clock=lambda: next(times))
        >>> [stalls.seconds("rank 1", count) for count in (1, 1, 2, 2)]
        [0.0, 2.5, 0.0, 1.0]
        >>> stalls.has_changed("rank 1"), stalls.has_changed("rank 2")
        (True, False)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}
        self._changed: set[str] = set()

    def seconds(self, name: str, count: int) -> float:
        """Seconds since the counter changed, or since it was seen first."""
        now = self._clock()
        last, since = self._seen.get(name, (None, now))
        if count != last:
            if last is not None:
                self._changed.add(name)
            self._seen[name] = count, (since := now)
        return now - since

    def has_changed(self, name: str) -> bool:
        """Whether the counter has changed since it was seen first."""
        return name in self._changed


class Lease:
    """A lease whose files lie in a directory.

    Args:
        directory: created by `acquire` in one that exists, removed with the last lease file.
        duration: seconds without a heartbeat after which the lease expires.
        by_progress: the owner calls `HeldLease.renew` as it makes progress; if it makes none, the lease expires.
            Otherwise a thread makes the heartbeats as long as the process is alive.
    """

    def __init__(self, directory: Path, *, duration: float | None = None, by_progress: bool = False) -> None:
        self.directory = directory
        self.duration = DURATION if duration is None else duration
        self.by_progress = by_progress

    def chain(self) -> list[LeaseOwner]:
        """All owners, each the successor of the one before it; the last one holds the lease.

        Raises:
            OSError: the directory or a lease file cannot be read.
        """
        try:
            # Listed: a network file system may remember for long that a name was missing.
            names = set(os.listdir(self.directory))
        except OSError as error:
            if is_gone(error):
                return []
            raise
        found: list[LeaseOwner] = []
        name = _FIRST
        while name in names and (owner := _read_owner(self.directory / name)) is not None:
            found.append(owner)
            name = f"{owner.token}{_SUCCESSOR}"
        return found

    def owner(self) -> LeaseOwner | None:
        """The owner; None if there is none.

        Raises:
            OSError: the directory or a lease file cannot be read.
        """
        chain = self.chain()
        return chain[-1] if chain else None

    def is_expired(self, owner: LeaseOwner, stalls: StallDetector) -> bool:
        """Whether the owner is dead, or makes no progress, as far as this process knows.

        Args:
            owner: of this lease.
            stalls: remembers the heartbeats seen by earlier calls.
        """
        try:
            count = stat_uncached(self.directory / owner.file).st_mtime_ns
        except OSError:
            count = -1
        silent = stalls.seconds(owner.token, count)
        ended = owner.has_ended
        if ended is False and owner.is_current_process and owner.token not in _live_tokens:
            return True  # a release failed
        if ended or (ended is False and not self.by_progress):
            return ended
        if silent <= self.duration:
            return False
        returned = sum(1 for _ in self.directory.glob(f"*{_RETURNED}"))
        return silent > self.duration * (1 << min(returned, _MAX_DOUBLINGS))

    @contextmanager
    def acquire(
        self, after: LeaseOwner | None, label: str = "", local_rank: int = -1
    ) -> Iterator[HeldLease | None]:
        """Hold the lease in a ``with`` block; None if another process was faster.

        Args:
            after: the expired owner to take over from; None if there was none.
            label: rank of this process, for messages.
            local_rank: of this process.

        Raises:
            OSError: the directory cannot be written, or is a symbolic link.
        """
        name = _FIRST if after is None else f"{after.token}{_SUCCESSOR}"
        me = LeaseOwner.current(name, label, local_rank)
        self._make_directory()
        held: HeldLease | None = None
        _live_tokens.add(me.token)
        try:
            descriptor = self._create(me)
            if descriptor is not None:
                held = HeldLease(self, me, descriptor)
            yield held if held is not None and held.is_held() else None
        finally:
            if os.getpid() == me.pid:  # a forked child of the block may come here too, and holds no lease
                with ExitStack() as end:  # the last one first, and each one whatever the others raise
                    end.callback(_live_tokens.discard, me.token)
                    end.callback(self._remove_files_of, me)
                    if held is not None:
                        end.callback(held.release)

    def enter(
        self, stack: ExitStack, after: LeaseOwner | None, label: str = "", local_rank: int = -1
    ) -> HeldLease | None:
        """`acquire` for an exit stack, repeated if other processes remove the directory meanwhile."""
        for remaining in reversed(range(_ATTEMPTS)):
            try:
                with ExitStack() as inner:
                    held = inner.enter_context(self.acquire(after, label, local_rank))
                    if held is not None:
                        stack.push(inner.pop_all())
                        return held
                break
            except OSError as error:
                # mkdir reports "exists" if the directory is being removed.
                if not remaining or not (is_gone(error) or isinstance(error, FileExistsError)):
                    raise
                time.sleep(_AFTER_RACE)
        time.sleep(_AFTER_RACE)  # this host may not have heard of the faster process yet
        return None

    def _make_directory(self) -> None:
        """Writable for everyone who may write beside it, so that any of them can take over."""
        try:
            self.directory.mkdir()
        except FileExistsError:
            if self.directory.is_symlink() or not self.directory.is_dir():
                raise
            return
        with suppress(OSError):  # the umask may have removed permissions
            self.directory.chmod(stat.S_IMODE(self.directory.parent.stat().st_mode))

    def _create(self, me: LeaseOwner) -> int | None:
        """Create a lease file; a descriptor for its heartbeats, or None if there is one already."""
        temporary, target = self.directory / f"{TEMPORARY}{me.token}", self.directory / me.file
        try:
            self._write(temporary, me)
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.link(temporary, target)
                fsync_dir(self.directory)
                return descriptor
            except BaseException as error:
                found = _read_owner(target) if isinstance(error, FileExistsError) else None
                if found is not None and found.token == me.token:
                    return descriptor  # created; a network file system repeated the call after a lost reply
                os.close(descriptor)
                if isinstance(error, FileExistsError):
                    return None
                if not isinstance(error, OSError) or error.errno not in _NO_HARD_LINKS:
                    raise
        finally:
            with suppress(OSError):
                temporary.unlink()
        try:  # readers may see it before it is complete, and wait
            self._write(target, me)
        except FileExistsError:
            return None
        return os.open(target, os.O_RDONLY)

    def _write(self, path: Path, me: LeaseOwner) -> None:
        with open(path, "xb") as file:
            file.write(msgspec.json.encode(me))
            self._make_readable(file)
            file.flush()
            os.fsync(file.fileno())

    def _make_readable(self, file: IO[bytes]) -> None:
        """Readable for everyone who may look into the directory, whatever the umask."""
        with suppress(OSError):
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            readable = stat.S_IMODE(self.directory.stat().st_mode) & (stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
            os.fchmod(file.fileno(), mode | readable)

    def _remove_files_of(self, me: LeaseOwner) -> None:
        """Remove what a failed acquisition or release left, unless a successor's file continues the chain."""
        # Not listed, since listing may be what failed; no other process has asked for this name before.
        if not os.path.lexists(self.directory / f"{me.token}{_SUCCESSOR}"):
            with suppress(OSError):
                (self.directory / f"{me.token}{_RETURNED}").unlink()
            with suppress(OSError):
                found = _read_owner(self.directory / me.file)
                if found is not None and found.token == me.token:
                    (self.directory / me.file).unlink()
        with suppress(OSError):  # not empty
            self.directory.rmdir()

    def remove_leftovers(self, chain: list[LeaseOwner]) -> None:
        """Remove files that dead processes left; called by the owner before it gives the lease back."""
        successors = {f"{owner.token}{_SUCCESSOR}" for owner in chain}
        for path in self.directory.iterdir():
            orphan = path.suffix == _SUCCESSOR and path.name not in successors
            # A live process whose temporary file is removed here finds that out and tries again.
            unfinished = path.name.startswith(TEMPORARY) and len(path.name) == len(TEMPORARY) + 16
            if orphan or unfinished or path.suffix == _RETURNED:
                with suppress(OSError):
                    path.unlink()


class HeldLease:
    """A lease that this process holds until `release`.

    Args:
        lease: which.
        owner: this process.
        descriptor: of the lease file. Heartbeats go to the file, not its name, which may be another owner's later.
    """

    def __init__(self, lease: Lease, owner: LeaseOwner, descriptor: int) -> None:
        self.owner = owner
        self._lease = lease
        self._descriptor = descriptor
        self._time = os.fstat(descriptor).st_mtime_ns
        self._renewed = time.monotonic()
        self._renewing = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rankfeed-lease", daemon=True)
        with ExitStack() as reserve:
            for _ in range(_RESERVED_FDS):
                reserve.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            if not lease.by_progress:
                self._thread.start()
            self._reserve = reserve.pop_all()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            self._renew()

    def renew(self) -> None:
        """Make a heartbeat, if the last one is old enough."""
        if time.monotonic() - self._renewed > min(HEARTBEAT, self._lease.duration / 10):
            self._renew()

    def _renew(self) -> None:
        with self._renewing, suppress(OSError):  # the loss of the lease is reported by `is_held`
            if self._released.is_set():
                return
            self._renewed = time.monotonic()
            self._time += _TICK_NS
            os.utime(self._descriptor, ns=(self._time, self._time))
            if self.owner.token + _SUCCESSOR in os.listdir(self._lease.directory):
                (self._lease.directory / f"{self.owner.token}{_RETURNED}").touch()

    @property
    def is_current_process(self) -> bool:
        """Whether this process acquired the lease; False in a forked child."""
        return os.getpid() == self.owner.pid

    def is_held(self) -> bool:
        """Whether no other process has taken over.

        Raises:
            OSError: the directory cannot be read.
        """
        owner = self._lease.owner()
        return owner is not None and owner.token == self.owner.token

    def is_lost(self) -> bool:
        """Whether another process is known to have taken over; called after an error."""
        self._reserve.close()
        with suppress(OSError):
            return not self.is_held()
        return False

    def remove_leftovers(self) -> None:
        """Remove lease files that dead processes left.

        Raises:
            OSError: the directory cannot be read.
        """
        self._lease.remove_leftovers(self._lease.chain())

    def release(self) -> None:
        """Give the lease back: remove the files of the whole chain."""
        self._released.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._renewing:
            os.close(self._descriptor)
        self._reserve.close()
        with suppress(OSError):  # its own file is removed by `Lease._remove_files_of`
            chain = self._lease.chain()
            if not chain or chain[-1].token != self.owner.token:
                return  # another process took over and removes the chain
            self._lease.remove_leftovers(chain)
            for owner in chain:  # the first one first: from then on the rest is out of reach
                with suppress(OSError):
                    (self._lease.directory / owner.file).unlink()


def _read_owner(path: Path) -> LeaseOwner | None:
    """The owner recorded in a lease file; None if there is no file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return msgspec.json.decode(file.read(), type=LeaseOwner)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except (msgspec.DecodeError, msgspec.ValidationError):
        # Incomplete or damaged: its owner counts as alive as long as the file changes.
        return LeaseOwner(f"unknown-{path.name}", path.name, "an unknown host")
