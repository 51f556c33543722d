"""Why a build failed, written down so that every process of the job can raise it."""

from __future__ import annotations

import socket
import traceback
from pathlib import Path

import msgspec

from rankfeed.errors import PrepareError
from rankfeed.storage import write_atomic

_END = ".failed"


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
        attempt: which attempt of which launch it was.
    """

    kind: str
    text: str
    traceback: str
    who: str
    path: str
    attempt: str

    @classmethod
    def of(cls, error: BaseException, who: str, path: Path, attempt: str) -> Failure:
        """What there is to say of an exception."""
        text = "".join(traceback.format_exception(error))
        parts = (type(error).__name__, str(error) or "(no message)", text, who, str(path), attempt)
        return cls(*(part.encode(errors="replace").decode() for part in parts))

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


def find_failure(folder: Path, holders: set[str], attempt: str) -> Failure | None:
    """The failure of one of some holders, or of an attempt."""
    try:
        paths = sorted(folder.glob(f"*{_END}"))
    except OSError:
        return None
    for path in paths:
        try:
            failure = msgspec.json.decode(path.read_bytes(), type=Failure)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            continue
        if path.name.removesuffix(_END) in holders or (attempt and failure.attempt == attempt):
            return failure
    return None


def forget_failures(folder: Path) -> None:
    """Remove what failed builds left: another one succeeded."""
    for path in folder.glob(f"*{_END}"):
        path.unlink(missing_ok=True)


def cannot_write(error: OSError, path: Path) -> PrepareError:
    """The error for a folder that cannot be used; each process meets it by itself."""
    return PrepareError(
        "the data cannot be prepared here",
        found=error.strerror or error,
        where=f"{error.filename or path}, on {socket.gethostname()}",
        remedy="make room, or choose a folder that can be written",
    )
