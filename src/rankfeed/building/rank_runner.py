"""Packing on the ranks of a job that is there anyway, whoever launched it: the file system is all they share.

Rank 0 plans and commits. Every rank packs each world_size-th stretch, then those that nobody has begun, from the
end; what a rank was at when it died falls to the others. No collective is called, so none can hang: a rank that
waits for another knows from a file that the other keeps fresh whether it lives and gets on, and else gives it up.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Container, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rankfeed.building.destination import refuse_foreign
from rankfeed.building.job import Job, Task
from rankfeed.building.packing import Request, lead
from rankfeed.building.rank_files import FOLDER, PLAN, REFUSALS, RUN, Failure, Plan, Run, put
from rankfeed.building.rank_hearts import LeadHeart, MemberHeart
from rankfeed.building.rank_watch import ARRIVAL, RankZero, pack_claimed
from rankfeed.building.records import Part
from rankfeed.building.staging import finished_stretches, is_whole, read_stretch
from rankfeed.errors import PackError, RankfeedError
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME, digest_of, load_manifest, make_directory
from rankfeed.topology import Topology
from rankfeed.topology.job import job_id

#: Seconds in which a file written elsewhere is seen here.
_SEEN = 10.0
#: How often this process has called for each folder: the n-th call of each rank is one pack.
_calls: Counter[Path] = Counter()


def pack_on_ranks(request: Request, patience: float) -> PackedSource:
    """Pack together with the other ranks; each of them calls this, and has the data set opened.

    Raises:
        PackError: one rank failed, or rank 0 gave no sign of life for ``patience`` seconds.
        TopologyError: it cannot be told which rank this is.
    """
    here = Topology.detect()
    _calls[request.dest] += 1
    if here.rank:
        follow(request, here, patience)
        return PackedSource(request.dest)
    runner = OnRanks(here.world_size, patience, _digest(request), _calls[request.dest])
    try:
        return lead(request, runner)
    except (RankfeedError, OSError) as error:
        if not runner.began:
            runner.refuse(request.dest / STAGING_NAME, error)
        raise


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
    call: int
    checks: bool = False  # done in `each`, as stretches are finished

    began: bool = False

    @contextmanager
    def session(self, staging: Path) -> Iterator[None]:
        """Heard by the other ranks from here on; they hear of the end, too, whatever it is."""
        self.began = True
        ranks = staging / FOLDER
        self.heart = self._heart(ranks)
        self.heart.clean()
        with self.heart:
            try:
                yield
                self.heart.say(state="done", result=load_manifest(staging.parent).fingerprint)
                deadline = time.monotonic() + self.patience
                while not self.heart.all_left(ARRIVAL * self.patience) or (
                    self.heart.untold and time.monotonic() < deadline
                ):
                    if self.heart.failure is not None:  # the data set is there, but a rank has nothing of it
                        raise self.heart.failure.error()
                    time.sleep(self.heart.every / 2)
            except BaseException as error:
                self._tell(self.heart, error)
                raise
        shutil.rmtree(ranks, ignore_errors=True)

    def refuse(self, staging: Path, error: BaseException) -> None:
        """Tell the other ranks of this job why there is no session: in the folder of another pack, perhaps."""
        heart = self._heart(staging / FOLDER, REFUSALS.replace("*", secrets.token_hex(8)))
        if not heart.job:
            return  # no rank could be told from one of another job
        # From its first word on: who hears one answer does not look for others.
        heart.run = msgspec.structs.replace(heart.run, state="failed", failure=Failure.of(error, 0))
        with suppress(OSError):
            make_directory(heart.ranks)
            with heart:
                self._wait_until_heard(heart)
        with suppress(OSError):
            (heart.ranks / heart.file).unlink()

    def _heart(self, ranks: Path, file: str = RUN) -> LeadHeart:
        every = min(1.0, self.patience / 10)
        return LeadHeart(ranks, self.world_size, job_id(), self.digest, self.call, self.patience, every, file)

    def _tell(self, heart: LeadHeart, error: BaseException) -> None:
        """Tell the other ranks of a failure, and wait until they have heard."""
        with suppress(OSError):
            heart.say(state="failed", failure=heart.failure or Failure.of(error, 0))
        self._wait_until_heard(heart)

    def _wait_until_heard(self, heart: LeadHeart) -> None:
        deadline = time.monotonic() + self.patience
        while not heart.all_left(self.patience) and time.monotonic() < deadline:
            time.sleep(heart.every / 2)

    def step(self) -> None:
        """Some of the work is done."""
        self.heart.step()

    def each(self, job: Job, tasks: list[Task]) -> Iterator[tuple[int, list[Part]]]:
        """Pack, and collect what all ranks packed.

        Raises:
            PackError: a rank failed.
        """
        heart = self.heart
        put(heart.ranks / PLAN, Plan(self.call, job.name, job.batch, [(start, stop) for _, start, stop in tasks]))
        heart.say(planned=True)
        missing = {task[0]: task for task in tasks}
        job = replace(job, step=heart.step)
        while missing:
            heart.step()
            if heart.failure is not None:
                raise heart.failure.error()
            for task in finished_stretches(job.staging, job.name) & missing.keys():
                parts = read_stretch(job.staging, task, job.name)
                # Others wrote it, now or in an earlier run: what is damaged can still be written anew.
                if parts is not None and all(self._is_whole(job.staging, part) for part in parts):
                    del missing[task]
                    yield task, parts
            mine = next_stretch(0, self.world_size, missing.keys(), heart.run.busy)
            if mine is None:
                time.sleep(heart.every / 2)
                continue
            heart.doing = mine
            heart.say()
            done = pack_claimed(heart, heart.ranks, self.patience, job, *missing.pop(mine))
            heart.doing = None
            yield done

    def _is_whole(self, staging: Path, part: Part) -> bool:
        self.heart.step()
        return is_whole(staging, part)


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
    call, every = _calls[request.dest], min(1.0, patience / 10)
    with MemberHeart(ranks, here.rank, here.world_size, job_id(), call, every) as heart:
        watch = RankZero(heart, here, patience)
        try:
            run = watch.until(lambda run: run.planned or run.state != "working")
            if run.digest != _digest(request):
                raise PackError(
                    "the ranks were not asked to pack the same",
                    expected="one source and the same arguments on all ranks",
                    where=f"rank {here.rank}, which differs from rank 0",
                )
            if run.state == "working":
                try:
                    _help(request, heart, watch, here)
                    run = watch.until(lambda run: run.state != "working")
                except (RankfeedError, OSError) as error:
                    run = _ended(request, watch, error)
            _see(request.dest, run)
        except BaseException as error:
            if not watch.over:
                with suppress(OSError):
                    heart.say(failure=Failure.of(error, here.rank))
                watch.linger()
            raise


def _help(request: Request, heart: MemberHeart, watch: RankZero, here: Topology) -> None:
    """Pack stretches until none is missing."""
    staging = heart.ranks.parent
    plan = watch.read_plan()
    if plan is None:
        return
    job = replace(request.job(plan.job, staging, plan.batch), step=heart.step)
    missing = set(range(len(plan.ranges)))
    while missing and watch.look().state == "working":
        missing -= finished_stretches(staging, job.name)
        mine = next_stretch(here.rank, here.world_size, missing, watch.run.busy)
        if mine is None:
            time.sleep(heart.every / 2)
            continue
        heart.say(doing=mine)
        pack_claimed(heart, heart.ranks, watch.patience, job, mine, *plan.ranges[mine])
        missing.discard(mine)
        heart.say(doing=None)


def _ended(request: Request, watch: RankZero, error: Exception) -> Run:
    """How the pack ended, where it did so while this rank was at something long: what it was at, others packed.

    Raises:
        PackError: it did not, or that cannot be told.
    """
    heart = watch.heart
    if heart.ended is not None and watch.run.failure is None:
        return heart.ended
    if heart.ranks.exists() or not (request.dest / MANIFEST_NAME).exists():
        raise error
    # This process was stopped, or kept its own threads from running, and heard nothing.
    manifest = load_manifest(request.dest)
    if request.is_in(manifest):
        return msgspec.structs.replace(watch.run, state="done", result=manifest.fingerprint)
    raise PackError(
        "the others ended the pack while this rank gave no sign of life",
        expected="to tell whether the data set that is there is theirs",
        where=f"rank {watch.here.rank} of {watch.here.world_size}, at {request.dest}",
        remedy="start the job again; with key=... this rank knows the data set, and patience=... waits longer",
    ) from error


def _see(dest: Path, run: Run) -> None:
    """Wait until this machine sees what rank 0 committed."""
    deadline = time.monotonic() + _SEEN
    while True:
        try:
            if PackedSource(dest).manifest.fingerprint == run.result:
                return
            problem = "another data set, before it or after it"
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
