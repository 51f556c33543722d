"""Runs tasks on the ranks of a job, which share nothing but the file system.

Each rank partitions the source, which is a pure function of the data, claims tasks through leases, and waits for
those of others. The first one that sees all tasks finished commits. No rank leads, no collective is called, and
the same call in another job continues the same write. A lease is renewed by progress, so the task of a rank that
dies or hangs is reassigned.
"""

import os
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from rankfeed._util.progress import progress_bar
from rankfeed._util.threads import DaemonPool
from rankfeed.errors import RankfeedError, WriteError
from rankfeed.sources import Source
from rankfeed.sources.packed import PackedSource
from rankfeed.storage.failure import Failure, failed_tokens, find_failure, next_attempt, write_failure
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.lease import DURATION, HeldLease, Lease, LeaseOwner, StallDetector
from rankfeed.storage.manifest import STAGING_NAME
from rankfeed.topology import Topology
from rankfeed.topology.job import is_same_job, job_id
from rankfeed.writer.coordinator import REMEDY, StagedWrite, WriteRequest, check_destination
from rankfeed.writer.journal import complete_commit
from rankfeed.writer.staging import TASKS, Part, finished_tasks, is_begun, is_intact, lock_staging, read_task
from rankfeed.writer.tasks import WriteJob, WriteTask, WrittenTask, run_task

#: A reassigned task, or the rank that commits, may make no progress for this many times the stall timeout.
_PATIENCE_FACTOR = 5
#: Seconds until a file that another rank wrote is visible.
_VISIBLE = 10.0


class _EndedError(Exception):
    """Another process ended the write, probably by its commit."""


def write_on_ranks(request: WriteRequest, stall_timeout: float) -> PackedSource:
    """Write together with the other ranks, all of which call this; the dataset, opened."""
    runner = RanksRunner(request.dest, stall_timeout)
    with os_errors(WriteError, "cannot write the dataset", request.dest, REMEDY):
        check_destination(request.dest, append=request.append)
        with runner.lock() as (staging, held):
            write = StagedWrite(request, staging, held)
            has_begun = write.begin(lambda _: None, shared=True)
            if has_begun:
                runner.begin(write.stamp)
        cause: Exception | None = None
        try:
            if has_begun:
                _write(write, runner)
        except (RankfeedError, OSError, _EndedError) as error:
            if is_begun(staging, write.stamp):
                runner.fail(error)
                raise
            cause = error
        source = _open_finished(request, cause)
    if not request.append and source.manifest.origin != request.origin:
        text = f"{request.dest} has been extended since it was written; it is returned with the rows added to it"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return source


def _write(write: StagedWrite, runner: "RanksRunner") -> None:
    request = write.request
    assert isinstance(request.given, Source)
    enabled = request.progress and runner.rank == 0
    with progress_bar("writing", len(request.given), enabled=enabled) as advance:
        parts = write.run(runner.run, advance)
    with runner.lock() as (_, write.held):
        complete_commit(write.staging, write.keep_lease)
        if is_begun(write.staging, write.stamp):
            write.finish(parts, verify=True, keep=True)


def _open_finished(request: WriteRequest, cause: Exception | None) -> PackedSource:
    """The dataset, once this host sees what a rank committed."""
    deadline = time.monotonic() + _VISIBLE
    while True:
        with suppress(RankfeedError, OSError):
            source = PackedSource(request.dest)
            if request.is_in(source.manifest):
                return source
        if time.monotonic() > deadline:
            if isinstance(cause, (RankfeedError, OSError)):
                raise cause
            raise WriteError(
                "another process ended this write, or this host does not see the finished dataset",
                where=request.dest,
                remedy="use a file system that all ranks share, under the same path, for one write at a time",
            )
        time.sleep(0.1)


def claim_order(rank: int, world_size: int, tasks: Iterable[int]) -> list[int]:
    """The order in which a rank claims tasks: its own share, then the others' from the end."""
    own = sorted(task for task in tasks if task % world_size == rank)
    return own + sorted(set(tasks) - set(own), reverse=True)


class RanksRunner:
    """One of several processes that run the same tasks."""

    def __init__(self, dest: Path, stall_timeout: float) -> None:
        self._topology, self._dest, self._stall_timeout = Topology.detect(), dest, stall_timeout
        self.rank, self._staging = self._topology.rank, dest / STAGING_NAME
        self._label = f"rank {self.rank} of {self._topology.world_size}"
        self._interval = min(0.5, stall_timeout / 20)
        self._attempt, self._job = next_attempt(dest), job_id()
        self._stalls = StallDetector()
        self._next_check = 0.0
        #: Tokens of owners from before this call, which may have been killed on another host.
        self._left: set[str] = set()
        with suppress(OSError):
            for path in self._staging.glob(f"{TASKS}/*"):
                self._left.update(owner.token for owner in Lease(path).chain())

    def lock(self) -> AbstractContextManager[tuple[Path, HeldLease]]:
        """The lease of the staging directory, which each rank holds to begin and to commit."""
        duration = max(DURATION, _PATIENCE_FACTOR * self._stall_timeout)
        return lock_staging(self._dest, label=self._label, duration=duration)

    def begin(self, stamp: str) -> None:
        """Take part in a write; called with the lease."""
        self._stamp = stamp
        self._earlier = failed_tokens(self._staging)

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterator[WrittenTask]:
        """Run tasks, and collect those that other ranks ran."""
        missing = {task.number: task for task in tasks}
        while missing:
            self._check()
            for task_number in sorted(finished_tasks(job.staging, job.name) & missing.keys()):
                if (parts := read_task(job.staging, task_number, job.name)) is not None:
                    yield missing.pop(task_number), parts
            finished = self._run_next(job, missing) if missing else None
            if finished is not None:
                del missing[finished[0].number]
                yield finished
            elif missing:
                time.sleep(self._interval)

    def _check(self) -> None:
        """Raise the error of another rank; raise _EndedError if the write has ended."""
        failure = self._failure()
        if failure is not None:
            raise WriteError(f"{failure.owner} failed: {failure.text}")
        if not is_begun(self._staging, self._stamp):
            raise _EndedError
        self._next_check = time.monotonic() + self._interval

    def fail(self, error: Exception) -> None:
        """Record the first error for all ranks, unless the write has ended."""
        with suppress(OSError):
            if self._failure() is None and is_begun(self._staging, self._stamp):
                failure = Failure.of(error, f"rank {self.rank}", self._dest, self._stamp, self._attempt)
                write_failure(self._staging, secrets.token_hex(8), failure)

    def _failure(self) -> Failure | None:
        def takes_part(token: str, failure: Failure) -> bool:
            return token not in self._earlier and is_same_job(failure.job, self._job) is not False

        return find_failure(self._staging, self._stamp, self._attempt, takes_part)

    def _run_next(self, job: WriteJob, tasks: dict[int, WriteTask]) -> WrittenTask | None:
        """Claim one of the unfinished tasks and run it; None if all of them are claimed."""
        claimed = {int(name) for name in os.listdir(job.staging / TASKS)} & tasks.keys()
        # Unclaimed tasks first. There are at most as many claimed ones as ranks.
        free = claim_order(self.rank, self._topology.world_size, tasks.keys() - claimed)
        for task_number in [*free, *sorted(claimed)]:
            task, folder = tasks[task_number], job.staging / TASKS / f"{task_number:05d}"
            lease = Lease(folder, duration=self._stall_timeout, by_progress=True)
            chain = lease.chain() if task_number in claimed else []
            held = self._claim(task, lease, chain)
            if held is None:
                continue
            # Owners from before this call too, unlike in `_claim`: what they left may hang here as it did there.
            hanging = [owner for owner in chain if not owner.has_ended]
            with held:
                try:
                    return task, self._run(job, task, held, hanging)
                except Exception as error:
                    self.fail(error)  # before the lease is released, so that no other rank claims the task
                    raise
        return None

    def _claim(self, task: WriteTask, lease: Lease, chain: list[LeaseOwner]) -> HeldLease | None:
        owner = chain[-1] if chain else None
        if owner is not None and not lease.is_expired(owner, self._stalls):
            return None
        hanging = [
            holder
            for holder in chain
            if holder.has_ended is False or (holder.has_ended is None and holder.token not in self._left)
        ]
        if owner is not None and len(hanging) > 1:
            # The second one raises the error, unless it died on another host.
            seconds = lease.silence(owner, self._stalls)
            if seconds > (_PATIENCE_FACTOR + 1) * self._stall_timeout:
                raise _stalled_task(task, seconds, hanging)
            return None
        held = lease.acquire(owner, self._label, self._topology.local_rank)
        if held is not None and owner is not None:
            state = "died" if owner.has_ended else f"made no progress for {self._stall_timeout:g} s"
            state = f"is alive but {state}" if owner.has_ended is False else state
            with suppress(RuntimeWarning):  # where warnings are errors
                text = f"{owner.label} {state} (task {task.number}); reassigning its work"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
        return held

    def _run(self, job: WriteJob, task: WriteTask, held: HeldLease, hanging: list[LeaseOwner]) -> list[Part]:
        """Run a task; one on which another rank hangs in a thread, so that this rank can give it up."""
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            held.renew()
            if not hanging and time.monotonic() > self._next_check:
                self._check()

        watched = replace(job, step=step)
        if not hanging:
            return run_task(watched, task)
        pool, stalls = DaemonPool(1, "rankfeed-write"), StallDetector()
        future = pool.submit(run_task, watched, task)
        try:
            while True:
                with suppress(TimeoutError):
                    return future.result(self._interval)
                self._check()
                parts = read_task(job.staging, task.number, job.name)
                if parts is not None and all(is_intact(job.staging, part) for part in parts):
                    return parts  # the other rank was only slow
                seconds = stalls.seconds("", steps)
                if seconds > _PATIENCE_FACTOR * self._stall_timeout:
                    raise _stalled_task(task, seconds, [*hanging, held.owner])
        finally:
            pool.close()


def _stalled_task(task: WriteTask, seconds: float, owners: list[LeaseOwner]) -> WriteError:
    return WriteError(
        f"a write task made no progress for {seconds:.0f} s, on two ranks",
        found=" and ".join(map(str, owners)),
        where=task,
        remedy="check whether map or reading a sample hangs; if it only takes that long, raise stall_timeout=",
    )
