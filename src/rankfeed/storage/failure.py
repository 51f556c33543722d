"""Records a failure in a file, so that an error of one process is raised by all processes of the job."""

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from rankfeed._util.process_info import process_age
from rankfeed.storage.commit import decodable, read_record, temporary_name, write_record
from rankfeed.storage.network_fs import stat_uncached
from rankfeed.topology.job import job_id, launch_id

_SUFFIX = ".failed"
#: Seconds for which a failure of another key is kept for processes that wait for it.
_KEPT = 3600.0
#: Seconds by which clocks of hosts may differ where they, and not a server, give files their times.
_CLOCK_SKEW = 5.0
#: Number of calls of this process for each path.
_calls: Counter[str] = Counter()


@decodable
class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as text: unpickling an exception could run code."""

    kind: str  # name of the exception's class
    text: str
    traceback: str
    owner: str  # the process
    path: str
    key: str
    attempt: str  # see `next_attempt`
    job: str  # id of the owner's job; empty if unknown

    @classmethod
    def of(cls, error: BaseException, owner: str, path: Path, key: str, attempt: str) -> "Failure":
        """The failure that an exception of this process describes."""
        try:
            text, trace = str(error) or "(no message)", "".join(traceback.format_exception(error))
        except Exception:  # an exception of any class
            text, trace = "(its message cannot be printed)", ""
        parts = (type(error).__name__, text, trace, owner, str(path), key, attempt, job_id())
        return cls(*(part.encode(errors="replace").decode() for part in parts))


def next_attempt(path: Path) -> str:
    """Name of this call, equal in all processes of a launch that make the same calls; empty without a launcher."""
    _calls[str(path)] += 1
    launch = launch_id()
    return f"{launch} {_calls[str(path)]}" if launch else ""


def write_failure(folder: Path, token: str, failure: Failure) -> None:
    """Record a failure under the token of the owner's lease; raises OSError."""
    write_record(folder / f"{token}{_SUFFIX}", failure)


def find_failure(
    folder: Path, key: str, attempt: str, takes_part: Callable[[str, Failure], bool]
) -> Failure | None:
    """The failure of this attempt, or of other work in which the caller takes part; None if there is none."""
    for path, failure in _failures(folder):
        if failure is None or failure.key != key:
            continue
        if takes_part(path.name.removesuffix(_SUFFIX), failure):
            return failure
        # Launches may have equal names: an attempt counts if this process had started before the failure.
        if attempt and failure.attempt == attempt and _is_newer_than_process(path, os.getpid()):
            return failure
    return None


def failed_tokens(folder: Path) -> set[str]:
    """Lease tokens of all failures."""
    return {path.name.removesuffix(_SUFFIX) for path, _ in _failures(folder)}


def forget_failures(folder: Path, key: str) -> None:
    """Remove the failures of a key after a success, and old ones; raises OSError."""
    for path, failure in _failures(folder):
        if failure is None or failure.key == key or abs(_age(path)) > _KEPT:
            path.unlink(missing_ok=True)


def _failures(folder: Path) -> Iterator[tuple[Path, Failure | None]]:
    """All failures in the order of their names; None if one cannot be read."""
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(folder.glob("[0-9a-f]" * 16 + _SUFFIX))
    for path in paths:
        failure = None
        with suppress(OSError):
            failure = read_record(path, Failure)
        yield path, failure


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
