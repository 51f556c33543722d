"""Reading the ledgers in a folder: which process of which launch went how far in which pass."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from rankfeed.diagnostics.verify.deliveries import Shape, Stretch, schedule_of
from rankfeed.errors import ArgumentError, PlanError, SourceError
from rankfeed.plan import Schedule, Tail
from rankfeed.storage.ledger import SUFFIX, DamagedBytes, PassHeader, PassInfo, StepRecord, decode_ledger

#: Damages that are told of a file one by one.
_TOLD = 8
_AT_ONCE = (
    "a pass goes on behind another over the same data in the same order; give each loader a folder of its own"
)


@dataclass
class Went:
    """A pass, and how far it went.

    Attributes:
        content: its header.
        steps: delivered, counted from its start.
        last_ns: when the last of them was, nanoseconds since 1970.
    """

    content: PassInfo
    steps: int = 0
    last_ns: int = 0

    @property
    def stream(self) -> str:
        """What the pass is of: loaders of one order over the same data read one stream."""
        content = self.content
        return json.dumps([content.plan_fingerprint, content.source, content.plan], sort_keys=True)

    @property
    def shape(self) -> Shape:
        """Of the plan."""
        return Shape(int(self.content.plan["samples"]), int(self.content.plan["lanes"]))

    def stretch(self, launch: int) -> Stretch:
        """As a part of a timeline."""
        content = self.content
        tail: Tail = content.tail  # type: ignore[assignment]
        steps = {content.rank: self.steps}
        return Stretch(launch, content.epoch, content.start, content.batch_size, content.world_size, tail, steps)


@dataclass
class Read:
    """What a ledger says.

    Attributes:
        path: of it.
        passes: in the order they were begun.
        damage: what is wrong with the file.
        notes: what is to be said, and no damage.
    """

    path: Path
    passes: list[Went] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, offset: int, what: str) -> None:
        """Note damage."""
        if len(self.damage) < _TOLD:
            self.damage.append(f"{self.path}, offset {offset}: {what}")
        elif len(self.damage) == _TOLD:
            self.damage.append(f"{self.path}: more of the kind")


def is_run(folder: str | Path) -> bool:
    """Whether there are ledgers in a folder."""
    path = Path(folder)
    # os.path, unlike Path before Python 3.12, takes a name that is too long for that of no folder.
    return os.path.isdir(path) and any(each.name.endswith(SUFFIX) for each in path.iterdir())


def read_folder(folder: str | Path, progress: Callable[[float], None]) -> tuple[list[Read], list[str]]:
    """All ledgers of a folder.

    Returns:
        them, in the order of their names; and the names of files that are none.

    Raises:
        SourceError: the folder cannot be read, or there are no ledgers in it.
    """
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
        found.append(read_ledger(path))
        progress((number + 1) / len(ledgers))
    return found, [path.name for path in paths if path not in set(ledgers)]


@dataclass
class _Open:
    """A pass whose steps are being read: where its header stands, and whether it went on behind another."""

    went: Went
    schedule: Schedule
    offset: int
    stream: str
    behind: bool = False


def read_ledger(path: Path) -> Read:
    """One ledger, whatever state it is in."""
    told = Read(path)
    passes: dict[int, _Open] = {}
    newest: dict[str, int] = {}
    if path.exists() and not path.is_file():  # who opens a pipe waits for ever
        told.wrong(0, "cannot be read: it is no file")
        return told
    try:
        with open(path, "rb") as file:
            for each in decode_ledger(file):
                if isinstance(each, DamagedBytes):
                    _damaged(each, told)
                elif isinstance(each, PassHeader):
                    opened = _begun(each, told)
                    if opened is not None:
                        passes[each.number] = opened
                        newest[opened.stream] = each.number
                elif each.number in passes:  # of others it was told already
                    opened = passes[each.number]
                    _step(each, opened, told)
                    if newest[opened.stream] != each.number and not opened.behind:
                        opened.behind = True
                        told.wrong(opened.offset, _AT_ONCE)
    except OSError as error:
        told.wrong(0, f"cannot be read: {error.strerror or error}")
    if not told.passes and not told.damage and not told.notes:
        told.notes.append(f"{path} is empty: its process was killed before its first step")
    return told


def _begun(each: PassHeader, told: Read) -> _Open | None:
    went = Went(each.content, last_ns=each.content.time_ns)
    problem = _problem(each.content)
    if problem is None:
        try:
            schedule = schedule_of(went.shape, went.stretch(0))
            told.passes.append(went)
            return _Open(went, schedule, each.offset, went.stream)
        except (ArgumentError, PlanError) as error:
            problem = error.summary
    told.wrong(each.offset, f"the header of a pass contradicts itself: {problem}")
    return None


def _problem(content: PassInfo) -> str | None:
    """What cannot be in a header, or None."""
    for name in ("samples", "lanes"):
        value = content.plan.get(name)
        if type(value) is not int or not 1 <= value <= 1 << 62:
            return f"{name} is {value!r}"
    if content.tail not in get_args(Tail):
        return f"tail is {content.tail!r}"
    if content.rank >= content.world_size:
        return f"rank {content.rank} of {content.world_size}"
    return None


def _step(each: StepRecord, opened: _Open, told: Read) -> None:
    went, schedule = opened.went, opened.schedule
    if each.step < went.steps:
        told.wrong(each.offset, f"step {each.step} comes twice")
        return
    if each.step >= len(schedule) or each.position != schedule.position_after(each.step):
        told.wrong(each.offset, f"step {each.step} ends at position {each.position}, which is not so in its plan")
        return
    if each.step > went.steps:
        one = each.step == went.steps + 1
        lost = f"step {went.steps}" if one else f"steps {went.steps} to {each.step - 1}"
        told.wrong(each.offset, f"{lost} before this one cannot be read")
    went.steps, went.last_ns = each.step + 1, each.time_ns


def _damaged(each: DamagedBytes, told: Read) -> None:
    if each.torn:
        told.notes.append(f"{told.path} ends in the middle of a record: its process died while it wrote")
    else:
        why = f": {each.why}" if each.why else ""
        told.wrong(each.offset, f"{each.nbytes} bytes are neither a header nor a step{why}")


@dataclass
class Member:
    """A process of a launch: one rank of it.

    Attributes:
        rank, world_size, host, pid, launcher: as its ledger says.
        passes: in the order they were begun.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    launcher: str
    passes: list[Went] = field(default_factory=list)

    @property
    def first_ns(self) -> int:
        return min(each.content.time_ns for each in self.passes)

    @property
    def last_ns(self) -> int:
        return max(each.last_ns for each in self.passes)


@dataclass
class Launch:
    """The processes that were started together.

    Attributes:
        name: as they agreed on; empty where nobody knew one.
        world_size: ranks that there should be.
        members: by rank; several for one rank are its parallel peers, which read the same.
    """

    name: str
    world_size: int
    members: dict[int, list[Member]] = field(default_factory=dict)

    def all(self) -> list[Member]:
        """Its processes."""
        return [member for members in self.members.values() for member in members]


def launches_of(passes: Iterable[Went]) -> list[Launch]:
    """The launches that passes belong to, in the order they began.

    A rank that comes once more under the name of its launch (a launcher may name all its launches alike), and is
    no parallel peer, begins another one.
    """
    members: dict[tuple[str, str, int, int], Member] = {}
    for went in passes:
        content = went.content
        key = content.launch, content.process, content.rank, content.world_size
        place = (content.rank, content.world_size, content.host, content.pid, content.launcher)
        members.setdefault(key, Member(*place)).passes.append(went)
    launches: list[Launch] = []
    latest: dict[tuple[str, int], Launch] = {}
    for (name, *_), member in sorted(members.items(), key=lambda item: item[1].first_ns):
        launch = latest.get((name, member.world_size))
        if launch is None or not _joins(member, launch):
            launch = latest[name, member.world_size] = Launch(name, member.world_size)
            launches.append(launch)
        launch.members.setdefault(member.rank, []).append(member)
    return launches


def _joins(member: Member, launch: Launch) -> bool:
    peers: Sequence[Member] = launch.members.get(member.rank, ())
    return not peers or (member.launcher == "mesh" and all(peer.launcher == "mesh" for peer in peers))
