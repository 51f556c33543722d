"""All processes of a launch exchange their reports through small files, without a network.

Each process registers under a random token, and changes the time of its file while it waits. Rank 0 counts the
registrations that change, since others belong to an earlier launch, and publishes one reply, so that all reach the
same verdict. A process accepts a reply that lists its token.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rankfeed.errors import RankfeedError, TopologyError
from rankfeed.storage.commit import TEMPORARY, decodable, write_record
from rankfeed.storage.lease import TICK_NS, StallDetector
from rankfeed.storage.network_fs import refresh_path, stat_uncached
from rankfeed.topology.agreement import ProcessReport, format_ranks, missing_ranks

#: Seconds to wait, after all ranks have registered, for a process that should not exist.
_SETTLE = 1.0
#: Longest wait of a process that does not know its rank, for a silent rank 0, and of rank 0 for its readers.
_LINGER = 10.0
#: Seconds between refreshes of a network file system's caches.
_REFRESH = 2.0


@decodable
class RosterRecord(msgspec.Struct, frozen=True):
    """Tokens of processes and their reports: of one in a registration, of all in a reply."""

    tokens: list[str]
    reports: list[ProcessReport]


def roster_directory(launch: str) -> str:
    """Name of the directory for a launch, identified by a text that is the same on all its processes."""
    return f".rankfeed-topology-{hashlib.sha256(launch.encode()).hexdigest()[:8]}"


def exchange_reports(directory: Path, report: ProcessReport, timeout: float) -> list[ProcessReport]:
    """The reports of all processes of this launch that came in time, by rank: the same on all of them."""
    roster = _Roster(directory, report, timeout)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_record(roster.registration, RosterRecord([roster.token], [report]))
        reports = roster.wait()
        roster.registration.unlink(missing_ok=True)
    except OSError as error:
        raise TopologyError(
            "cannot exchange reports with the other ranks",
            expected="a directory that all hosts see and can write to",
            found=error,
            where=directory,
            remedy="choose another one with --folder",
        ) from error
    return reports


class _Roster:
    """This process in a roster."""

    def __init__(self, directory: Path, report: ProcessReport, timeout: float) -> None:
        self.token = uuid.uuid4().hex
        self.registration = directory / f"{self.token}.json"
        self._directory, self._report, self._timeout = directory, report, timeout
        self._size = 0 if report.topology is None else report.topology.world_size  # 0: not known
        self._interval = max(0.05, self._size / 500)  # all ranks read from one file system
        self._stalls = StallDetector()
        self._refreshed = 0.0

    def wait(self) -> list[ProcessReport]:
        """The reports of all processes, by the reply of rank 0 or as rank 0."""
        began = time.monotonic()
        patience = self._timeout if self._size else min(self._timeout, _LINGER)
        settled, beat = 0.0, 0
        while True:
            beat += 1
            os.utime(self.registration, ns=(beat * TICK_NS, beat * TICK_NS))
            for reply in self._read("*.reply").values():
                if self.token in reply.tokens:
                    return reply.reports
            reports = {path.stem: record.reports[0] for path, record in self._read("*.json").items()}
            silences = {}
            for token in reports:
                with suppress(OSError):  # removed meanwhile
                    changed = stat_uncached(self._directory / f"{token}.json").st_mtime_ns
                    silences[token] = self._stalls.seconds(token, changed)
            present = {token: report for token, report in reports.items() if self._stalls.has_changed(token)}
            present[self.token] = self._report
            first = min((token for token, report in present.items() if _rank(report) == 0), default="")
            now = time.monotonic()
            if first == self.token:
                sizes = (report.topology.world_size for report in present.values() if report.topology is not None)
                settled = settled or now if len(present) >= max(sizes) else 0.0
                if now > began + self._timeout or (settled and now > settled + _SETTLE):
                    return self._publish(present)
            elif now > began + patience and silences.get(first, _LINGER) >= _LINGER:
                absent = format_ranks(missing_ranks([*present.values()], self._size) or [0])
                raise TopologyError(
                    "rank 0 disappeared" if first else f"rank 0 did not report within {patience:.0f} s",
                    expected=f"reports of {self._size} processes in one directory",
                    found=f"{len(present)}, without {absent}",
                    where=f"{self._report.name}, in {self._directory}",
                    remedy="use a directory that all hosts see (--folder), and the same name of the launch on all "
                    "of them (--job NAME); or the other processes do not know that they are several ranks",
                )
            time.sleep(self._interval)

    def _read(self, pattern: str) -> Mapping[Path, RosterRecord]:
        now = time.monotonic()
        if now > self._refreshed + _REFRESH:
            self._refreshed = now
            refresh_path(self._directory / "refresh")
        records = {}
        for path in self._directory.glob(pattern):
            # Removed meanwhile, or written by another version, or invalid.
            with suppress(OSError, msgspec.DecodeError, RankfeedError):
                records[path] = msgspec.json.decode(path.read_bytes(), type=RosterRecord)
        return records

    def _publish(self, present: Mapping[str, ProcessReport]) -> list[ProcessReport]:
        """Write the reply, and remove the directory when all have read it; only our own files are removed."""
        reports = sorted(present.values(), key=lambda report: (_rank(report), report.host, report.pid))
        write_record(self._directory / f"{self.token}.reply", RosterRecord([*present], reports))
        deadline = time.monotonic() + min(self._timeout, _LINGER)
        readers = [self._directory / f"{token}.json" for token in present if token != self.token]
        while time.monotonic() < deadline and any(path.exists() for path in readers):
            time.sleep(self._interval)
        with suppress(OSError):
            for pattern in ("*.json", "*.reply", f"{TEMPORARY}*"):
                for path in self._directory.glob(pattern):
                    path.unlink(missing_ok=True)
            self._directory.rmdir()
        return reports


def _rank(report: ProcessReport) -> int:
    return 1 << 62 if report.topology is None else report.topology.rank
