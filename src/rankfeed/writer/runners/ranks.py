"""Runs tasks on the ranks of a job, which share nothing but the file system.

Rank 0 partitions and commits. All ranks claim tasks through leases: first every world_size-th one, then the
others' from the end. A lease is renewed by progress, so the task of a rank that dies or hangs is reassigned. No
collective is called, so none can hang.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.errors import RankfeedError, WriteError, safe_str
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME, digest_of, load_manifest, write_atomic
from rankfeed.storage.decodable import decodable
from rankfeed.storage.lease import HeldLease, Lease, LeaseOwner, StallDetector
from rankfeed.storage.rendezvous import Coordinator, Member
from rankfeed.topology import Topology
from rankfeed.topology.job import ONE_HOST, job_id
from rankfeed.writer.coordinator import WriteRequest, check_destination, coordinate
from rankfeed.writer.staging import Part, finished_tasks, is_intact, read_task
from rankfeed.writer.tasks import WriteJob, WriteTask, run_task

#: Name of the directory of the rendezvous in the staging directory.
_RANKS = "ranks"
#: Files of a run: the tasks, the first error, the end. Directories: leases of tasks, lease of the coordinator.
_PLAN, _FAILURE, _RESULT, _TASKS, _PROGRESS = "plan.json", "failure.json", "result.json", "tasks", "coordinator"
#: Ranks may call `write` this many times the stall timeout apart, since each opens the source before; for that
#: long rank 0, or a reassigned task, may make no progress.
_PATIENCE_FACTOR = 5
#: Seconds until a file that another rank wrote is visible.
_VISIBLE = 10.0
#: Number of calls of this process for each destination: the n-th calls of all ranks belong together.
_calls: Counter[Path] = Counter()


@decodable
class RankInfo(msgspec.Struct, frozen=True):
    """Registration of a rank: the call it makes, and its process."""

    rank: int
    world_size: int
    job: str
    call: int
    process: LeaseOwner


@decodable
class RankFailure(msgspec.Struct, frozen=True):
    """An error of a rank as text, since unpickling could run code."""

    rank: int
    summary: str
    expected: str | None = None
    found: str | None = None
    where: str | None = None
    remedy: str | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int) -> RankFailure:
        """The failure that an exception describes."""
        if isinstance(error, RankfeedError):
            facts = (error.expected, error.found, error.where, error.remedy)
            return cls(rank, error.summary, *(None if fact is None else safe_str(fact) for fact in facts))
        return cls(rank, f"{type(error).__name__}: {safe_str(error)}")

    def error(self) -> WriteError:
        """The error that the other ranks raise."""
        return WriteError(
            f"rank {self.rank} failed: {self.summary}",
            expected=self.expected,
            found=self.found,
            where=self.where,
            remedy=self.remedy,
        )


@decodable
class RunInfo(msgspec.Struct, frozen=True):
    """Reply of rank 0: its call, and the digest of its arguments."""

    call: int
    digest: str


@decodable
class RunPlan(msgspec.Struct, frozen=True):
    """The tasks of a run: name of the job, rows to read at once, start and stop of each task."""

    job: str
    batch: int
    ranges: list[tuple[int, int]]


@decodable
class RunResult(msgspec.Struct, frozen=True):
    """End of a run: fingerprint of the manifest."""

    fingerprint: str


def write_on_ranks(request: WriteRequest, stall_timeout: float) -> PackedSource:
    """Write together with the other ranks, all of which call this; the dataset, opened."""
    topology = Topology.detect()
    _calls[request.dest] += 1
    if topology.rank:
        _participate(request, topology, stall_timeout)
        return PackedSource(request.dest)
    runner = RanksRunner(topology, stall_timeout, _digest(request), _calls[request.dest])
    try:
        return coordinate(request, runner)
    except (RankfeedError, OSError) as error:
        if not runner.has_begun:
            runner.refuse(request.dest / STAGING_NAME, error)
        raise


def _digest(request: WriteRequest) -> str:
    """Of what must be equal on all ranks."""
    assert isinstance(request.given, Source)
    return digest_of(request.digest.encode(), f"{len(request.given)} {request.append} {request.resume}".encode())


def is_same_job(one: str, other: str) -> bool | None:
    """Whether two job ids are of one job; None if they do not say.

    Examples:
        >>> is_same_job("a:1", "a:1"), is_same_job("a:1", "a:2"), is_same_job("a:1", "")
        (True, False, None)
        >>> is_same_job("on host1 parent 5", "on host2 parent 5") is None  # a parent process on each host
        True
    """
    if not one or not other:
        return None
    hosts = {job.split(" ")[1] for job in (one, other) if job.startswith(ONE_HOST)}
    return None if len(hosts) > 1 else one == other


def claim_order(rank: int, world_size: int, tasks: Iterable[int]) -> list[int]:
    """The order in which a rank claims tasks: its own share, then the others' from the end.

    Examples:
        >>> claim_order(1, 3, [0, 1, 2, 3, 4, 5])
        [1, 4, 5, 3, 2, 0]
    """
    own = sorted(task for task in tasks if task % world_size == rank)
    return own + sorted(set(tasks) - set(own), reverse=True)


class TaskClaims:
    """The leases of the tasks of a run.

    Args:
        directory: of the leases.
        topology: of this rank.
        stall_timeout: seconds without progress after which a task is reassigned.
        step: called whenever this rank makes progress, or waits; may raise the error that ended the run.
    """

    def __init__(
        self, directory: Path, topology: Topology, stall_timeout: float, step: Callable[[], object]
    ) -> None:
        self._directory, self._topology, self._step = directory, topology, step
        self._stall_timeout = stall_timeout
        self._stalls = StallDetector()
        self._failed: ExitStack | None = None

    def run_next(self, job: WriteJob, tasks: dict[int, WriteTask]) -> tuple[WriteTask, list[Part]] | None:
        """Claim one of the unfinished tasks and run it; None if all of them are claimed."""
        claimed = {int(name) for name in os.listdir(self._directory)} & tasks.keys()
        # Unclaimed tasks first. There are at most as many claimed ones as ranks.
        free = claim_order(self._topology.rank, self._topology.world_size, tasks.keys() - claimed)
        for number in [*free, *sorted(claimed)]:
            with ExitStack() as stack:
                held, stalled = self._claim(stack, tasks[number], is_claimed=number in claimed)
                if held is not None:
                    try:
                        return tasks[number], self._run(job, tasks[number], held, in_thread=stalled)
                    except BaseException:
                        self._failed = stack.pop_all()  # no other rank claims it before it hears of the error
                        raise
        return None

    def _claim(self, stack: ExitStack, task: WriteTask, is_claimed: bool) -> tuple[HeldLease | None, bool]:
        """The lease, and whether it was taken over from an owner that hangs."""
        lease = Lease(self._directory / f"{task.number:05d}", duration=self._stall_timeout, by_progress=True)
        chain = lease.chain() if is_claimed else []
        if chain and not lease.is_expired(chain[-1], self._stalls):
            return None, False
        hanging = [owner for owner in chain if not owner.has_ended]
        if len(hanging) > 1:
            return None, False  # the second one raises an error, unless it makes progress
        label = f"rank {self._topology.rank} of {self._topology.world_size}"
        held = lease.enter(stack, chain[-1] if chain else None, label, self._topology.local_rank)
        if held is not None and chain:
            owner = chain[-1]
            what = "died" if owner.has_ended else f"made no progress for {self._stall_timeout:g} s"
            what = f"is alive but {what}" if owner.has_ended is False else what
            _warn(f"{owner.label} {what} (task {task.number}); reassigning its work")
        return held, bool(hanging)

    def _run(self, job: WriteJob, task: WriteTask, held: HeldLease, in_thread: bool) -> list[Part]:
        """Run a task; one on which another rank hangs in a thread, so that this rank can give it up."""
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            held.renew()
            if not in_thread:
                self._step()

        watched = replace(job, step=step)
        if not in_thread:
            return run_task(watched, task)
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append(run_task(watched, task))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=work, name="rankfeed-write", daemon=True)
        thread.start()
        stalls = StallDetector()
        while thread.is_alive():
            thread.join(_interval(self._stall_timeout) / 2)
            self._step()
            parts = read_task(job.staging, task.number, job.name)
            if parts is not None and all(is_intact(job.staging, part) for part in parts):
                return parts  # the other rank was only slow
            seconds = stalls.seconds("", steps)
            if seconds > _PATIENCE_FACTOR * self._stall_timeout:
                raise WriteError(
                    f"a write task made no progress for {seconds:.0f} s, on two ranks",
                    where=task,
                    remedy="does map, or reading a sample, hang? If it only takes that long, raise stall_timeout=",
                )
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]  # type: ignore[no-any-return]


def _interval(stall_timeout: float) -> float:
    """Seconds between looks at the files of other ranks."""
    return min(1.0, stall_timeout / 10)


def _warn(text: str) -> None:
    with suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _read(path: Path, kind: type[Any]) -> Any:
    """A file of a run; None if it does not exist."""
    with suppress(OSError, msgspec.DecodeError):
        # Listed: a network file system may remember for long that a name was missing.
        if path.name in os.listdir(path.parent):
            return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def _record_failure(run: Path, error: BaseException, rank: int) -> None:
    """Record the first error of a run for all ranks."""
    with suppress(OSError):
        if run.is_dir() and not (run / _FAILURE).exists():
            write_atomic(run / _FAILURE, msgspec.json.encode(RankFailure.of(error, rank)))


class RanksRunner:
    """Rank 0.

    Args:
        topology: of this rank.
        stall_timeout: seconds without progress after which a task is reassigned.
        digest: of the arguments.
        call: number of this call.
    """

    is_remote = False  # what other ranks write is checked as it is collected

    def __init__(self, topology: Topology, stall_timeout: float, digest: str, call: int) -> None:
        self._topology, self._stall_timeout = topology, stall_timeout
        self._info = RunInfo(call, digest)
        self.has_begun = False
        self._progress: HeldLease | None = None
        self._known: dict[str, RankInfo] = {}
        self._left: set[int] = set()
        self._present: list[RankInfo] = []
        self._heard: list[str] | None = None
        self._failure: RankFailure | None = None
        self._looking, self._closed = threading.Lock(), threading.Event()

    @contextmanager
    def session(self, staging: Path) -> Iterator[None]:
        """Ranks register, hear of errors, and hear of the end."""
        self.has_begun = True
        began = time.monotonic()
        with ExitStack() as stack:
            self._open(stack, staging)
            try:
                yield
                result = RunResult(load_manifest(staging.parent).fingerprint)
                write_atomic(self._run / _RESULT, msgspec.json.encode(result))
                self._wait_until_left(began + _PATIENCE_FACTOR * self._stall_timeout)
            except BaseException as error:
                _record_failure(self._run, error, 0)
                with suppress(OSError, RankfeedError):
                    self._wait_until_left(began + self._stall_timeout)
                raise

    def refuse(self, staging: Path, error: BaseException) -> None:
        """Tell the other ranks why there is no session: another job may be writing to the directory."""
        if job_id():  # else ranks of this job cannot be told from those of others
            with suppress(OSError), ExitStack() as stack:
                self._open(stack, staging)
                _record_failure(self._run, error, 0)
                self._wait_until_left(time.monotonic() + self._stall_timeout)

    def _open(self, stack: ExitStack, staging: Path) -> None:
        self._coordinator = Coordinator(staging / _RANKS, RankInfo)
        self._run = self._coordinator.directory / self._coordinator.token
        stack.callback(self._coordinator.leave)
        stack.callback(shutil.rmtree, self._run, ignore_errors=True)
        (self._run / _TASKS).mkdir(parents=True)
        progress = Lease(self._run / _PROGRESS, duration=self._stall_timeout, by_progress=True)
        self._progress = stack.enter_context(progress.acquire(None))
        # Ranks are answered even while this one is at a long sample; its progress is shown by `step` alone.
        thread = threading.Thread(target=self._answer, name="rankfeed-ranks", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._closed.set)

    def _answer(self) -> None:
        while not self._closed.wait(_interval(self._stall_timeout) / 2):
            with suppress(OSError):
                self._look()

    def step(self) -> None:
        """Show progress; raise the error of a rank that failed."""
        if self._progress is not None:
            self._progress.renew()
        if self._failure is not None:
            raise self._failure.error()

    def _look(self) -> None:
        """Read the registrations and the first error of the other ranks; reply if there are new ones."""
        with self._looking:
            self._failure = self._failure or _read(self._run / _FAILURE, RankFailure)
            self._read_members()

    def _read_members(self) -> None:
        heard, present = [], []
        members = self._coordinator.members()
        for token, info in sorted(members.items()):
            is_rank = 0 < info.rank < self._topology.world_size == info.world_size
            same_job = is_same_job(info.job, job_id())
            if not is_rank or same_job is False or (same_job is None and not self.has_begun):
                continue
            if info.call > self._info.call:
                continue  # it has finished this call already
            heard.append(token)
            if info.process.has_ended:
                self._left.add(info.rank)
            elif info.call == self._info.call:
                present.append(info)
        # One that was heard and has left came; files of an earlier job do not leave.
        self._left |= {self._known[token].rank for token in self._known.keys() - members.keys()}
        self._known.update((token, members[token]) for token in heard)
        if heard != self._heard:
            self._heard = heard
            self._coordinator.reply(self._info, heard)
        self._present = present

    def _wait_until_left(self, arrival: float) -> None:
        """Wait until all ranks have heard of the end, which they show by leaving."""
        deadline = time.monotonic() + self._stall_timeout
        while True:
            if self._progress is not None:
                self._progress.renew()
            self._look()
            now = time.monotonic()
            all_left = len(self._left) == self._topology.world_size - 1
            if all_left or (now > deadline if self._present else now > arrival):
                return
            time.sleep(_interval(self._stall_timeout) / 2)

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterator[tuple[WriteTask, list[Part]]]:
        """Run tasks, and collect those that other ranks ran."""
        plan = RunPlan(job.name, job.batch, [(task.start, task.stop) for task in tasks])
        write_atomic(self._run / _PLAN, msgspec.json.encode(plan))
        claims = TaskClaims(self._run / _TASKS, self._topology, self._stall_timeout, self.step)
        missing = {task.number: task for task in tasks}
        while missing:
            for number in finished_tasks(job.staging, job.name) & missing.keys():
                parts = read_task(job.staging, number, job.name)
                # A damaged one is still missing, and is written again.
                if parts is not None and all(self._is_intact(job.staging, part) for part in parts):
                    yield missing.pop(number), parts
            self.step()
            done = claims.run_next(job, missing) if missing else None
            if done is not None:
                del missing[done[0].number]
                yield done
            elif missing:
                time.sleep(_interval(self._stall_timeout) / 2)

    def _is_intact(self, staging: Path, part: Part) -> bool:
        self.step()
        return is_intact(staging, part)


class RunMonitor:
    """A thread of another rank than 0 that follows the run, even while the rank is busy.

    Args:
        member: registration of the rank; it leaves as soon as the run has ended.
        run: directory of the run.
        stall_timeout: seconds without progress of rank 0 after which it warns.
    """

    def __init__(self, member: Member[RunInfo], run: Path, stall_timeout: float) -> None:
        self.result: RunResult | None = None
        self.error: WriteError | None = None
        self.is_removed = False
        self._member, self._run, self._stall_timeout = member, run, stall_timeout
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rankfeed-monitor", daemon=True)

    def __enter__(self) -> RunMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> bool:
        """Whether the run has succeeded; raises WriteError if it failed."""
        if self.error is not None:
            raise self.error
        return self.result is not None

    def wait(self, seconds: float) -> bool:
        """Whether the run ends within some seconds."""
        return self._ended.wait(seconds)

    def _follow(self) -> None:
        stalls, warned = StallDetector(), False
        while not self._ended.wait(_interval(self._stall_timeout) / 2):
            failure = _read(self._run / _FAILURE, RankFailure)
            self.result = _read(self._run / _RESULT, RunResult)
            if failure is not None:
                self.error = failure.error()
            elif self.result is None and not self._run.exists():
                self.is_removed = True
                self.error = self._lost("the other ranks ended the write while this one made no progress")
            elif self.result is None:
                with suppress(OSError):
                    warned = self._check_progress(stalls, warned)
            if self.error is not None or self.result is not None:
                self._member.leave()
                self._ended.set()

    def _check_progress(self, stalls: StallDetector, warned: bool) -> bool:
        """Report that rank 0 makes no progress: as a warning first, as the error later."""
        limits = self._stall_timeout, _PATIENCE_FACTOR * self._stall_timeout
        stalled, hanging = (Lease(self._run / _PROGRESS, duration=limit, by_progress=True) for limit in limits)
        owner = stalled.owner()
        if owner is None or not stalled.is_expired(owner, stalls):
            return False
        if owner.has_ended:
            self.error = self._lost(f"rank 0 died ({owner})")
        elif hanging.is_expired(owner, stalls):
            self.error = self._lost(f"rank 0 made no progress for {limits[1]:g} s ({owner})")
        elif not warned:
            _warn(f"rank 0 made no progress for {limits[0]:g} s ({owner})")
        return True

    def _lost(self, summary: str) -> WriteError:
        return WriteError(
            summary,
            expected="rank 0 to partition and commit the dataset, and this rank to hear of it",
            where=self._run.parent.parent.parent,
            remedy="started again, the job continues where it stopped; if map, or reading a sample, takes that "
            "long, raise stall_timeout=; with key=... a rank can identify a dataset that was finished without it",
        )


def _participate(request: WriteRequest, topology: Topology, stall_timeout: float) -> None:
    """The part of all ranks but 0."""
    try:
        check_destination(request.dest, append=request.append)
        call = _calls[request.dest]
        info = RankInfo(topology.rank, topology.world_size, job_id(), call, LeaseOwner.current())
        member = Member(request.dest / STAGING_NAME / _RANKS, info, RunInfo)
        try:
            run = _join(request, topology, member, call, stall_timeout)
            with RunMonitor(member, run, stall_timeout) as monitor:
                try:
                    _run_tasks(request, topology, run, monitor, stall_timeout)
                except BaseException as error:
                    # The files of a run that has ended may be gone.
                    if not monitor.wait(2 * _interval(stall_timeout)):
                        _record_failure(run, error, topology.rank)
                        raise
            fingerprint = _outcome(request, monitor)
        finally:
            member.leave()
            with suppress(OSError):
                member.directory.parent.rmdir()
        _wait_until_visible(request.dest, fingerprint)
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise WriteError("cannot write the dataset", found=error, where=request.dest) from error


def _join(
    request: WriteRequest, topology: Topology, member: Member[RunInfo], call: int, stall_timeout: float
) -> Path:
    """Wait for the reply of rank 0; the directory of the run."""
    where = f"rank {topology.rank} of {topology.world_size}, at {request.dest}"
    deadline = time.monotonic() + _PATIENCE_FACTOR * stall_timeout
    while not (replies := member.replies()):
        if time.monotonic() > deadline:
            raise WriteError(
                f"rank 0 did not call write within {_PATIENCE_FACTOR * stall_timeout:g} s",
                expected="all ranks to write to the same directory",
                where=where,
                remedy="did rank 0 end, or does it see another directory? stall_timeout=... waits longer",
            )
        time.sleep(_interval(stall_timeout) / 2)
    token, info = next(iter(replies.items()))
    if info.call > call:
        raise WriteError(
            "this rank came too late: rank 0 is at its next write to this directory",
            expected=f"all ranks to call write within {_PATIENCE_FACTOR * stall_timeout:g} s",
            where=where,
            remedy="start the job again: what the others wrote is there; stall_timeout=... waits longer",
        )
    run = member.directory / token
    failure = _read(run / _FAILURE, RankFailure)
    if failure is not None:
        raise failure.error()
    if info.digest != _digest(request):
        error = WriteError(
            "the ranks called write with different arguments",
            expected="the same source and arguments on all ranks",
            where=f"rank {topology.rank}, which differs from rank 0",
        )
        _record_failure(run, error, topology.rank)
        raise error
    return run


def _run_tasks(
    request: WriteRequest, topology: Topology, run: Path, monitor: RunMonitor, stall_timeout: float
) -> None:
    """Run tasks until the run has ended."""
    pause = _interval(stall_timeout) / 2
    while (plan := _read(run / _PLAN, RunPlan)) is None:
        if monitor.wait(pause):
            return

    def step() -> None:
        if monitor.check():
            raise _RunEndedError

    job = request.job(plan.job, run.parent.parent, step, plan.batch)
    claims = TaskClaims(run / _TASKS, topology, stall_timeout, step)
    missing = {number: WriteTask(number, *bounds) for number, bounds in enumerate(plan.ranges)}
    with suppress(_RunEndedError):
        while not monitor.check():
            for number in finished_tasks(job.staging, job.name) & missing.keys():
                del missing[number]
            done = claims.run_next(job, missing)
            if done is not None:
                del missing[done[0].number]
            elif monitor.wait(pause):
                return


class _RunEndedError(Exception):
    """The run succeeded while this rank was at a task, which another rank has run."""


def _outcome(request: WriteRequest, monitor: RunMonitor) -> str:
    """Fingerprint of the dataset that the ranks wrote."""
    if monitor.result is not None:
        return monitor.result.fingerprint
    assert monitor.error is not None
    if monitor.is_removed and (request.dest / MANIFEST_NAME).exists():
        manifest = load_manifest(request.dest)
        if request.is_in(manifest):
            return manifest.fingerprint
    raise monitor.error


def _wait_until_visible(dest: Path, fingerprint: str) -> None:
    """Wait until this host sees what rank 0 committed."""
    deadline = time.monotonic() + _VISIBLE
    while True:
        try:
            if PackedSource(dest).manifest.fingerprint == fingerprint:
                return
            problem = "another dataset, written before or after it"
        except (RankfeedError, OSError) as error:
            problem = str(error).splitlines()[0]
        if time.monotonic() > deadline:
            raise WriteError(
                "this host does not see the finished dataset",
                expected=f"what rank 0 wrote (fingerprint {fingerprint})",
                found=problem,
                where=dest,
                remedy="all ranks need a file system that they share, under the same path",
            )
        time.sleep(0.1)
