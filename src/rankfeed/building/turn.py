"""A build by the process whose turn it is: into a folder of its own, committed by a rename, or told as failed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.building.failure import Failure, forget_failures, write_failure
from rankfeed.building.lease import Lease
from rankfeed.building.prepared import OLD, State, commit, look, seal
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
        self.staging = self.folder / f"{BUILD}{self.lease.me.host}-{self.lease.me.pid}-{self.lease.me.name}"

    def fresh(self) -> Path:
        """An empty folder to build into; what dead builders left is removed."""
        self._sweep()
        self.staging.mkdir()
        return self.staging

    def _sweep(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith((BUILD, OLD)):
                shutil.rmtree(path, ignore_errors=True)

    def tidy(self) -> None:
        """Remove what others left; the data are there."""
        self._sweep()
        forget_failures(self.folder)

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
            shutil.rmtree(self.staging, ignore_errors=True)
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
            if not self.lease.held():
                return False
            if look(self.path, self.key) is State.FOREIGN:
                raise PrepareError("others put files where the data belong", where=self.path)
            commit(self.staging, self.path, self.folder)
            forget_failures(self.folder)
        except Exception as error:
            if not self.lease.held():
                return False
            raise self.failed(error) from error
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
        return True

    def failed(self, error: Exception) -> PrepareError:
        """What every process raises, written down for the others."""
        shutil.rmtree(self.staging, ignore_errors=True)  # first: it may have filled the disk
        failure = Failure.of(error, str(self.lease.me), self.path, self.lease.me.attempt)
        with suppress(OSError):  # they meet the same by themselves
            write_failure(self.folder, self.lease.me.name, failure)
        return failure.error(error)
