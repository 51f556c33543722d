"""Why a build failed, written down so that every process of the job can raise it."""

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
from rankfeed.building.target import control_folder, may_write
from rankfeed.errors import PrepareError
from rankfeed.storage import stat_uncached, write_atomic
from rankfeed.storage.commit import TEMPORARY, temporary_name
from rankfeed.storage.decodable import decodable
from rankfeed.topology.job import ONE_HOST, launch_id

_END = ".failed"
_A_FAILURE = re.compile(rf"[0-9a-f]{{16}}\{_END}")
_HALF_A_FAILURE = re.compile(rf"\{TEMPORARY}.+-\d+-[0-9a-f]{{8}}")
#: Seconds for which a failure is kept for those who still wait for it.
_REMEMBERED = 3600.0
#: Seconds by which hosts' clocks may differ where it is they that give files their times, and not a server.
_DIFFER = 5.0
#: How often this process has prepared each path: its part in the name of an attempt.
_turns: Counter[str] = Counter()


class BuilderTraceback(Exception):
    """The traceback of a builder in another process, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@decodable
class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a build ended.

    Args:
        kind: name of the exception's type.
        text: what it said.
        traceback: its traceback.
        who: the process that built.
        path: of what it should have built.
        key: of what it should have built.
        attempt: which attempt of which launch it was.
        job: whose it was, as `job_id`.
    """

    kind: str
    text: str
    traceback: str
    who: str
    path: str
    key: str
    attempt: str
    job: str

    @classmethod
    def of(cls, error: BaseException, who: str, path: Path, key: str, attempt: str, job: str) -> Failure:
        """What there is to say of an exception."""
        try:
            said, text = str(error) or "(no message)", "".join(traceback.format_exception(error))
        except Exception:  # an exception may be of any kind
            said, text = "(its message cannot be had)", ""
        parts = (type(error).__name__, said, text, who, str(path), key, attempt, job)
        return cls(*(each.encode(errors="replace").decode() for each in parts))

    def error(self, cause: BaseException | None = None) -> PrepareError:
        """What every process raises: the same summary, with the builder's traceback as its cause."""
        error = PrepareError(
            f"preparing the data failed: {self.kind}: {self.text}",
            where=f"{self.path}, built by {self.who}",
            remedy="see the traceback of the builder above; started again, the job builds anew",
        )
        error.__cause__ = BuilderTraceback(self.traceback) if cause is None else cause
        return error


def next_attempt(path: Path) -> str:
    """A name for this call, the same in all processes of a launch that call alike; empty where nobody says."""
    _turns[str(path)] += 1
    launch = launch_id()
    return f"{launch} {_turns[str(path)]}" if launch else ""


def write_failure(folder: Path, holder: str, failure: Failure) -> None:
    """Leave a failure for those who wait for a holder, and for late comers of its attempt.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(folder / f"{holder}{_END}", msgspec.json.encode(failure))


def find_failure(folder: Path, holders: set[str], attempt: str, job: str, key: str) -> Failure | None:
    """The failure of a build of this key, by one of some holders or in an attempt that this process belongs to.

    It belongs to one only if it was there already when the build failed: launches may be called alike. That of
    another launch is not its own, though it waited: of its ranks, those that come later have not, and would build.
    """
    for path, failure in _failures(folder):
        if failure is None or failure.key != key:
            continue
        late = bool(attempt) and failure.attempt == attempt
        waited = path.name.removesuffix(_END) in holders and not _differ(failure.job, job)
        if waited or (late and _is_of_my_time(path, os.getpid())):
            return failure
    return None


def _differ(one: str, other: str) -> bool:
    """Whether two marks are of two jobs, both being the same in all processes of a job."""
    return len({each for each in (one, other) if each and not each.startswith(ONE_HOST)}) > 1


def forget_failures(folder: Path, key: str) -> None:
    """Remove what failed builds of a key left, since another one succeeded; and what is old.

    Raises:
        OSError: it cannot be removed.
    """
    for path, failure in _failures(folder):
        if failure is None or failure.key == key or abs(_age(path)) > _REMEMBERED:
            path.unlink(missing_ok=True)


def sweep_failures(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote a failure down; for who holds the lease."""
    for path in folder.iterdir():
        if _HALF_A_FAILURE.fullmatch(path.name):
            with suppress(OSError):  # another user's, it may be, who alone can remove it: it harms nobody
                path.unlink()


def _failures(folder: Path) -> Iterator[tuple[Path, Failure | None]]:
    """Failures that were written down, in the order of their names; None for one that cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if _A_FAILURE.fullmatch(name))
    except OSError:
        return
    for name in names:
        try:
            yield folder / name, msgspec.json.decode((folder / name).read_bytes(), type=Failure)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            yield folder / name, None


@cache
def _is_of_my_time(path: Path, pid: int) -> bool:
    """Whether a failure happened since this process, of that number, was started; False where nothing tells.

    Two spans of time are compared, and no clocks: the failure's by the file system's, the process's by its host's.
    """
    with suppress(OSError):
        return -_DIFFER < _age(path) < process_age()
    return False


def _age(path: Path) -> float:
    """Seconds since a file was written, by whatever gives files of its folder their times: a server, or the host.

    Raises:
        OSError: it is gone, or nothing can be written beside it.
    """
    probe = temporary_name(path)
    try:
        with open(probe, "xb") as file:
            return os.fstat(file.fileno()).st_mtime - stat_uncached(path).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def cannot_write(error: OSError, path: Path) -> PrepareError:
    """The error for a folder that cannot be used; each process meets it by itself."""
    folder = control_folder(path)
    remedy = "make room, or choose a folder that can be written"
    if isinstance(error, PermissionError) and folder.is_dir():
        closed = folder if not may_write(folder) else Path(error.filename or folder)
        if closed == folder or (closed.exists() and not os.access(closed, os.R_OK)):
            remedy = f"have {_owner(closed)}, whose it is, open {closed} to you or remove it"
            remedy += "; or choose another folder"
    return PrepareError(
        "the data cannot be prepared here",
        found=error.strerror or error,
        where=f"{error.filename or path}, on {socket.gethostname()}",
        remedy=remedy,
    )


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:  # an account that this host has not
        return f"user {path.stat().st_uid}"
