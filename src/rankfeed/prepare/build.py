"""Runs a build in the process that holds the lease: in a staging directory, then published or recorded as failed.

Every process of the job raises the recorded failure.
"""

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed.errors import PrepareError
from rankfeed.prepare.marker import inspect_dir, refuse_foreign_files, write_marker
from rankfeed.prepare.swap import BUILD_PREFIX, control_dir, discard, may_write, remove, remove_leftovers, swap_dir
from rankfeed.storage.commit import remove_temporaries
from rankfeed.storage.failure import Failure, find_failure, forget_failures, write_failure
from rankfeed.storage.lease import HeldLease
from rankfeed.topology.job import ONE_HOST, is_same_job, job_id


def build_error(failure: Failure, cause: BaseException | None = None) -> PrepareError:
    """The error that every process raises, with the builder's traceback as its cause."""
    error = PrepareError(
        f"preparing the data failed: {failure.kind}: {failure.text}",
        where=f"{failure.path}, built by {failure.owner}",
        remedy="see the traceback of the build above; the next job builds again",
    )
    error.__cause__ = RemoteTraceback(failure.traceback) if cause is None else cause
    return error


def raise_failure(control: Path, awaited: set[str], attempt: str, key: str) -> None:
    """Raise the failure of a build of this attempt, or of one that this process waited for.

    ``awaited`` has the lease tokens of those; one of another job is not meant. Parent processes do not identify a
    job here: each rank may have a shell of its own.
    """
    own_job = job_id()

    def takes_part(token: str, failure: Failure) -> bool:
        is_other = not own_job.startswith(ONE_HOST) and is_same_job(failure.job, own_job) is False
        return token in awaited and not is_other

    failure = find_failure(control, key, attempt, takes_part)
    if failure is not None:
        raise build_error(failure)


def cannot_prepare(error: OSError, path: Path) -> PrepareError:
    """The error if the directory, or the control directory beside it, cannot be used."""
    control = control_dir(path)
    remedy = "free disk space, or choose a directory that can be written"
    if isinstance(error, PermissionError) and control.is_dir():
        closed = control if not may_write(control) else Path(error.filename or control)
        if closed == control or (closed.exists() and not os.access(closed, os.R_OK)):
            user = f"user {closed.stat().st_uid}"
            with suppress(KeyError):  # an account that this host does not have
                user = closed.owner()
            remedy = f"ask {user}, the owner of {closed}, for access or to remove it; or choose another directory"
    return PrepareError(
        "cannot prepare the directory",
        found=error.strerror or error,
        where=f"{error.filename or path}, on {socket.gethostname()}",
        remedy=remedy,
    )


Build = Callable[[Path], object]

_BUILD = re.compile(rf"{BUILD_PREFIX}.+-\d+-[0-9a-f]{{16}}-\d+")


class BuildAttempt:
    """A build by this process, which holds the lease; ``attempt`` as of `next_attempt`."""

    def __init__(self, path: Path, control: Path, key: str, lease: HeldLease, attempt: str = "") -> None:
        self.path, self.control, self.key, self.lease, self.attempt = path, control, key, lease, attempt
        self._began = time.monotonic()
        self._tries = 0
        self._name = f"{BUILD_PREFIX}{lease.owner.host}-{lease.owner.pid}-{lease.owner.token}"
        self.staging = control / self._name

    def new_staging_dir(self) -> Path:
        """An empty directory to build into; leftovers of processes that were killed are removed first."""
        self.remove_leftovers()
        self._tries += 1
        self.staging = self.control / f"{self._name}-{self._tries}"
        self.staging.mkdir()
        return self.staging

    def begin(self) -> Path:
        """The same for a ``with`` block: an error is recorded for all processes of the job and raised."""
        try:
            return self.new_staging_dir()
        except OSError as error:
            raise self.failed(error) from error

    def remove_leftovers(self) -> None:
        """Remove what processes left that were killed."""
        builds = [path for path in self.control.iterdir() if _BUILD.fullmatch(path.name)]
        # Checked after listing: as long as the lease was held, no build of a successor was among them.
        if not self.lease.is_held():
            return
        for path in builds:
            discard(path)
        remove_leftovers(self.control, self.path)
        remove_temporaries(self.control)

    def discard(self) -> None:
        """Remove what this process has built; a forked child does nothing."""
        if self.lease.is_current_process:
            remove(self.staging)

    def run(self, build: Build, retries: int) -> bool:
        """Build and publish; False if another process took over meanwhile."""
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

        tries = Retrying(
            stop=stop_after_attempt(retries + 1),
            wait=wait_random_exponential(multiplier=0.5, max=30),
            # Not in a child that the build function forked: it would remove what its parent builds.
            retry=retry_if_exception(
                lambda error: isinstance(error, (Exception, SystemExit)) and self.lease.is_current_process
            ),
            reraise=True,
        )
        try:
            for attempt in tries:
                with attempt:
                    # The lease may have been lost during the last try, or the pause after it.
                    if self._tries and not self.lease.is_held():
                        self.discard()
                        return False
                    build(self.new_staging_dir())
        except BaseException as error:
            if not self.end(error):
                return False
            raise
        return self.publish()

    def end(self, error: BaseException) -> bool:
        """End a build that raised; False if another process took over. Raises PrepareError if the build failed."""
        if not self.lease.is_current_process:
            return True  # in a child that the build function forked
        if not isinstance(error, (Exception, SystemExit)):
            self.discard()  # an interrupt says nothing about the data: another process builds
            return True
        if self.lease.is_lost():
            self.discard()  # it may have been created after the successor removed its predecessors'
            return False
        raise self.failed(error) from error

    def publish(self) -> bool:
        """Write the marker and rename the build to its place; False if another process took over meanwhile."""
        if not self.lease.is_current_process:
            raise PrepareError(
                "a child process forked by the build function returned from it",
                where=f"process {os.getpid()}, forked by {self.lease.owner}",
                remedy="end the child inside the function by os._exit, or start it by multiprocessing",
            )
        try:
            write_marker(self.staging, self.key, self.lease.owner.host, time.monotonic() - self._began)
            refuse_foreign_files(self.path, inspect_dir(self.path, self.key))
            if not self.lease.is_held():
                return False
            swap_dir(self.staging, self.path, self.control)
        except Exception as error:
            return self.end(error)
        finally:
            self.discard()
        with suppress(OSError):  # the directory is prepared, for all other processes too
            forget_failures(self.control, self.key)
        return True

    def failed(self, error: Exception | SystemExit) -> PrepareError:
        """Record a failure; the error that every process raises."""
        self.discard()  # first: it may have filled the disk
        failure = Failure.of(error, str(self.lease.owner), self.path, self.key, self.attempt)
        with suppress(OSError):  # the other processes will meet the same error
            write_failure(self.control, self.lease.owner.token, failure)
        return build_error(failure, error)
