"""Packing on the ranks of a job that is there anyway, whoever launched it: the file system is all they share.

Rank 0 plans and commits. Every rank packs each world_size-th stretch, then those that nobody has begun, from the
end; what a rank was at when it died falls to the others. No collective is called, so none can hang: a rank that
waits for another knows from a file that the other keeps fresh whether it lives, and gives it up when it is stale.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Container, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rankfeed.building.destination import refuse_foreign
from rankfeed.building.job import Job, Task, pack_stretch
from rankfeed.building.packing import Request, lead
from rankfeed.building.rank_files import (
    FOLDER,
    PLAN,
    RUN,
    Failure,
    LeadHeart,
    MemberHeart,
    Plan,
    Run,
    Silence,
    get,
    put,
)
from rankfeed.building.staging import Part, finished_stretches, is_whole, read_stretch
from rankfeed.errors import PackError, RankfeedError
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import digest_of, load_manifest
from rankfeed.topology import Topology

#: Ranks may reach `pack` this many times `patience` apart from each other: the source is opened before it.
_ARRIVAL = 5
#: Seconds in which a file written elsewhere is seen here.
_SEEN = 10.0


def pack_on_ranks(request: Request, patience: float) -> None:
    """Pack together with the other ranks; each of them calls this.

    Raises:
        PackError: one rank failed, or rank 0 gave no sign of life for ``patience`` seconds.
        TopologyError: it cannot be told which rank this is.
    """
    here = Topology.detect()
    if here.rank == 0:
        lead(request, OnRanks(here.world_size, patience, _digest(request)))
    else:
        follow(request, here, patience)


def next_stretch(rank: int, world_size: int, missing: Set[int], busy: Container[int]) -> int | None:
    """What a rank packs next: its own stretches in order, then those that nobody is at, from the end.

    Examples:
        >>> next_stretch(1, 3, {0, 1, 2, 3, 4}, busy={0})
        1
        >>> next_stretch(1, 3, {0, 2, 3}, busy={0, 3})
        2
        >>> next_stretch(1, 3, {0}, busy={0}) is None
        True
    """
    free = [task for task in missing if task not in busy]
    own = [task for task in free if task % world_size == rank]
    return min(own) if own else max(free, default=None)


@dataclass
class OnRanks:
    """Rank 0's part."""

    world_size: int
    patience: float
    digest: str
    checks: bool = False  # done in `each`, as stretches are finished

    @contextmanager
    def session(self, staging: Path) -> Iterator[None]:
        """Heard by the other ranks from here on; they hear of the end, too, whatever it is."""
        ranks = staging / FOLDER
        for stale in ranks.glob("*.json"):  # those who live write theirs anew
            stale.unlink(missing_ok=True)
        every = min(1.0, self.patience / 10)
        with LeadHeart(ranks, self.world_size, self.digest, self.patience, every) as self.heart:
            try:
                yield
                self.heart.say(state="done", result=load_manifest(staging.parent).fingerprint)
                while not self.heart.all_left(_ARRIVAL * self.patience):
                    if self.heart.failure is not None:  # the data set is there, but a rank has nothing of it
                        raise _of_other(self.heart.failure)
                    time.sleep(self.heart.every / 2)
            except BaseException as error:
                with suppress(OSError):
                    self.heart.say(state="failed", failure=self.heart.failure or failure_of(error, 0))
                deadline = time.monotonic() + self.patience
                while not self.heart.all_left(self.patience) and time.monotonic() < deadline:
                    time.sleep(self.heart.every / 2)
                raise
        shutil.rmtree(ranks, ignore_errors=True)

    def each(self, job: Job, tasks: list[Task]) -> Iterator[tuple[int, list[Part]]]:
        """Pack, and collect what all ranks packed.

        Raises:
            PackError: a rank failed.
        """
        heart = self.heart
        put(heart.ranks / PLAN, Plan(job.name, job.batch, [(start, stop) for _, start, stop in tasks]))
        heart.say(planned=True)
        missing = {task[0]: task for task in tasks}
        while missing:
            if heart.failure is not None:
                raise _of_other(heart.failure)
            for task in finished_stretches(job.staging, job.name) & missing.keys():
                parts = read_stretch(job.staging, task, job.name)
                # Others wrote it, now or in an earlier run: what is damaged can still be written anew.
                if parts is not None and all(is_whole(job.staging, part) for part in parts):
                    del missing[task]
                    yield task, parts
            mine = next_stretch(0, self.world_size, missing.keys(), heart.run.busy)
            if mine is None:
                time.sleep(heart.every / 2)
                continue
            heart.doing = mine
            heart.say()
            done = pack_stretch(job, *missing.pop(mine))
            heart.doing = None
            yield done


def follow(request: Request, here: Topology, patience: float) -> None:
    """What all other ranks do.

    Raises:
        PackError: one rank failed, this one included, or rank 0 gave no sign of life.
    """
    try:
        refuse_foreign(request.dest, append=request.append)
        _follow(request, here, patience)
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError("the data set could not be written", found=error, where=request.dest) from error


def _follow(request: Request, here: Topology, patience: float) -> None:
    ranks = request.dest / STAGING_NAME / FOLDER
    with MemberHeart(ranks, here.rank, min(1.0, patience / 10)) as heart:
        watch = _Watch(heart, here, patience)
        try:
            run = watch.until(lambda run: run.planned or run.state != "working")
            if run.digest != _digest(request):
                raise PackError(
                    "the ranks were not asked to pack the same",
                    expected="one source and the same arguments on all ranks",
                    where=f"rank {here.rank}, which differs from rank 0",
                )
            if run.state == "working":
                _help(request, heart, watch, here)
                run = watch.until(lambda run: run.state != "working")
            _see(request.dest, run)
        except BaseException as error:
            if not watch.over:
                with suppress(OSError):
                    heart.say(failure=failure_of(error, here.rank))
                watch.linger()
            raise


def _help(request: Request, heart: MemberHeart, watch: _Watch, here: Topology) -> None:
    """Pack stretches until none is missing."""
    staging = heart.ranks.parent
    plan = watch.read_plan()
    job = request.job(plan.job, staging, plan.batch)
    missing = set(range(len(plan.ranges)))
    while missing and watch.look().state == "working":
        missing -= finished_stretches(staging, job.name)
        mine = next_stretch(here.rank, here.world_size, missing, watch.run.busy)
        if mine is None:
            time.sleep(heart.every / 2)
            continue
        heart.say(doing=mine)
        pack_stretch(job, mine, *plan.ranges[mine])
        missing.discard(mine)
        heart.say(doing=None)


class _Watch:
    """What a rank knows of rank 0."""

    def __init__(self, heart: MemberHeart, here: Topology, patience: float) -> None:
        self.heart = heart
        self.here = here
        self.patience = patience
        self.run = Run(-1, "")
        self.over = False
        self._silence = Silence()
        self._began = time.monotonic()

    def look(self) -> Run:
        """What rank 0 says now.

        Raises:
            PackError: it failed, or is gone.
        """
        now = time.monotonic()
        run = get(self.heart.ranks / RUN, Run)
        if run is not None and self.heart.said.name in run.members:
            self.run = run
        heard = self.run.beat >= 0
        silent = self._silence.of("0", self.run.beat, now) if heard else now - self._began
        if silent > (self.patience if heard else _ARRIVAL * self.patience):
            self.over = True
            raise PackError(
                f"rank 0 has given no sign of life for {silent:.0f} seconds",
                expected="rank 0 plans and commits the pack" if heard else "rank 0 to call pack as well",
                where=f"rank {self.here.rank} of {self.here.world_size}, at {self.heart.ranks.parent.parent}",
                remedy="did rank 0 end, or does it see another folder? Started again, the job goes on where it "
                "stopped; patience=... waits longer",
            )
        if self.run.failure is not None:
            self.over = True
            raise _of_other(self.run.failure)
        return self.run

    def until(self, condition: Callable[[Run], bool]) -> Run:
        while not condition(self.look()) or self.run.beat < 0:
            time.sleep(self.heart.every / 2)
        return self.run

    def read_plan(self) -> Plan:
        while (plan := get(self.heart.ranks / PLAN, Plan)) is None:
            self.look()
            time.sleep(self.heart.every / 2)
        return plan

    def linger(self) -> None:
        """Stay until rank 0 has heard of this rank's failure, so that all hear of it."""
        deadline = time.monotonic() + self.patience
        with suppress(PackError):
            while self.look().failure is None and time.monotonic() < deadline:
                time.sleep(self.heart.every / 2)


def _see(dest: Path, run: Run) -> None:
    """Wait until this machine sees what rank 0 committed."""
    deadline = time.monotonic() + _SEEN
    while True:
        try:
            if PackedSource(dest).fingerprint == run.result:
                return
            problem = "another data set"
        except (RankfeedError, OSError) as error:
            problem = str(error).splitlines()[0]
        if time.monotonic() > deadline:
            raise PackError(
                "the finished data set is not seen here",
                expected=f"what rank 0 wrote (fingerprint {run.result})",
                found=problem,
                where=dest,
                remedy="all ranks need a file system that they share, under the same path",
            )
        time.sleep(0.1)


def _digest(request: Request) -> str:
    """Of what must be the same on all ranks."""
    assert isinstance(request.given, Source)
    return digest_of(request.digest.encode(), f"{len(request.given)} {request.append} {request.resume}".encode())


def failure_of(error: BaseException, rank: int) -> Failure:
    """An error as text."""
    if isinstance(error, RankfeedError):
        facts = (error.expected, error.found, error.where, error.remedy)
        return Failure(rank, error.summary, *(None if fact is None else str(fact) for fact in facts))
    return Failure(rank, f"{type(error).__name__}: {error}")


def _of_other(failure: Failure) -> PackError:
    return PackError(
        f"rank {failure.rank} failed: {failure.summary}",
        expected=failure.expected,
        found=failure.found,
        where=failure.where,
        remedy=failure.remedy,
    )
