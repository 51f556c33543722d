"""Failures of builds, written to files so that every process of the job raises the builder's error."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from rankfeed._util.process_info import process_age
from rankfeed.errors import PrepareError
from rankfeed.prepare.layout import control_dir, may_write
from rankfeed.storage import stat_uncached
from rankfeed.storage.commit import read_record, temporary_name, write_record
from rankfeed.storage.decodable import decodable
from rankfeed.topology.job import ONE_HOST, is_same_job, job_id, launch_id

_SUFFIX = ".failed"
_FAILURE = re.compile(rf"[0-9a-f]{{16}}\{_SUFFIX}")
#: Seconds for which a failure of another key is kept for processes that wait for it.
_KEPT = 3600.0
#: Seconds by which clocks of hosts may differ where they, and not a server, give files their times.
_CLOCK_SKEW = 5.0
#: Number of calls of this process for each path.
_calls: Counter[str] = Counter()


class BuilderTraceback(Exception):
    """Traceback of the build in another process, as the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@decodable
class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A failed build, as text: unpickling an exception could run code."""

    kind: str  # name of the exception's class
    text: str
    traceback: str
    builder: str  # the process
    path: str
    key: str
    attempt: str  # see `next_attempt`
    job: str  # id of the builder's job; empty if unknown

    @classmethod
    def of(cls, error: BaseException, builder: str, path: Path, key: str, attempt: str) -> Failure:
        """The failure that an exception of this process describes."""
        try:
            text, trace = str(error) or "(no message)", "".join(traceback.format_exception(error))
        except Exception:  # an exception of any class
            text, trace = "(its message cannot be printed)", ""
        parts = (type(error).__name__, text, trace, builder, str(path), key, attempt, job_id())
        return cls(*(each.encode(errors="replace").decode() for each in parts))

    def error(self, cause: BaseException | None = None) -> PrepareError:
        """The error that every process raises, with the builder's traceback as its cause."""
        error = PrepareError(
            f"preparing the data failed: {self.kind}: {self.text}",
            where=f"{self.path}, built by {self.builder}",
            remedy="see the traceback of the build above; the next job builds again",
        )
        error.__cause__ = BuilderTraceback(self.traceback) if cause is None else cause
        return error


def next_attempt(path: Path) -> str:
    """Name of this call, equal in all processes of a launch that make the same calls; empty without a launcher."""
    _calls[str(path)] += 1
    launch = launch_id()
    return f"{launch} {_calls[str(path)]}" if launch else ""


def write_failure(control: Path, token: str, failure: Failure) -> None:
    """Record a failure under the token of the builder's lease; raises OSError."""
    write_record(control / f"{token}{_SUFFIX}", failure)


def raise_failure(control: Path, awaited: set[str], attempt: str, key: str) -> None:
    """Raise the failure of a build that this process takes part in.

    That is a build it waited for (whose lease token is in ``awaited``), unless another job ran it, or
    one of the same attempt. Parent processes do not identify a job here: each rank may have a shell of its own.
    Launches may have equal names, so an attempt counts only if this process had started before the build failed.
    """
    for path, failure in _failures(control):
        if failure is None or failure.key != key:
            continue
        late = bool(attempt) and failure.attempt == attempt
        mine = job_id()
        is_other = not mine.startswith(ONE_HOST) and is_same_job(failure.job, mine) is False
        waited = path.name.removesuffix(_SUFFIX) in awaited and not is_other
        if waited or (late and _is_newer_than_process(path, os.getpid())):
            raise failure.error()


def forget_failures(control: Path, key: str) -> None:
    """Remove the failures of a key after a successful build, and old ones; raises OSError."""
    for path, failure in _failures(control):
        if failure is None or failure.key == key or abs(_age(path)) > _KEPT:
            path.unlink(missing_ok=True)


def _failures(control: Path) -> Iterator[tuple[Path, Failure | None]]:
    """All failures in the order of their names; None if one cannot be read."""
    names: list[str] = []
    with suppress(OSError):
        names = sorted(name for name in os.listdir(control) if _FAILURE.fullmatch(name))
    for name in names:
        failure = None
        with suppress(OSError):
            failure = read_record(control / name, Failure)
        yield control / name, failure


@cache
def _is_newer_than_process(path: Path, pid: int) -> bool:
    """Whether a file was written since this process, of that PID, started. Compares ages, not clocks of hosts."""
    with suppress(OSError):
        return -_CLOCK_SKEW < _age(path) < process_age()
    return False


def _age(path: Path) -> float:
    """Seconds since a file was written, by the clock that gives files of its directory their times."""
    probe = temporary_name(path)
    try:
        with open(probe, "xb") as file:
            return os.fstat(file.fileno()).st_mtime - stat_uncached(path).st_mtime
    finally:
        probe.unlink(missing_ok=True)


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
