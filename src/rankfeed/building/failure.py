"""Why a build failed, written down so that every process of the job can raise it."""

from __future__ import annotations

import socket
import time
import traceback
from pathlib import Path

import msgspec

from rankfeed.errors import PrepareError
from rankfeed.storage import write_atomic
from rankfeed.topology.job import born

_END = ".failed"
#: Seconds for which a failure is kept for those who still wait for it.
_REMEMBERED = 3600.0


class BuilderTraceback(Exception):
    """The traceback of a builder in another process, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


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
        when: seconds since 1970.
    """

    kind: str
    text: str
    traceback: str
    who: str
    path: str
    key: str
    attempt: str
    when: float

    @classmethod
    def of(cls, error: BaseException, who: str, path: Path, key: str, attempt: str) -> Failure:
        """What there is to say of an exception."""
        try:
            said, text = str(error) or "(no message)", "".join(traceback.format_exception(error))
        except Exception:  # an exception may be of any kind
            said, text = "(its message cannot be had)", ""
        parts = (type(error).__name__, said, text, who, str(path), key, attempt)
        kind, said, text, who, place, key, attempt = (each.encode(errors="replace").decode() for each in parts)
        return cls(kind, said, text, who, place, key, attempt, time.time())

    def error(self, cause: BaseException | None = None) -> PrepareError:
        """What every process raises: the same summary, with the builder's traceback as its cause."""
        error = PrepareError(
            f"preparing the data failed: {self.kind}: {self.text}",
            where=f"{self.path}, built by {self.who}",
            remedy="see the traceback of the builder above; started again, the job builds anew",
        )
        error.__cause__ = BuilderTraceback(self.traceback) if cause is None else cause
        return error


def write_failure(folder: Path, holder: str, failure: Failure) -> None:
    """Leave a failure for those who wait for a holder, and for late comers of its attempt.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(folder / f"{holder}{_END}", msgspec.json.encode(failure))


def find_failure(folder: Path, holders: set[str], attempt: str, key: str) -> Failure | None:
    """The failure of a build of this key, by one of some holders or in an attempt that this process belongs to.

    It belongs to one only if it was there already when the build failed: launches may be called alike.
    """
    try:
        paths = sorted(folder.glob(f"*{_END}"))
    except OSError:
        return None
    for path in paths:
        try:
            failure = msgspec.json.decode(path.read_bytes(), type=Failure)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            continue
        waited_for = path.name.removesuffix(_END) in holders
        late = bool(attempt) and failure.attempt == attempt and failure.when > born()
        if failure.key == key and (waited_for or late):
            return failure
    return None


def forget_failures(folder: Path, key: str) -> None:
    """Remove what failed builds of a key left, since another one succeeded; and what is old."""
    for path in folder.glob(f"*{_END}"):
        try:
            failure = msgspec.json.decode(path.read_bytes(), type=Failure)
            over = failure.key == key or abs(time.time() - failure.when) > _REMEMBERED
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            over = True
        if over:
            path.unlink(missing_ok=True)


def cannot_write(error: OSError, path: Path) -> PrepareError:
    """The error for a folder that cannot be used; each process meets it by itself."""
    return PrepareError(
        "the data cannot be prepared here",
        found=error.strerror or error,
        where=f"{error.filename or path}, on {socket.gethostname()}",
        remedy="make room, or choose a folder that can be written",
    )
