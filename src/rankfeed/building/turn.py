"""A build by the process whose turn it is: into a folder of its own, committed by a rename, or told as failed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.building.failure import Failure, forget_failures, sweep_failures, write_failure
from rankfeed.building.lease import Lease
from rankfeed.building.prepared import look, refuse_strangers, seal
from rankfeed.building.replacing import commit, discard, remove, sweep
from rankfeed.errors import PrepareError
from rankfeed.topology.job import job_mark

Build = Callable[[Path], object]

#: What the name of a build's folder begins with.
BUILD = "build-"
_A_BUILD = re.compile(rf"{BUILD}.+-\d+-[0-9a-f]{{16}}-\d+")


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

    def begin(self) -> Path:
        """The same, for who cannot try again.

        Raises:
            PrepareError: there cannot be one; every process of the job raises that.
        """
        try:
            return self.fresh()
        except OSError as error:
            raise self.failed(error) from error

    def _sweep(self) -> None:
        builds = [path for path in self.folder.iterdir() if _A_BUILD.fullmatch(path.name)]
        # Asked once they are listed: while the lease was ours, no build of a successor was among them.
        if not self.lease.held():
            return
        for path in builds:
            discard(path)
        sweep(self.folder, self.path)
        sweep_failures(self.folder)

    def tidy(self) -> None:
        """Remove what others left; the data are there."""
        self._sweep()
        forget_failures(self.folder, self.key)

    def clear(self) -> None:
        """Remove what this process has built so far; not a child that it forked."""
        if self.lease.is_mine:
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
            retry=retry_if_exception_type((Exception, SystemExit)),
            reraise=True,
        )
        try:
            for one in tries:
                with one:
                    # Others may have taken this process for dead during the last try, or the pause after it.
                    if self._tries and not self.lease.held():
                        self.clear()
                        return False
                    build(self.fresh())
        except (Exception, SystemExit) as error:
            if not self.lease.is_mine:
                raise  # in a child that the builder forked, and in which nobody else has a part
            if self.lease.is_lost():
                self.clear()  # begun after the successor had swept
                return False
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
        if not self.lease.is_mine:
            raise PrepareError(
                "a child process that the builder forked came to the end of the build, which is not its own",
                where=f"process {os.getpid()}, forked by {me}",
                remedy="end it inside the build, by os._exit; or start it by multiprocessing",
            )
        try:
            seal(self.staging, self.key, me.host, time.monotonic() - self.began)
            refuse_strangers(self.path, look(self.path, self.key))
            if not self.lease.held():
                return False
            commit(self.staging, self.path, self.folder)
        except Exception as error:
            if self.lease.is_lost():
                return False
            raise self.failed(error) from error
        finally:
            self.clear()
        with suppress(OSError):  # the data are there, for all others too
            forget_failures(self.folder, self.key)
        return True

    def failed(self, error: Exception | SystemExit) -> PrepareError:
        """What every process raises, written down for the others."""
        self.clear()  # first: it may have filled the disk
        failure = Failure.of(error, str(self.lease.me), self.path, self.key, self.lease.me.attempt, job_mark())
        with suppress(OSError):  # they meet the same by themselves
            write_failure(self.folder, self.lease.me.name, failure)
        return failure.error(error)
