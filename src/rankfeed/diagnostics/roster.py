"""All processes of a launch exchange their reports through small files, without a network.

Rank 0 collects the registrations of the others and publishes one reply, so that all reach the same verdict.
Files of an earlier launch are recognised by a handshake: every process has a random token; rank 0 lists the tokens
that it has seen, a process acknowledges only a rank 0 that lists its own token, and rank 0 counts only processes
that acknowledge it.
"""

import hashlib
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rankfeed.errors import RankfeedError, TopologyError
from rankfeed.storage.commit import TEMPORARY, decodable, write_record
from rankfeed.storage.network_fs import refresh_path
from rankfeed.topology.agreement import ProcessReport, format_ranks, missing_ranks

#: Seconds to wait, after all ranks have come, for a process that should not exist.
_SETTLE = 1.0
#: Longest wait of a process that does not know its rank, and of rank 0 for the others to read its reply.
_LINGER = 10.0
#: Seconds between refreshes of a network file system's caches.
_REFRESH = 2.0
_Record = TypeVar("_Record", bound=msgspec.Struct)


@decodable
class Registration(msgspec.Struct, frozen=True):
    """What a process reports, and the tokens of the processes of rank 0 that it acknowledges."""

    token: str
    report: ProcessReport
    acknowledged: list[str] = []


@decodable
class RosterReply(msgspec.Struct, frozen=True):
    """The tokens that rank 0 has seen; in the final reply also the reports of all that acknowledged it."""

    token: str
    seen: list[str]
    final: bool = False
    reports: list[ProcessReport] = []


def roster_directory(launch: str) -> str:
    """Name of the directory for a launch, identified by a text that is the same on all its processes.

    Examples:
        >>> roster_directory("SLURM_JOB_ID=7 SLURM_STEP_ID=0")
        '.rankfeed-topology-f87acd14'
    """
    return f".rankfeed-topology-{hashlib.sha256(launch.encode()).hexdigest()[:8]}"


def exchange_reports(directory: Path, report: ProcessReport, timeout: float) -> list[ProcessReport]:
    """Exchange reports with all other processes of this launch.

    Args:
        directory: visible to all of them and used by no other launch; created here, removed by rank 0 at the end.
        report: of this process.
        timeout: seconds to wait for rank 0, and then for all the others.

    Returns:
        the reports in the order of ranks, the same on all processes; those that did not come in time are absent.

    Raises:
        TopologyError: rank 0 did not come, or disappeared, or the directory cannot be written.
    """
    roster = _Roster(directory, report, timeout)
    try:
        roster.registrations.mkdir(parents=True, exist_ok=True)
        roster.replies.mkdir(exist_ok=True)
        is_first = report.topology is not None and report.topology.rank == 0
        return roster.coordinate() if is_first else roster.participate()
    except OSError as error:
        raise TopologyError(
            "cannot exchange reports with the other ranks",
            expected="a directory that all hosts see and can write to",
            found=error,
            where=directory,
            remedy="choose another one with --folder",
        ) from error


class _Roster:
    """This process in a roster."""

    def __init__(self, directory: Path, report: ProcessReport, timeout: float) -> None:
        self.registrations, self.replies = directory / "registrations", directory / "replies"
        self._directory, self._report, self._timeout = directory, report, timeout
        self._token, self._acknowledged, self._refreshed = uuid.uuid4().hex, list[str](), 0.0
        size = 1 if report.topology is None else report.topology.world_size
        self._interval = max(0.05, size / 500)  # all ranks read from one file system

    def coordinate(self) -> list[ProcessReport]:
        """As rank 0: the final reports."""
        deadline, settled = time.monotonic() + self._timeout, 0.0
        seen: list[str] = []
        while True:
            registered = self._read(self.registrations, Registration)
            # Another process may have rank 0 too: each acknowledges the other, and the first final reply counts.
            if (reports := self._acknowledge()) is not None:
                return reports
            present = {
                token: registration.report
                for token, registration in registered.items()
                if self._token in registration.acknowledged
            }
            present[self._token] = self._report
            if sorted(registered) != seen:
                seen = sorted(registered)
                write_record(self._path(self.replies), RosterReply(self._token, seen))
            sizes = (each.topology.world_size for each in present.values() if each.topology is not None)
            now = time.monotonic()
            settled = settled or now if len(present) >= max(sizes, default=1) else 0.0
            if now > deadline or (settled and now > settled + _SETTLE):
                break
            time.sleep(self._interval)
        reports = sorted(present.values(), key=_order)
        write_record(self._path(self.replies), RosterReply(self._token, sorted({*seen, *present}), True, reports))
        self._leave()
        self._remove([token for token in present if token != self._token])
        return reports

    def participate(self) -> list[ProcessReport]:
        """As any other process: the final reports."""
        patience = min(self._timeout, _LINGER) if self._report.topology is None else self._timeout
        deadline = time.monotonic() + patience
        self._register([])
        while True:
            was_alone = not self._acknowledged
            if (reports := self._acknowledge()) is not None:
                return reports
            if was_alone and self._acknowledged:  # rank 0 is alive and waits for the others
                deadline = time.monotonic() + self._timeout + _LINGER
            if time.monotonic() > deadline:
                raise self._without_rank_0(patience)
            time.sleep(self._interval)

    def _acknowledge(self) -> list[ProcessReport] | None:
        """Acknowledge all processes of rank 0 that have seen this one; the final reports if there are any."""
        replies = [each for each in self._read(self.replies, RosterReply).values() if self._token in each.seen]
        for reply in replies:
            if reply.final and self._report in reply.reports:
                self._leave()
                return reply.reports
        is_first = self._report.topology is not None and self._report.topology.rank == 0
        tokens = sorted({reply.token for reply in replies} | ({self._token} if is_first else set()))
        if tokens != self._acknowledged:
            self._register(tokens)
        return None

    def _register(self, acknowledged: list[str]) -> None:
        self._acknowledged = acknowledged
        write_record(self._path(self.registrations), Registration(self._token, self._report, acknowledged))

    def _leave(self) -> None:
        """Remove the registration: the reply was read."""
        with suppress(OSError):
            self._path(self.registrations).unlink()

    def _path(self, directory: Path) -> Path:
        return directory / f"{self._token}.json"

    def _read(self, directory: Path, kind: type[_Record]) -> Mapping[str, _Record]:
        """The records in a directory by token."""
        now = time.monotonic()
        if now > self._refreshed + _REFRESH:
            self._refreshed = now
            for each in (self.registrations, self.replies):
                refresh_path(each / "refresh")
        found = {}
        for path in directory.glob("*.json"):
            # Removed meanwhile, or written by another version, or invalid.
            with suppress(OSError, msgspec.DecodeError, RankfeedError):
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
        return found

    def _remove(self, readers: list[str]) -> None:
        """Remove the directory when all readers have left; nothing but our own files is removed."""
        deadline = time.monotonic() + min(self._timeout, _LINGER)
        while time.monotonic() < deadline:
            if not any((self.registrations / f"{token}.json").exists() for token in readers):
                break
            time.sleep(self._interval)
        with suppress(OSError):
            for directory in (self.registrations, self.replies):
                for path in (*directory.glob("*.json"), *directory.glob(f"{TEMPORARY}*")):
                    path.unlink(missing_ok=True)
                directory.rmdir()
            self._directory.rmdir()

    def _without_rank_0(self, patience: float) -> TopologyError:
        present = [each.report for each in self._read(self.registrations, Registration).values()]
        size = 0 if self._report.topology is None else self._report.topology.world_size
        absent = format_ranks(missing_ranks(present, size) or [0])
        what = "disappeared" if self._acknowledged else f"did not report within {patience:.0f} s"
        return TopologyError(
            f"rank 0 {what}",
            expected=f"reports of {size} processes in one directory",
            found=f"{len(present)}, without {absent}",
            where=f"{self._report.name}, in {self._directory}",
            remedy="use a directory that all hosts see (--folder), and the same name of the launch on all of them "
            "(--job NAME); or the other processes do not know that they are several ranks",
        )


def _order(report: ProcessReport) -> tuple[int, str, int]:
    return (1 << 62 if report.topology is None else report.topology.rank), report.host, report.pid
