"""Who builds: a lease that exactly one process of all hosts holds, and that no death outlives.

A lease is a small file; it comes into being whole, by a hard link, which one process alone can make. Who sees
that its holder is dead claims the lease *after* that holder's: a file named for the dead one, so that nobody can
succeed to it twice, nor to a holder that has gone meanwhile. The holder is whoever stands at the end of the chain.

How it is known that a holder is dead:

- On the same host: no process has its number and its time of birth. Where numbers mean something else for the
  holder (it runs in another container), or are not told: it holds a lock of the operating system, which its death
  frees, and has not renewed its lease lately.
- From another host: it renews its lease every few seconds, and the observer, by its own clock, has seen nothing
  of that for long; for twice as long with each holder that came back after it had been taken for dead, since
  a builder may keep the thread that renews from running. No clocks are compared, so none has to be right.

A process that was only stopped, and finds on waking up that somebody succeeded to it, gives up: see `Lease.held`.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from rankfeed.building.holder import Holder, Lock, Watch, read_holder
from rankfeed.storage import is_gone, stat_uncached
from rankfeed.storage.commit import TEMPORARY, fsync_dir

#: Seconds between renewals, and after which a holder on another host that has not renewed counts as dead.
RENEWED, STALE = 3.0, 45.0
#: How many renewals a holder on this host has missed before its lock is asked for, which may not be this host's;
#: how often the time to be silent is doubled at most; file handles that a holder keeps for its end.
_MISSED, _DOUBLINGS, _RESERVE = 4, 6, 8
_FIRST = "lease"
#: What the name of a file ends with by which a holder tells that it lives, though it was taken for dead.
_LOST = ".lost"
#: EPERM, EMLINK, ENOSYS, EOPNOTSUPP: how file systems say that they have no hard links.
_NO_LINKS = (1, 31, 38, 95)
#: Names of the holders that this process is, or is about to be.
_live: set[str] = set()


class Leases:
    """The leases in a folder.

    Args:
        folder: where they lie; made when a lease is claimed, removed with the last one.
        stale: seconds without a renewal after which a holder on another host is dead.
    """

    def __init__(self, folder: Path, *, stale: float = STALE) -> None:
        self.folder = folder
        self.stale = stale

    def chain(self) -> list[Holder]:
        """All holders, each the successor of the one before; the last one counts."""
        found: list[Holder] = []
        try:
            there = set(os.listdir(self.folder))
        except OSError as error:
            if is_gone(error):
                return found
            raise
        name = _FIRST
        # Listed first: that a name is not there, a network file system may have told this host long ago.
        while name in there and (holder := read_holder(self.folder / name)) is not None:
            found.append(holder)
            name = f"{holder.name}.next"
        return found

    def holder(self) -> Holder | None:
        """Who holds the lease; None where nobody does."""
        chain = self.chain()
        return chain[-1] if chain else None

    def is_dead(self, holder: Holder, watch: Watch) -> bool:
        """Whether a holder is dead, as far as this process can know by now.

        Args:
            holder: of the lease.
            watch: what the last call saw; changed.
        """
        now = time.monotonic()
        try:
            sign = stat_uncached(self.folder / f"{holder.name}.alive").st_mtime_ns
        except OSError:
            sign = -1
        if (watch.name, watch.sign) != (holder.name, sign):
            watch.name, watch.sign, watch.seen = holder.name, sign, now
        if holder.is_visible:
            if holder.is_of_this_process:
                return holder.name not in _live  # left by an end that failed
            if (gone := holder.is_gone) is not None:
                return gone
        silent = now - watch.seen
        if holder.is_of_this_host and holder.locked and silent > min(_MISSED * RENEWED, self.stale):
            return self._is_free(holder) or self._is_silent(silent)
        return self._is_silent(silent)

    def _is_silent(self, seconds: float) -> bool:
        if seconds <= self.stale:
            return False
        losses = sum(1 for _ in self.folder.glob(f"*{_LOST}"))
        return seconds > self.stale * (1 << min(losses, _DOUBLINGS))

    def _is_free(self, holder: Holder) -> bool:
        path = self.folder / f"{holder.name}.lock"
        # Gone: released in this moment; the chain tells the next time.
        return path.exists() and self._lock_is_free(path)

    @staticmethod
    def _lock_is_free(path: Path) -> bool:
        lock = Lock(path)
        with suppress(OSError):
            if lock.acquire():
                lock.release()
                return True
        return False

    def sweep(self, me: Holder) -> None:
        """Remove what the dead left behind; whoever holds the lease does so before giving it back."""
        chain = self.chain()
        for path in self.folder.glob(f"*{_LOST}"):
            with suppress(OSError):
                path.unlink()
        dead = {holder.name for holder in chain[:-1]}
        known = {_FIRST, *(f"{holder.name}.next" for holder in chain)}
        for path in self.folder.glob("*.lock"):
            name = path.name.removesuffix(".lock")
            if name != me.name and self._lock_is_free(path):  # of one that never got to its lease
                dead.add(name)
        for path in self.folder.glob("*.next"):
            if path.name not in known:
                with suppress(OSError):
                    path.unlink()
        for name in dead:
            for each in (f"{name}.alive", f"{TEMPORARY}{name}", f"{name}.lock"):
                with suppress(OSError):
                    (self.folder / each).unlink()

    @contextmanager
    def claimed(self, after: Holder | None, who: str, attempt: str) -> Iterator[Lease | None]:
        """The lease, or None where somebody else was faster.

        Args:
            after: the dead holder that it is taken from; None where there was none.
            who: place of this process in its job.
            attempt: which attempt of which job this is.

        Raises:
            OSError: the folder cannot be written.
        """
        me = Holder.here(who, attempt)
        name = _FIRST if after is None else f"{after.name}.next"
        self._make_folder()
        lock = Lock(self.folder / f"{me.name}.lock")
        lease: Lease | None = None
        _live.add(me.name)
        try:
            me = msgspec.structs.replace(me, locked=lock.acquire())
            if self._publish(me, name):
                lease = Lease(self, me)
            yield lease if lease is not None and lease.held() else None
        finally:
            if os.getpid() == me.pid:  # a child forked by the builder may come here too: the lease is not its own
                with ExitStack() as end:  # the last one first, and each whatever the others raise
                    end.callback(_live.discard, me.name)
                    end.callback(self._forget, me, name)
                    end.callback(lock.release)
                    if lease is not None:
                        end.callback(lease.release)

    def _make_folder(self) -> None:
        """Open to all who may write beside it: what somebody leaves there keeps none of them from taking over."""
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            if self.folder.is_symlink() or not self.folder.is_dir():
                raise
            return
        with suppress(OSError):  # without the modes that a umask takes away, it is for its owner alone
            self.folder.chmod(stat.S_IMODE(self.folder.parent.stat().st_mode))

    def _open_to_all(self, file: IO[bytes]) -> None:
        """Readable to all who may look into the folder, whatever the umask: they ask whether its writer lives."""
        with suppress(OSError):
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            readable = stat.S_IMODE(self.folder.stat().st_mode) & (stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
            os.fchmod(file.fileno(), mode | readable)

    def _forget(self, me: Holder, name: str) -> None:
        """Remove what this process left: its lease too, if that is half-made, or could not be released.

        Not where somebody succeeded to it: it is a link of a chain then, and goes with that.
        """
        left = [f"{me.name}.alive"]
        # Not listed, which may be what could not be done; nobody has asked for the name before.
        if not os.path.lexists(self.folder / f"{me.name}.next"):
            left.append(f"{me.name}{_LOST}")
            with suppress(OSError):
                found = read_holder(self.folder / name)
                if found is not None and found.name == me.name:
                    left.append(name)
        for each in [*left, f"{me.name}.lock"]:  # last what `sweep` knows a dead one's files by
            with suppress(OSError):
                (self.folder / each).unlink()
        with suppress(OSError):
            self.folder.rmdir()  # unless somebody else's lie there

    def _publish(self, me: Holder, name: str) -> bool:
        """Put a lease there, unless there is one of that name."""
        temporary = self.folder / f"{TEMPORARY}{me.name}"
        try:
            (self.folder / f"{me.name}.alive").touch()
            with open(temporary, "xb") as file:
                file.write(msgspec.json.encode(me))
                self._open_to_all(file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, self.folder / name)
            except FileExistsError:
                return os.stat(temporary).st_nlink > 1  # it was made, and a network file system lost the answer
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._publish_without_links(me, name)
            fsync_dir(self.folder)
            return True
        finally:
            with suppress(OSError):
                temporary.unlink()

    def _publish_without_links(self, me: Holder, name: str) -> bool:
        """The same for file systems without hard links: a reader may see it before it is whole, and waits."""
        try:
            with open(self.folder / name, "xb") as file:
                file.write(msgspec.json.encode(me))
                self._open_to_all(file)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        return True


class Lease:
    """A lease that this process holds; renewed in the background until it is released."""

    def __init__(self, leases: Leases, me: Holder) -> None:
        self._leases = leases
        self.me = me
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="rankfeed-lease", daemon=True)
        # A builder may leave the process without file handles: some are kept for telling that, and for the end.
        with ExitStack() as reserve:
            for _ in range(_RESERVE):
                reserve.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            self._thread.start()
            self._reserve = reserve.pop_all()

    def _renew(self) -> None:
        folder = self._leases.folder
        path = folder / f"{self.me.name}.alive"
        sign = 0
        while not self._over.wait(RENEWED):
            sign += 1
            with suppress(OSError):  # told by `held`
                # Any change is a sign of life; the numbers owe nothing to a clock that may be moved.
                # Two seconds apart, which every file system can tell.
                try:
                    os.utime(path, ns=(sign * 2_000_000_000,) * 2)
                except OSError as error:
                    if not is_gone(error):
                        raise
                    path.touch()  # removed by who cleans the disk up, say
            with suppress(OSError):
                if f"{self.me.name}.next" in os.listdir(folder):
                    (folder / f"{self.me.name}{_LOST}").touch()

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that claimed it: not a child that it forked."""
        return os.getpid() == self.me.pid

    def held(self) -> bool:
        """Whether this process still is the holder: nobody has taken it for dead."""
        holder = self._leases.holder()
        return holder is not None and holder.name == self.me.name

    def is_lost(self) -> bool:
        """Whether others are known to have taken it, asked after an error: what cannot be looked up is not."""
        self._reserve.close()
        with suppress(OSError):
            return not self.held()
        return False

    def release(self) -> None:
        """Give it back: the whole chain, whose others are dead."""
        self._over.set()
        self._thread.join()
        self._reserve.close()
        with suppress(OSError):  # its own name is removed at least, see `Leases._forget`
            chain = self._leases.chain()
            if not chain or chain[-1].name != self.me.name:
                return  # somebody succeeded to it
            with suppress(OSError):
                self._leases.sweep(self.me)
            for name in [_FIRST, *(f"{holder.name}.next" for holder in chain[:-1])]:
                with suppress(OSError):
                    (self._leases.folder / name).unlink()
