"""A build by the process whose turn it is: into a folder of its own, committed by a rename, or told as failed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.building.failure import Failure, forget_failures, write_failure
from rankfeed.building.lease import Lease
from rankfeed.building.prepared import OLD, commit, look, refuse_strangers, remove, seal
from rankfeed.errors import PrepareError

Build = Callable[[Path], object]

#: What the name of a build's folder begins with.
BUILD = "build-"


@dataclass
class Turn:
    """A build by this process, which holds the lease.

    Args:
        path: what is built.
        folder: where leases and unfinished builds lie.
        key: of what is built.
        lease: held.
    """

    path: Path
    folder: Path
    key: str
    lease: Lease
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        me = self.lease.me
        self._tries = 0
        self._name = f"{BUILD}{me.host}-{me.pid}-{me.name}"
        self.staging = self.folder / self._name

    def fresh(self) -> Path:
        """An empty folder to build into; what dead builders left is removed."""
        self._sweep()
        self._tries += 1
        self.staging = self.folder / f"{self._name}-{self._tries}"
        self.staging.mkdir()
        return self.staging

    def _sweep(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith(BUILD):
                # Out of the way in one step: whoever wakes up and still means to commit it finds nothing.
                aside = self.folder / f"{OLD}{secrets.token_hex(4)}"
                with suppress(OSError):
                    os.rename(path, aside)
                    remove(aside)
            elif path.name.startswith(OLD):
                remove(path)

    def tidy(self) -> None:
        """Remove what others left; the data are there."""
        self._sweep()
        forget_failures(self.folder, self.key)

    def clear(self) -> None:
        """Remove what this process has built so far; not a child that it forked."""
        if os.getpid() == self.lease.me.pid:
            remove(self.staging)

    def run(self, build: Build, retries: int) -> bool:
        """Build; whether that counts (see :meth:`finish`).

        Raises:
            PrepareError: it failed; every process of the job raises that.
        """
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        tries = Retrying(
            stop=stop_after_attempt(retries + 1),
            wait=wait_random_exponential(multiplier=0.5, max=30),
            retry=retry_if_exception_type(Exception),
            reraise=True,
        )
        try:
            for one in tries:
                with one:
                    build(self.fresh())
        except Exception as error:
            if not self.lease.held():
                return False  # its folder was taken away under it
            raise self.failed(error) from error
        except BaseException:  # whoever interrupts it says nothing about the data: another one builds
            self.clear()
            raise
        return self.finish()

    def finish(self) -> bool:
        """Commit what was built. False where others took this process for dead meanwhile: theirs counts.

        Raises:
            PrepareError: it cannot be written; every process of the job raises that.
        """
        me = self.lease.me
        try:
            seal(self.staging, self.key, me.host, time.monotonic() - self.began)
            refuse_strangers(self.path, look(self.path, self.key))
            if not self.lease.held():
                return False
            commit(self.staging, self.path, self.folder)
            forget_failures(self.folder, self.key)
        except Exception as error:
            if not self.lease.held():
                return False
            raise self.failed(error) from error
        finally:
            self.clear()
        return True

    def failed(self, error: Exception) -> PrepareError:
        """What every process raises, written down for the others."""
        self.clear()  # first: it may have filled the disk
        failure = Failure.of(error, str(self.lease.me), self.path, self.key, self.lease.me.attempt)
        with suppress(OSError):  # they meet the same by themselves
            write_failure(self.folder, self.lease.me.name, failure)
        return failure.error(error)
