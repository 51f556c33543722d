"""Errors of a build, raised by every process of the job."""

import os
import socket
from pathlib import Path

from rankfeed.errors import PrepareError
from rankfeed.prepare.layout import control_dir, may_write
from rankfeed.storage.failure import Failure, find_failure
from rankfeed.topology.job import ONE_HOST, is_same_job, job_id


class BuilderTraceback(Exception):
    """Traceback of the build in another process, as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def build_error(failure: Failure, cause: BaseException | None = None) -> PrepareError:
    """The error that every process raises, with the builder's traceback as its cause."""
    error = PrepareError(
        f"preparing the data failed: {failure.kind}: {failure.text}",
        where=f"{failure.path}, built by {failure.owner}",
        remedy="see the traceback of the build above; the next job builds again",
    )
    error.__cause__ = BuilderTraceback(failure.traceback) if cause is None else cause
    return error


def raise_failure(control: Path, awaited: set[str], attempt: str, key: str) -> None:
    """Raise the failure of a build of this attempt, or of one that this process waited for.

    ``awaited`` has the lease tokens of those; one of another job is not meant. Parent processes do not identify a
    job here: each rank may have a shell of its own.
    """
    mine = job_id()

    def takes_part(token: str, failure: Failure) -> bool:
        is_other = not mine.startswith(ONE_HOST) and is_same_job(failure.job, mine) is False
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
            remedy = f"ask {_user(closed)}, who owns {closed}, to open it to you or to remove it"
            remedy += "; or choose another directory"
    return PrepareError(
        "cannot prepare the directory",
        found=error.strerror or error,
        where=f"{error.filename or path}, on {socket.gethostname()}",
        remedy=remedy,
    )


def _user(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # an account that this host does not have
        return f"user {path.stat().st_uid}"
