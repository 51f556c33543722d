"""Reads the ledgers in a directory: how far each process of each launch came in each pass."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from rankfeed.diagnostics.findings import Finding, Severity
from rankfeed.errors import ArgumentError, PlanError, SourceError, TopologyError
from rankfeed.plan import Coverage, PositionOrder, Schedule
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.ledger import SUFFIX, VERSION, DamagedBytes, PassHeader, PassInfo, StepRecord, decode_ledger


@dataclass
class LedgerPass:
    """A pass of a process, and how far it came."""

    content: PassInfo
    steps: int = 0
    last_ns: int = 0
    #: Steps whose batches may lack samples, by the user's function that returned them.
    unproven: Counter[str] = field(default_factory=Counter)

    @cached_property
    def stream(self) -> str:
        """What it reads: loaders of one order over the same data read one stream."""
        content = self.content
        return json.dumps([content.plan_fingerprint, content.source, content.plan], sort_keys=True)

    @cached_property
    def schedule(self) -> Schedule:
        """Its steps, which are checked; its ids are positions."""
        return self.coverage(0).schedule(self.content.rank)

    def coverage(self, launch: int) -> Coverage:
        """The positions that it delivered."""
        content: Any = self.content
        bounds = content.epoch, content.start, content.batch_size, content.world_size, content.tail
        return Coverage(PositionOrder.of(content.plan), *bounds, {content.rank: self.steps}, launch)


@dataclass
class ParsedLedger:
    """What a ledger contains."""

    path: Path
    passes: list[LedgerPass] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, code: str, severity: Severity, what: str, where: str = "", remedy: str = "") -> None:
        self.findings.append(Finding(code, severity, what, (f"{self.path}{where}",), remedy))

    def damage(self, offset: int, what: str) -> None:
        """Note that a part of it cannot be read, or contradicts another part."""
        remedy = "restore it from a copy, if there is one; check the disk"
        summary = "a ledger is damaged, so that deliveries are not known"
        self.add("damaged-ledger", "unproven", summary, f", offset {offset}: {what}", remedy)


def is_run(folder: str | Path) -> bool:
    """Whether a directory contains ledgers."""
    # os.path, unlike Path before Python 3.12, accepts a name that is too long.
    return os.path.isdir(folder) and any(name.endswith(SUFFIX) for name in os.listdir(folder))


def read_folder(folder: str | Path, progress: Callable[[float], None]) -> tuple[list[ParsedLedger], list[str]]:
    """All ledgers of a directory, in the order of their names, and the names of other files."""
    with os_errors(SourceError, "the folder of a run cannot be read", folder):
        paths = sorted(Path(folder).iterdir())
    ledgers = [path for path in paths if path.name.endswith(SUFFIX)]
    if not ledgers:
        raise SourceError(
            "there are no ledgers in this folder",
            expected=f"files *{SUFFIX}, as rankfeed.Loader(..., audit=FOLDER) writes them",
            found=", ".join(path.name for path in paths[:4]) or "nothing",
            where=folder,
        )
    parsed = []
    for index, path in enumerate(ledgers, 1):
        parsed.append(parse_ledger(path))
        progress(index / len(ledgers))
    longest: dict[str, ParsedLedger] = {}
    for ledger in sorted(parsed, key=lambda ledger: sum(1 + one.steps for one in ledger.passes), reverse=True):
        if ledger.passes and (first := longest.setdefault(ledger.passes[0].content.process, ledger)) is not ledger:
            ledger.passes = []
            ledger.add("copied-ledger", "note", f"a ledger is a copy of {first.path.name} and is not counted")
    return parsed, [path.name for path in paths if path not in set(ledgers)]


def parse_ledger(path: Path) -> ParsedLedger:
    """One ledger, in any state."""
    ledger = ParsedLedger(path)
    if path.exists() and not path.is_file():  # opening a pipe would block
        ledger.damage(0, "it is no file")
        return ledger
    passes: dict[int, LedgerPass] = {}
    newest: dict[str, LedgerPass] = {}
    try:
        with open(path, "rb") as file:
            for part in decode_ledger(file):
                if isinstance(part, DamagedBytes):
                    if part.torn:
                        what = "a ledger ends within a record: its process was killed while writing"
                        ledger.add("killed-while-writing", "note", what)
                    elif part.version is not None:
                        ledger.add(
                            "other-version",
                            "unproven",
                            "another version of rankfeed wrote a ledger, so that deliveries are not known",
                            f", offset {part.offset}: version {part.version} of the format, expected {VERSION}",
                            "verify it with the version of rankfeed that wrote it",
                        )
                    else:
                        why = f": {part.why}" if part.why else ""
                        ledger.damage(part.offset, f"{part.nbytes} bytes are neither a header nor a step{why}")
                elif isinstance(part, PassHeader):
                    one = LedgerPass(part.content, last_ns=part.content.time_ns)
                    try:
                        len(one.schedule)
                    except (ArgumentError, PlanError, TopologyError) as error:
                        ledger.damage(part.offset, f"the header of a pass contradicts itself: {error.summary}")
                    else:
                        ledger.passes.append(one)
                        passes[part.number] = newest[one.stream] = one
                elif (current := passes.get(part.number)) is not None:  # else its header is damaged, as noted
                    _add_step(part, current, ledger)
                    if newest[current.stream] is not current:
                        newest[current.stream] = current
                        ledger.add(
                            "interleaved-passes",
                            "error",
                            "two iterations over the same data were active at the same time, so that samples were "
                            "delivered twice",
                            f", offset {part.offset}",
                            "if they belong to different loaders, give each of them a folder of its own",
                        )
    except OSError as error:
        ledger.damage(0, f"it cannot be read: {error.strerror or error}")
    if any(finding.code == "damaged-ledger" for finding in ledger.findings):  # steps may be out of order
        ledger.findings = [finding for finding in ledger.findings if finding.severity != "error"]
    if not ledger.passes and not ledger.findings:
        ledger.add("empty-ledger", "note", "a ledger is empty: its process was killed before its first step")
    return ledger


def _add_step(step: StepRecord, one: LedgerPass, ledger: ParsedLedger) -> None:
    steps = len(one.schedule)
    if not one.steps <= step.step < steps or step.position != one.schedule.position_after(step.step):
        ledger.damage(
            step.offset,
            f"step {step.step} ends at position {step.position}; expected step {one.steps} of {steps} of its plan",
        )
        return
    if step.step > one.steps:
        ledger.damage(step.offset, f"steps {one.steps} to {step.step - 1} cannot be read")
    one.steps, one.last_ns = step.step + 1, step.time_ns
    if step.unproven:
        one.unproven[step.unproven] += 1


@dataclass
class Launch:
    """The processes that were started together: the passes of each, by rank; parallel peers have the same rank."""

    name: str
    world_size: int
    processes: dict[int, list[list[LedgerPass]]] = field(default_factory=dict)

    def by_host(self) -> dict[str, tuple[int, int]]:
        """When it began and ended on each host."""
        times: dict[str, list[int]] = {}
        for one in chain.from_iterable(chain.from_iterable(self.processes.values())):
            times.setdefault(one.content.host, []).extend((one.content.time_ns, one.last_ns))
        return {host: (min(some), max(some)) for host, some in sorted(times.items())}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        hosts = self.by_host()
        return {
            "name": self.name,
            "ranks": self.world_size,
            "ledgers": sum(map(len, self.processes.values())),
            "hosts": list(hosts),
            "began_ns": min(first for first, _ in hosts.values()),
            "ended_ns": max(last for _, last in hosts.values()),
        }


def launches_of(passes: Iterable[LedgerPass]) -> list[Launch]:
    """The launches that passes belong to, in the order in which they began."""
    processes: dict[tuple[str, str, int, int], list[LedgerPass]] = {}
    for one in passes:
        content = one.content
        key = content.launch, content.process, content.rank, content.world_size
        processes.setdefault(key, []).append(one)
    launches: list[Launch] = []
    latest: dict[tuple[str, int], Launch] = {}
    began = sorted(processes.items(), key=lambda item: min(one.content.time_ns for one in item[1]))
    for (name, _, rank, world_size), process in began:
        launch = latest.get((name, world_size))
        peers = launch.processes.get(rank, []) if launch else []
        are_parallel = all(members[0].content.launcher == "mesh" for members in [*peers, process])
        if launch is None or (peers and not are_parallel):
            launch = latest[name, world_size] = Launch(name, world_size)
            launches.append(launch)
        launch.processes.setdefault(rank, []).append(process)
    return launches
