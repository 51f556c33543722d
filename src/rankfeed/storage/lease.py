"""File lease: exactly one process of all hosts holds it, and another one takes over if that process dies.

A lease is a small file, created exclusively. To take over from a dead owner, a process creates the file
``<token of the dead owner>.next`` in the same way. Nothing is removed to take over and no token is used twice, so
an owner has at most one successor. The end of this chain holds the lease.

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
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import msgspec

from rankfeed._util.process_info import boot_id, pid_namespace, process_start_time
from rankfeed.storage.commit import decodable, fsync_dir
from rankfeed.storage.network_fs import SuppressGone, is_gone, stat_uncached

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
#: Heartbeats move the file's time by 2 s each, the coarsest resolution of a file system.
TICK_NS = 2_000_000_000
#: Tokens of the leases that this process holds or is about to create.
_live_tokens: set[str] = set()


@decodable
class LeaseOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process that owns a lease, as recorded in the lease file."""

    token: str  # of this ownership, used once
    file: str  # name of its lease file
    host: str
    boot_id: str = ""  # of the running kernel; empty if unknown
    pid_namespace: int = 0  # inode; 0 if unknown
    pid: int = 0
    start_time: int = -1  # in clock ticks since boot; -1 if unknown
    label: str = ""  # rank of the process, for messages; empty if it is alone
    local_rank: int = -1
    since: float = 0.0  # Unix time of the acquisition by the owner's clock, for messages

    @classmethod
    def current(cls, file: str = _FIRST, label: str = "", local_rank: int = -1) -> LeaseOwner:
        """The running process, with a new token."""
        pid, token, start_time = os.getpid(), secrets.token_hex(8), process_start_time(os.getpid())
        kernel = boot_id(), pid_namespace()
        return cls(token, file, socket.gethostname(), *kernel, pid, start_time, label, local_rank, time.time())

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
    """For how long each of several counters has not changed, by this process's clock."""

    def __init__(self) -> None:
        #: The count seen last, the time since when it has not changed, and whether it has ever changed.
        self._seen: dict[str, tuple[int, float, bool]] = {}

    def seconds(self, name: str, count: int) -> float:
        """Seconds since the counter changed, or since it was seen first."""
        now = time.monotonic()
        last, since, has_changed = self._seen.get(name, (count, now, False))
        if count != last:
            since, has_changed = now, True
        self._seen[name] = count, since, has_changed
        return now - since

    def has_changed(self, name: str) -> bool:
        """Whether the counter has changed since it was seen first."""
        return name in self._seen and self._seen[name][2]


class Lease:
    """A lease that expires without a heartbeat, by a thread or by progress, for ``duration`` seconds."""

    def __init__(self, directory: Path, *, duration: float | None = None, by_progress: bool = False) -> None:
        self.directory = directory
        self.duration = DURATION if duration is None else duration
        self.by_progress = by_progress

    def chain(self) -> list[LeaseOwner]:
        """All owners, each the successor of the one before it; the last one holds the lease. Raises OSError."""
        names: list[str] = []
        with SuppressGone():
            # Listed: a network file system may remember for long that a name was missing.
            names = os.listdir(self.directory)
        owners: list[LeaseOwner] = []
        name = _FIRST
        while name in names and (owner := _read_owner(self.directory / name)) is not None:
            owners.append(owner)
            name = f"{owner.token}{_SUCCESSOR}"
        return owners

    def owner(self) -> LeaseOwner | None:
        """The owner; None if there is none. Raises OSError."""
        chain = self.chain()
        return chain[-1] if chain else None

    def is_expired(self, owner: LeaseOwner, stalls: StallDetector) -> bool:
        """Whether the owner is dead, or makes no progress, as far as this process knows."""
        silent, ended = self.silence(owner, stalls), owner.has_ended
        if ended is False and owner.is_current_process and owner.token not in _live_tokens:
            return True  # a release failed
        if ended or (ended is False and not self.by_progress):
            return ended
        if silent <= self.duration:
            return False
        returned = sum(1 for _ in self.directory.glob(f"*{_RETURNED}"))
        return silent > self.duration * (1 << min(returned, _MAX_DOUBLINGS))

    def is_alive(self, owner: LeaseOwner, stalls: StallDetector) -> bool:
        """Whether the owner is known to be alive: by its PID, or by a heartbeat since ``stalls`` saw it first."""
        self.silence(owner, stalls)
        return owner.has_ended is False or (owner.has_ended is None and stalls.has_changed(owner.token))

    def silence(self, owner: LeaseOwner, stalls: StallDetector) -> float:
        """Seconds since the last heartbeat of the owner, or since ``stalls`` saw the owner first."""
        count = -1
        with suppress(OSError):
            count = stat_uncached(self.directory / owner.file).st_mtime_ns
        return stalls.seconds(owner.token, count)

    def acquire(self, after: LeaseOwner | None, label: str = "", local_rank: int = -1) -> HeldLease | None:
        """The lease, after an expired owner or the first; None if another process was faster. Raises OSError."""
        name = _FIRST if after is None else f"{after.token}{_SUCCESSOR}"
        for remaining in reversed(range(_ATTEMPTS)):
            me = LeaseOwner.current(name, label, local_rank)
            _live_tokens.add(me.token)
            try:
                self._make_directory()
                if (descriptor := self._create(me)) is None:
                    self.remove_files(me)
                    break
                held = HeldLease(self, me, descriptor)
            except BaseException as error:
                self.remove_files(me)
                # mkdir reports "exists" if the directory is being removed.
                is_race = isinstance(error, OSError) and (is_gone(error) or isinstance(error, FileExistsError))
                if not remaining or not is_race:
                    raise
                time.sleep(_AFTER_RACE)
                continue
            with ExitStack() as stack:
                stack.enter_context(held)
                if held.is_held():
                    stack.pop_all()
                    return held
            break
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
        """Create a lease file, which readers may see incomplete; a descriptor of it, or None if it exists."""
        path, content = self.directory / me.file, msgspec.json.encode(me)
        mode = stat.S_IMODE(self.directory.stat().st_mode) & 0o444 | 0o600
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return None
        try:
            # At once: a process that is killed before leaves a lease that only expires.
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            with suppress(OSError):  # readable for everyone who may look into the directory, whatever the umask
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            fsync_dir(self.directory)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)
            raise
        return descriptor

    def remove_files(self, me: LeaseOwner) -> None:
        """Remove what an owner leaves: its own files, and if it holds the lease, those of all dead processes."""
        chain: list[LeaseOwner] = []
        with suppress(OSError):
            chain = self.chain()
        if chain and chain[-1].token == me.token:
            successors = {f"{owner.token}{_SUCCESSOR}" for owner in chain}
            with suppress(OSError):
                for path in self.directory.iterdir():
                    if path.suffix == _RETURNED or (path.suffix == _SUCCESSOR and path.name not in successors):
                        path.unlink(missing_ok=True)
            for owner in chain:  # the first one first: from then on the rest is out of reach
                with suppress(OSError):
                    (self.directory / owner.file).unlink()
        # Not listed, since listing may be what failed; no other process has asked for this name before.
        elif not os.path.lexists(self.directory / f"{me.token}{_SUCCESSOR}"):
            with suppress(OSError):
                (self.directory / f"{me.token}{_RETURNED}").unlink()
            with suppress(OSError):
                recorded = _read_owner(self.directory / me.file)
                if recorded is not None and recorded.token == me.token:
                    (self.directory / me.file).unlink()
        with suppress(OSError):  # not empty
            self.directory.rmdir()
        _live_tokens.discard(me.token)


class HeldLease(AbstractContextManager["HeldLease"]):
    """A lease that this process holds until `release`, or to the end of a ``with`` block."""

    def __init__(self, lease: Lease, owner: LeaseOwner, descriptor: int) -> None:
        self.owner = owner
        # Heartbeats go to the file, not its name, which may be another owner's later.
        self._lease, self._descriptor = lease, descriptor
        self._time = os.fstat(descriptor).st_mtime_ns
        self._renewed = time.monotonic()
        self._renewing, self._released = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rankfeed-lease", daemon=True)
        self._reserve = ExitStack()
        try:
            for _ in range(_RESERVED_FDS):
                self._reserve.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            if not lease.by_progress:
                self._thread.start()
        except BaseException:
            self._released.set()  # the thread may run already: no heartbeat to a descriptor that is reused
            self._reserve.close()
            os.close(descriptor)
            raise

    def __exit__(self, *_: object) -> None:
        self.release()

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
            self._time += TICK_NS
            os.utime(self._descriptor, ns=(self._time, self._time))
            if self.owner.token + _SUCCESSOR in os.listdir(self._lease.directory):
                (self._lease.directory / f"{self.owner.token}{_RETURNED}").touch()

    @property
    def is_current_process(self) -> bool:
        """Whether this process acquired the lease; False in a forked child."""
        return os.getpid() == self.owner.pid

    def is_held(self) -> bool:
        """Whether no other process has taken over. Raises OSError."""
        owner = self._lease.owner()
        return owner is not None and owner.token == self.owner.token

    def is_lost(self) -> bool:
        """Whether another process is known to have taken over; called after an error."""
        self._reserve.close()
        with suppress(OSError):
            return not self.is_held()
        return False

    def release(self) -> None:
        """Give the lease back: remove the files of the whole chain; a forked child does nothing."""
        if not self.is_current_process:
            return
        try:
            self._released.set()
            if self._thread.ident is not None:
                self._thread.join()
            with self._renewing:
                os.close(self._descriptor)
        finally:
            self._reserve.close()
            self._lease.remove_files(self.owner)


def _read_owner(path: Path) -> LeaseOwner | None:
    """The owner recorded in a lease file; None if there is no file."""
    with SuppressGone():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except PermissionError:
            time.sleep(_AFTER_RACE)  # another user is about to make it readable
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file, suppress(msgspec.DecodeError):
            return msgspec.json.decode(file.read(), type=LeaseOwner)
        # Incomplete or damaged: its owner counts as alive as long as the file changes.
        return LeaseOwner(f"unknown-{path.name}", path.name, "an unknown host")
    return None
