"""How the ranks of a job hear of each other without a network: each keeps a small file fresh.

Rank 0 reads those of all others and writes what follows from them into its own, which all others read. A file left
by a job that was killed is told from one of this job by an answer: each rank makes up a name for itself, and
follows only a rank 0 whose file has that name in it. Whether a rank is alive is judged by the reader's clock, from
whether the count in the rank's file goes on; no two machines' clocks are compared.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from rankfeed.storage.commit import temporary_name

#: The folder of these files, inside the staging folder.
FOLDER = "ranks"
RUN, PLAN = "run.json", "plan.json"
_T = TypeVar("_T")


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to other ranks, as text: nothing is unpickled."""

    rank: int
    summary: str
    expected: str | None = None
    found: str | None = None
    where: str | None = None
    remedy: str | None = None


class Member(msgspec.Struct, frozen=True):
    """What a rank says.

    Args:
        rank: which it is.
        name: that it made up for itself.
        beat: counts on while it lives.
        doing: the stretch that it packs now.
        failure: why it can't go on.
    """

    rank: int
    name: str
    beat: int
    doing: int | None = None
    failure: Failure | None = None


class Run(msgspec.Struct, frozen=True):
    """What rank 0 says.

    Args:
        beat: counts on while it lives.
        digest: of what it was asked to pack; all ranks must have been asked the same.
        members: names of the ranks that it has heard of.
        busy: stretches that living ranks pack now.
        planned: whether the list of stretches is there.
        state: "working", "done" or "failed".
        result: fingerprint of the data set, when done.
        failure: why it failed.
    """

    beat: int
    digest: str
    members: list[str] = []
    busy: list[int] = []
    planned: bool = False
    state: str = "working"
    result: str = ""
    failure: Failure | None = None


class Plan(msgspec.Struct, frozen=True):
    """The stretches: name of the job, rows to read in one go, and start and stop of each."""

    job: str
    batch: int
    ranges: list[tuple[int, int]]


def put(path: Path, content: msgspec.Struct) -> None:
    """Write a small file at once. It need not survive a power cut: who wrote it would not either.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def get(path: Path, kind: type[_T]) -> _T | None:
    """Read one; None if it is not there or not of this kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


class Silence:
    """For how long each of several counts has not gone on, by this process's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def of(self, name: str, count: int, now: float) -> float:
        """Seconds since the count of that name was another one.

        Examples:
            >>> silence = Silence()
            >>> [silence.of("a", count, now) for count, now in ((1, 0.0), (1, 2.5), (2, 3.0), (2, 4.0))]
            [0.0, 2.5, 0.0, 1.0]
        """
        count_then, since = self._seen.get(name, (count - 1, now))
        if count != count_then:
            since = now
            self._seen[name] = count, now
        return now - since


class Heart:
    """A thread that does something again and again while this process lives.

    Args:
        every: seconds between two beats.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="rankfeed-heart", daemon=True)

    def beat(self) -> None:
        """What is done; at once if called."""
        raise NotImplementedError

    def _go_on(self) -> None:
        while not self._stop.wait(self.every):
            with suppress(OSError):  # the next beat may get through; if none does, others notice
                self.beat()

    def __enter__(self) -> Self:
        with suppress(OSError):
            self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class MemberHeart(Heart):
    """A rank other than 0: says that it is there."""

    def __init__(self, ranks: Path, rank: int, every: float) -> None:
        super().__init__(every)
        self.ranks = ranks
        self.said = Member(rank, secrets.token_hex(8), 0)
        self.path = ranks / f"rank-{rank:05d}-{self.said.name}.json"

    def beat(self) -> None:
        self.say()

    def say(self, **news: Any) -> None:
        """Write the file, with something new in it."""
        with self.lock:
            self.said = msgspec.structs.replace(self.said, beat=self.said.beat + 1, **news)
            put(self.path, self.said)

    def __exit__(self, *_: object) -> None:
        """Leave: the file goes, and the folders if nothing else is in them."""
        super().__exit__()
        with suppress(OSError):
            self.path.unlink()
            self.ranks.rmdir()
            self.ranks.parent.rmdir()


class LeadHeart(Heart):
    """Rank 0: reads what the others say, and says what follows from it."""

    def __init__(self, ranks: Path, world_size: int, digest: str, patience: float, every: float) -> None:
        super().__init__(every)
        self.ranks = ranks
        self.world_size = world_size
        self.patience = patience
        self.run = Run(0, digest)
        self.doing: int | None = None
        self.failure: Failure | None = None
        self._silence = Silence()
        self._alive: set[int] = set()
        self._heard: set[int] = set()
        self._since = time.monotonic()

    def beat(self) -> None:
        self.say()

    def say(self, **news: Any) -> None:
        """Look around, then write the file, with something new in it."""
        with self.lock:
            busy, names, alive = [] if self.doing is None else [self.doing], [], set()
            for path in sorted(self.ranks.glob("rank-*.json")):
                member = get(path, Member)
                if member is None or not 0 < member.rank < self.world_size:
                    continue
                names.append(member.name)
                self._heard.add(member.rank)
                self.failure = self.failure or member.failure
                silent = self._silence.of(member.name, member.beat, time.monotonic()) > self.patience
                if silent:
                    continue
                alive.add(member.rank)
                if member.doing is not None:
                    busy.append(member.doing)
            self._alive = alive
            self.run = msgspec.structs.replace(
                self.run, beat=self.run.beat + 1, busy=sorted(busy), members=names, **news
            )
            put(self.ranks / RUN, self.run)

    def all_left(self, arrival: float) -> bool:
        """Whether no rank waits for this one: each has left, is silent, or did not come in so many seconds."""
        late = time.monotonic() - self._since > arrival
        return not self._alive and (late or len(self._heard) == self.world_size - 1)
