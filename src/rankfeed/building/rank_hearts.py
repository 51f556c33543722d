"""How a rank shows that it lives and that it gets on, and how rank 0 judges all others.

Both are judged by the reader's clock, from whether the counts in a rank's file go on; no two machines' clocks are
compared. A rank whose process has ended, or is stopped, is silent. One that hangs goes on beating, from a thread
of its own, but takes no more steps: what it was at falls to others, as if it were dead, and nobody waits for it.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from rankfeed.building.rank_files import CLAIM, RUN, Failure, Member, Run, get, put, same_job
from rankfeed.storage import make_directory


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


def warn(text: str) -> None:
    """Tell the user, even where warnings are errors: a heart must go on."""
    with suppress(RuntimeWarning):
        warnings.warn(text, RuntimeWarning, stacklevel=3)


class Heart:
    """A thread that says something again and again while this process lives.

    Args:
        every: seconds between two beats.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self.steps = 0
        self.lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="rankfeed-heart", daemon=True)

    def step(self) -> None:
        """Called by whoever does the work, whenever some of it is done."""
        self.steps += 1

    def say(self, **news: Any) -> None:
        """Write the file, with something new in it."""
        raise NotImplementedError

    def _go_on(self) -> None:
        while not self._stop.wait(self.every):
            with suppress(OSError):  # the next beat may get through; if none does, others notice
                self.say()

    def __enter__(self) -> Self:
        self.say()  # if nothing can be written here, that is known at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class MemberHeart(Heart):
    """A rank other than 0: says that it is there, and hears of the end though it be at something long."""

    def __init__(self, ranks: Path, rank: int, world_size: int, job: str, call: int, every: float) -> None:
        super().__init__(every)
        self.ranks = ranks
        self.said = Member(rank, secrets.token_hex(8), job, world_size, call)
        self.path = ranks / f"rank-{rank:05d}-{self.said.name}.json"
        self.answered = False
        #: What rank 0 said last, once that was that the data set is there: its file goes soon after.
        self.ended: Run | None = None

    def say(self, **news: Any) -> None:
        """Write the file, with something new in it."""
        with self.lock:
            run = get(self.ranks / RUN, Run)
            if run is not None and self.said.name in run.members and run.call == self.said.call:
                self.ended = run if run.state == "done" and run.failure is None else None
            told = self.ended is not None
            self.said = msgspec.structs.replace(
                self.said, beat=self.said.beat + 1, steps=self.steps, told=told, **news
            )
            if not self.answered:
                # A pack that was there before may just remove the folder. Later, that means that ours is over.
                make_directory(self.path.parent)
            put(self.path, self.said)

    def __enter__(self) -> Self:
        for _ in range(8):  # a pack that was there before may just remove the folder
            with suppress(FileNotFoundError, FileExistsError):
                return super().__enter__()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        """Leave: the file goes, and the folders if nothing else is in them."""
        super().__exit__()
        with suppress(OSError):
            self.path.unlink()
            self.ranks.rmdir()
            self.ranks.parent.rmdir()


class LeadHeart(Heart):
    """Rank 0: reads what the others say, and says what follows from it.

    Args:
        ranks: the folder of the files.
        world_size: of the job.
        job: the mark of this job.
        digest: of what it was asked to pack.
        call: which call of this process it is that packs into this folder.
        patience: seconds after which a rank is silent, or stuck.
        every: seconds between two beats.
        file: what it writes; another than the usual one where another pack is at work in the folder. Then
            only ranks that are certainly of this job are answered.
    """

    def __init__(
        self,
        ranks: Path,
        world_size: int,
        job: str,
        digest: str,
        call: int,
        patience: float,
        every: float,
        file: str = RUN,
    ) -> None:
        super().__init__(every)
        self.ranks = ranks
        self.world_size = world_size
        self.job = job
        self.patience = patience
        self.file = file
        self.run = Run(0, digest, call)
        self.doing: int | None = None
        self.failure: Failure | None = None
        self._silence = Silence()
        #: Whether a rank that lives, but does not get on, has yet to hear of the end.
        self.untold = False
        self._awaited: set[int] = set()
        self._heard: set[int] = set()
        self._warned: set[str] = set()
        self._since = time.monotonic()

    def say(self, **news: Any) -> None:
        """Look around, then write the file, with something new in it."""
        with self.lock:
            busy, names, awaited = [] if self.doing is None else [self.doing], [], set()
            untold = False
            own_steps = self._silence.of("", self.steps, time.monotonic())
            if busy and own_steps > self.patience:
                busy = []
            for member in self._members():
                names.append(member.name)
                if member.call < self.run.call:
                    continue  # it came too late for an earlier pack, and hears that this is another
                self._heard.add(member.rank)
                self.failure = self.failure or member.failure
                problem = self._problem(member)
                if problem is None:
                    awaited.add(member.rank)
                    busy += [] if member.doing is None else [member.doing]
                    continue
                untold |= problem == "stuck" and not member.told
                if self.run.state == "working":
                    self._warn(member, problem)
            self._awaited, self.untold = awaited, untold
            if self.failure is not None and self.run.state == "working":
                news = {"failure": self.failure, **news}  # at once: this rank may be at something long
            self.run = msgspec.structs.replace(
                self.run,
                beat=self.run.beat + 1,
                steps=self.steps,
                busy=sorted(busy),
                members=names,
                **news,
            )
            put(self.ranks / self.file, self.run)

    def _members(self) -> list[Member]:
        """The other ranks of this job that have said something, less those that are at their next pack already."""
        found = [get(path, Member) for path in sorted(self.ranks.glob("rank-*.json"))]
        known = (True,) if self.file != RUN else (True, None)
        return [
            member
            for member in found
            if member is not None
            and 0 < member.rank < self.world_size == member.world_size
            and same_job(member.job, self.job) in known
            and member.call <= self.run.call
        ]

    def _problem(self, member: Member) -> str | None:
        now = time.monotonic()
        silent = self._silence.of(member.name, member.beat, now)
        still = self._silence.of(member.name + " steps", member.steps, now)
        if silent > self.patience:
            return "silent"
        # One that was ended or stopped took its last step before its last beat: only while it beats is it stuck.
        return "stuck" if still > self.patience and silent <= 2 * self.every else None

    def _warn(self, member: Member, problem: str) -> None:
        if member.name in self._warned or self.failure is not None:
            return
        self._warned.add(member.name)
        what = "has given no sign of life" if problem == "silent" else "lives, but has not got on"
        place = "" if member.doing is None else f", at stretch {member.doing}"
        warn(
            f"rank {member.rank} of {self.world_size} {what} for {self.patience:g} seconds{place}: the others "
            "pack what is its"
        )

    def all_left(self, arrival: float) -> bool:
        """Whether no rank waits for this one: each has left, is silent or stuck, or did not come in so long."""
        late = time.monotonic() - self._since > arrival
        return not self._awaited and (late or len(self._heard) == self.world_size - 1)

    def clean(self) -> None:
        """Remove what an earlier job left; those who live write theirs anew."""
        for stale in (*self.ranks.glob("*.json"), *self.ranks.glob(f"{CLAIM}*")):
            stale.unlink(missing_ok=True)
        make_directory(self.ranks)
