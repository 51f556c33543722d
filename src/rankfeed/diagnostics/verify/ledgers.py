"""Reads the ledgers in a directory: how far each process of each launch came in each pass."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from rankfeed.diagnostics.findings import Finding
from rankfeed.diagnostics.verify.positions import PlanShape, PositionRange
from rankfeed.errors import ArgumentError, PlanError, SourceError
from rankfeed.plan import Schedule, Tail
from rankfeed.storage.ledger import SUFFIX, DamagedBytes, PassHeader, PassInfo, StepRecord, decode_ledger


@dataclass
class LedgerPass:
    """A pass of a process, and how far it came."""

    content: PassInfo
    steps: int = 0
    last_ns: int = 0

    @property
    def stream(self) -> str:
        """What it reads: loaders of one order over the same data read one stream."""
        content = self.content
        return json.dumps([content.plan_fingerprint, content.source, content.plan], sort_keys=True)

    def positions(self, launch: int) -> PositionRange:
        """As a part of a timeline."""
        content, plan = self.content, self.content.plan
        tail: Tail = content.tail  # type: ignore[assignment]
        shape = PlanShape(int(plan["samples"]), int(plan["lanes"]))
        ends = {content.rank: self.steps}
        return PositionRange(
            shape, launch, content.epoch, content.start, content.batch_size, content.world_size, tail, ends
        )


@dataclass
class ParsedLedger:
    """What a ledger contains."""

    path: Path
    passes: list[LedgerPass] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def damage(self, offset: int, what: str) -> None:
        """Note that a part of it cannot be read, or contradicts another part."""
        self.findings.append(
            Finding(
                "damaged-ledger",
                "unproven",
                "a ledger is damaged, so that deliveries are not known",
                (f"{self.path}, offset {offset}: {what}",),
                "restore it from a copy, if there is one; check the disk",
            )
        )

    def note(self, code: str, what: str) -> None:
        self.findings.append(Finding(code, "note", what, (str(self.path),)))


def is_run(folder: str | Path) -> bool:
    """Whether a directory contains ledgers."""
    path = Path(folder)
    # os.path, unlike Path before Python 3.12, accepts a name that is too long.
    return os.path.isdir(path) and any(each.name.endswith(SUFFIX) for each in path.iterdir())


def read_folder(folder: str | Path, progress: Callable[[float], None]) -> tuple[list[ParsedLedger], list[str]]:
    """All ledgers of a directory, in the order of their names, and the names of other files."""
    try:
        paths = sorted(Path(folder).iterdir())
    except OSError as error:
        raise SourceError("the folder of a run cannot be read", found=error.strerror, where=folder) from error
    ledgers = [path for path in paths if path.name.endswith(SUFFIX)]
    if not ledgers:
        raise SourceError(
            "there are no ledgers in this folder",
            expected=f"files *{SUFFIX}, as rankfeed.Loader(..., audit=FOLDER) writes them",
            found=", ".join(path.name for path in paths[:4]) or "nothing",
            where=folder,
        )
    found = []
    for number, path in enumerate(ledgers):
        found.append(parse_ledger(path))
        progress((number + 1) / len(ledgers))
    longest: dict[str, ParsedLedger] = {}
    for each in sorted(found, key=_length, reverse=True):
        process = each.passes[0].content.process if each.passes else ""
        if longest.setdefault(process, each) is not each and each.passes:
            each.passes = []
            each.note("copied-ledger", f"a ledger is a copy of {longest[process].path.name} and is not counted")
    return found, [path.name for path in paths if path not in set(ledgers)]


def _length(ledger: ParsedLedger) -> int:
    return sum(1 + each.steps for each in ledger.passes)


def parse_ledger(path: Path) -> ParsedLedger:
    """One ledger, in any state."""
    ledger = ParsedLedger(path)
    if path.exists() and not path.is_file():  # opening a pipe would block
        ledger.damage(0, "it is no file")
        return ledger
    passes: dict[int, tuple[LedgerPass, Schedule]] = {}
    newest: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for each in decode_ledger(file):
                if isinstance(each, DamagedBytes):
                    _add_damage(each, ledger)
                elif isinstance(each, PassHeader):
                    if (opened := _add_pass(each, ledger)) is not None:
                        passes[each.number] = opened
                        newest[opened[0].stream] = each.number
                elif each.number in passes:  # otherwise its header is damaged, which was noted
                    one, schedule = passes[each.number]
                    _add_step(each, one, schedule, ledger)
                    if newest[one.stream] != each.number:
                        newest[one.stream] = each.number
                        _add_interleaved(each.offset, ledger)
    except OSError as error:
        ledger.damage(0, f"it cannot be read: {error.strerror or error}")
    if any(each.code == "damaged-ledger" for each in ledger.findings):  # steps may be out of order because of it
        ledger.findings = [each for each in ledger.findings if each.severity != "error"]
    if not ledger.passes and not ledger.findings:
        ledger.note("empty-ledger", "a ledger is empty: its process was killed before its first step")
    return ledger


def _add_interleaved(offset: int, ledger: ParsedLedger) -> None:
    what = "two iterations over the same data were active at the same time, so that samples were delivered twice"
    remedy = "if they belong to different loaders, give each of them a folder of its own"
    evidence = (f"{ledger.path}, offset {offset}",)
    ledger.findings.append(Finding("interleaved-passes", "error", what, evidence, remedy))


def _add_damage(each: DamagedBytes, ledger: ParsedLedger) -> None:
    if each.torn:
        ledger.note("killed-while-writing", "a ledger ends within a record: its process was killed while writing")
    else:
        why = f": {each.why}" if each.why else ""
        ledger.damage(each.offset, f"{each.nbytes} bytes are neither a header nor a step{why}")


def _add_pass(each: PassHeader, ledger: ParsedLedger) -> tuple[LedgerPass, Schedule] | None:
    one = LedgerPass(each.content, last_ns=each.content.time_ns)
    problem = _contradiction(each.content)
    if problem is None:
        try:
            schedule = one.positions(0).schedule()
        except (ArgumentError, PlanError) as error:
            problem = error.summary
        else:
            ledger.passes.append(one)
            return one, schedule
    ledger.damage(each.offset, f"the header of a pass contradicts itself: {problem}")
    return None


def _contradiction(content: PassInfo) -> str | None:
    for name in ("samples", "lanes"):
        value = content.plan.get(name)
        if type(value) is not int or not 1 <= value <= 1 << 62:
            return f"{name} is {value!r}"
    if content.tail not in get_args(Tail):
        return f"tail is {content.tail!r}"
    if content.rank >= content.world_size:
        return f"rank {content.rank} of {content.world_size}"
    return None


def _add_step(each: StepRecord, one: LedgerPass, schedule: Schedule, ledger: ParsedLedger) -> None:
    if each.step < one.steps:
        ledger.damage(each.offset, f"step {each.step} occurs twice")
    elif each.step >= len(schedule) or each.position != schedule.position_after(each.step):
        what = f"step {each.step} ends at position {each.position}, which contradicts its plan"
        ledger.damage(each.offset, what)
    else:
        if each.step > one.steps:
            ledger.damage(each.offset, f"steps {one.steps} to {each.step - 1} cannot be read")
        one.steps, one.last_ns = each.step + 1, each.time_ns


@dataclass
class LedgerProcess:
    """A process of a launch: one rank of it."""

    rank: int
    world_size: int
    host: str
    pid: int
    launcher: str
    passes: list[LedgerPass] = field(default_factory=list)

    @property
    def first_ns(self) -> int:
        return min(each.content.time_ns for each in self.passes)

    @property
    def last_ns(self) -> int:
        return max(each.last_ns for each in self.passes)


@dataclass
class Launch:
    """The processes that were started together."""

    name: str
    world_size: int
    processes: dict[int, list[LedgerProcess]] = field(default_factory=dict)

    def all(self) -> list[LedgerProcess]:
        return [process for processes in self.processes.values() for process in processes]


def launches_of(passes: Iterable[LedgerPass]) -> list[Launch]:
    """The launches that passes belong to, in the order in which they began."""
    processes: dict[tuple[str, str, int, int], LedgerProcess] = {}
    for one in passes:
        content = one.content
        key = content.launch, content.process, content.rank, content.world_size
        process = LedgerProcess(content.rank, content.world_size, content.host, content.pid, content.launcher)
        processes.setdefault(key, process).passes.append(one)
    launches: list[Launch] = []
    latest: dict[tuple[str, int], Launch] = {}
    for (name, *_), process in sorted(processes.items(), key=lambda item: item[1].first_ns):
        launch = latest.get((name, process.world_size))
        if launch is None or not _joins(process, launch):
            launch = latest[name, process.world_size] = Launch(name, process.world_size)
            launches.append(launch)
        launch.processes.setdefault(process.rank, []).append(process)
    return launches


def _joins(process: LedgerProcess, launch: Launch) -> bool:
    peers: Sequence[LedgerProcess] = launch.processes.get(process.rank, ())
    return not peers or (process.launcher == "mesh" and all(peer.launcher == "mesh" for peer in peers))
