"""Runs tasks on the ranks of a job, which share nothing but the file system.

Rank 0 partitions and commits. It describes the run in a directory; the other ranks join the run that belongs to
their call and whose rank 0 is alive, so files of an earlier job are never taken for those of this one. All ranks
claim tasks through leases: first every world_size-th one, then the others' from the end. A lease is renewed by
progress, so the task of a rank that dies or hangs is reassigned. No collective is called, so none can hang.
"""

import os
import secrets
import shutil
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from rankfeed.errors import RankfeedError, WriteError, safe_str
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME, digest_of, load_manifest, make_directory
from rankfeed.storage.commit import read_record, write_record
from rankfeed.storage.decodable import decodable
from rankfeed.storage.lease import HeldLease, Lease, LeaseOwner, StallDetector
from rankfeed.topology import Topology
from rankfeed.topology.job import is_same_job, job_id
from rankfeed.writer.coordinator import WriteRequest, check_destination, coordinate
from rankfeed.writer.runners import Runner
from rankfeed.writer.staging import Part, finished_tasks, is_intact, read_task
from rankfeed.writer.tasks import WriteJob, WriteTask, convert_os_error, run_task

#: Name of the directory of all runs in the staging directory.
_RANKS = "ranks"
#: Files of a run: its description, the tasks, the end. Directories: leases of the tasks, lease of rank 0, files of
#: the other ranks.
_INFO, _PLAN, _END, _TASKS, _RANK_0, _MEMBERS = "run.json", "plan.json", "end.json", "tasks", "rank-0", "members"
#: Ranks may call `write` this many times the stall timeout apart, since each opens the source before; for that
#: long rank 0, or a reassigned task, may make no progress.
_PATIENCE_FACTOR = 5
#: Seconds until a file that another rank wrote is visible.
_VISIBLE = 10.0
#: Number of calls of this process for each destination: the n-th calls of all ranks belong together.
_calls: Counter[Path] = Counter()
_Record = TypeVar("_Record", bound=msgspec.Struct)


@decodable
class RunInfo(msgspec.Struct, frozen=True):
    """The call of rank 0."""

    job: str
    world_size: int
    call: int
    digest: str  # of the arguments
    is_refused: bool = False  # rank 0 could not begin: another job may be writing there


@decodable
class RunPlan(msgspec.Struct, frozen=True):
    """The tasks of a run: name of the job, rows to read at once, start and stop of each task."""

    job: str
    batch: int
    ranges: list[tuple[int, int]]


@decodable
class RunEnd(msgspec.Struct, frozen=True):
    """End of a run: fingerprint of the manifest, or the first error as text, since unpickling could run code."""

    fingerprint: str = ""
    rank: int = 0
    error: str = ""


def write_on_ranks(request: WriteRequest, stall_timeout: float) -> PackedSource:
    """Write together with the other ranks, all of which call this; the dataset, opened."""
    topology = Topology.detect()
    _calls[request.dest] += 1
    assert isinstance(request.given, Source)
    facts = f"{len(request.given)} {request.append} {request.resume}"
    digest = digest_of(request.digest.encode(), facts.encode())
    info = RunInfo(job_id(), topology.world_size, _calls[request.dest], digest)
    if topology.rank:
        return _participate(request, info, topology, stall_timeout)
    runner = RanksRunner(info, topology, stall_timeout)
    try:
        return coordinate(request, runner)
    except (RankfeedError, OSError) as error:
        if not runner.has_begun:
            runner.refuse(request.dest / STAGING_NAME, error)
        raise


def claim_order(rank: int, world_size: int, tasks: Iterable[int]) -> list[int]:
    """The order in which a rank claims tasks: its own share, then the others' from the end."""
    own = sorted(task for task in tasks if task % world_size == rank)
    return own + sorted(set(tasks) - set(own), reverse=True)


def _warn(text: str) -> None:
    with suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """A record of a run; None if there is none."""
    with suppress(OSError):
        # Listed: a network file system may remember for long that a name was missing.
        if path.name in os.listdir(path.parent):
            return read_record(path, kind)
    return None


class RankRun:
    """A write by the ranks of a job, as one of them sees it.

    A thread follows the files of the run, so that a rank hears of the end, and leaves, even during a long sample.
    """

    def __init__(self, directory: Path, topology: Topology, stall_timeout: float) -> None:
        self.directory, self._topology, self._stall_timeout = directory, topology, stall_timeout
        self._interval = min(0.5, stall_timeout / 20)
        self.fingerprint = ""
        self.error: WriteError | None = None
        self.is_removed = False
        self._member = directory / _MEMBERS / f"{topology.rank}.json"
        self._stalls, self._warned = StallDetector(), False
        self._failed_task: ExitStack | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rankfeed-ranks", daemon=True)

    def __enter__(self) -> Self:
        if self._topology.rank:
            write_record(self._member, LeaseOwner.current())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._leave()
        if self._failed_task is not None:
            self._failed_task.close()

    def _leave(self) -> None:
        if self._topology.rank:
            with suppress(OSError):  # it has left already
                os.rename(self._member, self._member.with_suffix(".left"))

    def check(self) -> bool:
        """Whether the run has succeeded; raises WriteError if it failed."""
        if self.error is not None:
            raise self.error
        return bool(self.fingerprint)

    def wait(self) -> bool:
        """Wait a moment; whether the run has ended."""
        return self._ended.wait(self._interval)

    def fail(self, error: BaseException) -> None:
        """Record the first error of the run for all ranks."""
        text = str(error) if isinstance(error, RankfeedError) else f"{type(error).__name__}: {safe_str(error)}"
        with suppress(OSError):
            if self.directory.is_dir() and not (self.directory / _END).exists():
                write_record(self.directory / _END, RunEnd(rank=self._topology.rank, error=text))

    def _follow(self) -> None:
        while not self.wait():
            end = _read(self.directory / _END, RunEnd)
            if end is not None and end.error:
                self.error = WriteError(f"rank {end.rank} failed: {end.error}")
            elif end is not None:
                self.fingerprint = end.fingerprint
            elif self._topology.rank:
                with suppress(OSError):
                    self._check_rank_0()
            if self.error is not None or self.fingerprint:
                self._leave()
                self._ended.set()

    def _check_rank_0(self) -> None:
        """Report that rank 0 makes no progress: as a warning first, as the error later."""
        if not self.directory.exists():
            self.is_removed = True
            self.error = self._lost("the other ranks ended the write while this one made no progress")
            return
        rank_0 = Lease(self.directory / _RANK_0)
        if (owner := rank_0.owner()) is None:
            return
        silent, limit = rank_0.silence(owner, self._stalls), _PATIENCE_FACTOR * self._stall_timeout
        if owner.has_ended:
            self.error = self._lost(f"rank 0 died ({owner})")
        elif silent > limit:
            self.error = self._lost(f"rank 0 made no progress for {limit:g} s ({owner})")
        elif silent > self._stall_timeout and not self._warned:
            _warn(f"rank 0 made no progress for {self._stall_timeout:g} s ({owner})")
        self._warned = silent > self._stall_timeout

    def _lost(self, summary: str) -> WriteError:
        return WriteError(
            summary,
            expected="rank 0 to partition and commit the dataset, and this rank to hear of it",
            where=self.directory.parent.parent.parent,
            remedy="started again, the job continues where it stopped; if map, or reading a sample, takes that "
            "long, raise stall_timeout=; with key=... a rank can identify a dataset that was finished without it",
        )

    def run_next(self, job: WriteJob, tasks: dict[int, WriteTask]) -> tuple[WriteTask, list[Part]] | None:
        """Claim one of the unfinished tasks and run it; None if all of them are claimed."""
        claimed = {int(name) for name in os.listdir(self.directory / _TASKS)} & tasks.keys()
        # Unclaimed tasks first. There are at most as many claimed ones as ranks.
        free = claim_order(self._topology.rank, self._topology.world_size, tasks.keys() - claimed)
        for number in [*free, *sorted(claimed)]:
            held, hangs = self._claim(tasks[number], is_claimed=number in claimed)
            if held is not None:
                with ExitStack() as stack:
                    stack.enter_context(held)
                    try:
                        return tasks[number], self._run(job, tasks[number], held, in_thread=hangs)
                    except BaseException:
                        self._failed_task = stack.pop_all()  # no other rank claims it before it hears of the error
                        raise
        return None

    def _claim(self, task: WriteTask, is_claimed: bool) -> tuple[HeldLease | None, bool]:
        """The lease, and whether it was taken over from an owner that hangs."""
        lease = Lease(
            self.directory / _TASKS / f"{task.number:05d}", duration=self._stall_timeout, by_progress=True
        )
        chain = lease.chain() if is_claimed else []
        owner = chain[-1] if chain else None
        hanging = sum(not each.has_ended for each in chain)
        if owner is not None and not lease.is_expired(owner, self._stalls):
            return None, False
        if owner is not None and hanging > 1:
            # The second one raises the error, unless it died on another host.
            seconds = lease.silence(owner, self._stalls)
            if seconds > (_PATIENCE_FACTOR + 1) * self._stall_timeout:
                raise _stalled_task(task, seconds)
            return None, False
        label = f"rank {self._topology.rank} of {self._topology.world_size}"
        held = lease.acquire(owner, label, self._topology.local_rank)
        if held is not None and owner is not None:
            what = "died" if owner.has_ended else f"made no progress for {self._stall_timeout:g} s"
            what = f"is alive but {what}" if owner.has_ended is False else what
            _warn(f"{owner.label} {what} (task {task.number}); reassigning its work")
        return held, hanging > 0

    def _run(self, job: WriteJob, task: WriteTask, held: HeldLease, in_thread: bool) -> list[Part]:
        """Run a task; one on which another rank hangs in a thread, so that this rank can give it up."""
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            held.renew()
            if not in_thread:
                job.step()

        watched = replace(job, step=step)
        if not in_thread:
            return run_task(watched, task)
        future = Future[list[Part]]()

        def work() -> None:
            try:
                future.set_result(run_task(watched, task))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="rankfeed-write", daemon=True).start()
        stalls = StallDetector()
        while True:
            with suppress(TimeoutError):
                return future.result(self._interval)
            job.step()
            parts = read_task(job.staging, task.number, job.name)
            if parts is not None and all(is_intact(job.staging, part) for part in parts):
                return parts  # the other rank was only slow
            seconds = stalls.seconds("", steps)
            if seconds > _PATIENCE_FACTOR * self._stall_timeout:
                raise _stalled_task(task, seconds)


def _stalled_task(task: WriteTask, seconds: float) -> WriteError:
    return WriteError(
        f"a write task made no progress for {seconds:.0f} s, on two ranks",
        where=task,
        remedy="does map, or reading a sample, hang? If it only takes that long, raise stall_timeout=",
    )


class RanksRunner(Runner):
    """Rank 0. What other ranks write is checked as it is collected."""

    def __init__(self, info: RunInfo, topology: Topology, stall_timeout: float) -> None:
        self._info, self._topology, self._stall_timeout = info, topology, stall_timeout
        self.has_begun = False

    @contextmanager
    def session(self, staging: Path) -> Iterator[None]:
        """A run that the other ranks join; they hear of its error or its end."""
        self.has_begun = True
        began = time.monotonic()
        with ExitStack() as stack:
            self._open(stack, staging, self._info)
            try:
                yield
                fingerprint = load_manifest(staging.parent).fingerprint
                write_record(self._run.directory / _END, RunEnd(fingerprint))
                self._wait_until_left(began + _PATIENCE_FACTOR * self._stall_timeout)
            except BaseException as error:
                self._run.fail(error)
                with suppress(OSError, RankfeedError):
                    self._wait_until_left(began + self._stall_timeout)
                raise

    def refuse(self, staging: Path, error: BaseException) -> None:
        """Tell the other ranks why there is no session: another job may be writing to the directory."""
        if job_id():  # else ranks of this job cannot be told from those of others
            with suppress(OSError), ExitStack() as stack:
                self._open(stack, staging, msgspec.structs.replace(self._info, is_refused=True))
                self._run.fail(error)
                self._wait_until_left(time.monotonic() + self._stall_timeout)

    def _open(self, stack: ExitStack, staging: Path, info: RunInfo) -> None:
        directory = staging / _RANKS / secrets.token_hex(8)
        for name in (_TASKS, _MEMBERS):
            make_directory(directory / name)
        stack.callback(_remove_empty, directory.parent)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        held = Lease(directory / _RANK_0, duration=self._stall_timeout, by_progress=True).acquire(None)
        assert held is not None  # the name of the directory is new
        self._heartbeat = stack.enter_context(held)
        self._run = stack.enter_context(RankRun(directory, self._topology, self._stall_timeout))
        write_record(directory / _INFO, info)

    def step(self) -> None:
        """Show progress; raise the error of a rank that failed."""
        self._heartbeat.renew()
        self._run.check()

    def _wait_until_left(self, arrival: float) -> None:
        """Wait until all ranks have heard of the end; for those that did not come, until the time of arrival."""
        deadline = time.monotonic() + self._stall_timeout
        while True:
            self._heartbeat.renew()
            paths = list((self._run.directory / _MEMBERS).glob("[0-9]*"))
            owners = [read_record(path, LeaseOwner) for path in paths if path.suffix == ".json"]
            present = any(owner is not None and not owner.has_ended for owner in owners)
            now = time.monotonic()
            all_came = len(paths) == self._topology.world_size - 1
            if (all_came or now > arrival) and (not present or now > deadline):
                return
            time.sleep(min(0.5, self._stall_timeout / 20))

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterator[tuple[WriteTask, list[Part]]]:
        """Run tasks, and collect those that other ranks ran."""
        plan = RunPlan(job.name, job.batch, [(task.start, task.stop) for task in tasks])
        write_record(self._run.directory / _PLAN, plan)
        missing = {task.number: task for task in tasks}
        while missing:
            for number in finished_tasks(job.staging, job.name) & missing.keys():
                parts = read_task(job.staging, number, job.name)
                # A damaged one is still missing, and is written again.
                if parts is not None and all(self._is_intact(job.staging, part) for part in parts):
                    yield missing.pop(number), parts
            self.step()
            done = self._run.run_next(job, missing) if missing else None
            if done is not None:
                del missing[done[0].number]
                yield done
            elif missing:
                self._run.wait()

    def _is_intact(self, staging: Path, part: Part) -> bool:
        self.step()
        return is_intact(staging, part)


def _remove_empty(ranks: Path) -> None:
    for directory in (ranks, ranks.parent):
        with suppress(OSError):
            directory.rmdir()


def _participate(request: WriteRequest, info: RunInfo, topology: Topology, stall_timeout: float) -> PackedSource:
    """The part of all ranks but 0."""
    ranks = request.dest / STAGING_NAME / _RANKS
    with convert_os_error("cannot write the dataset", request.dest), ExitStack() as stack:
        check_destination(request.dest, append=request.append)
        stack.callback(_remove_empty, ranks)
        directory, found = _join(ranks, info, topology, stall_timeout)
        with RankRun(directory, topology, stall_timeout) as run:
            differs = found.digest != info.digest and not found.is_refused
            try:
                if differs:
                    raise WriteError(
                        "the ranks called write with different arguments",
                        expected="the same source and arguments on all ranks",
                        where=f"rank {topology.rank}, which differs from rank 0",
                    )
                _run_tasks(request, run)
            except BaseException as error:
                # The files of a run that has ended may be gone.
                if differs or not isinstance(error, Exception) or not (run.wait() or run.wait()):
                    run.fail(error)
                    raise
        return _open_when_visible(request.dest, _outcome(request, run))


def _join(ranks: Path, info: RunInfo, topology: Topology, stall_timeout: float) -> tuple[Path, RunInfo]:
    """Wait for the run that rank 0 opens for this call: its directory and description."""
    make_directory(ranks)  # an error, if this rank cannot write there
    where = f"rank {topology.rank} of {topology.world_size}, at {ranks.parent.parent}"
    limit = _PATIENCE_FACTOR * stall_timeout
    deadline, stalls = time.monotonic() + limit, StallDetector()
    while time.monotonic() < deadline:
        names: list[str] = []
        with suppress(FileNotFoundError):  # another job has ended
            names = sorted(os.listdir(ranks))
        for name in names:
            found, rank_0 = _read(ranks / name / _INFO, RunInfo), Lease(ranks / name / _RANK_0)
            with suppress(FileNotFoundError):  # removed meanwhile
                if found is None or not _is_ours(found, info) or (owner := rank_0.owner()) is None:
                    continue
                if not rank_0.is_alive(owner, stalls):
                    continue
                if found.call > info.call:
                    raise WriteError(
                        "this rank came too late: rank 0 is at its next write to this directory",
                        expected=f"all ranks to call write within {limit:g} s",
                        where=where,
                        remedy="start the job again, which continues; stall_timeout=... waits longer",
                    )
                return ranks / name, found
        time.sleep(min(0.5, stall_timeout / 20))
    raise WriteError(
        f"rank 0 did not call write within {limit:g} s",
        expected="all ranks to write to the same directory",
        where=where,
        remedy="did rank 0 end, or does it see another directory? stall_timeout=... waits longer",
    )


def _is_ours(found: RunInfo, mine: RunInfo) -> bool:
    same_job = is_same_job(found.job, mine.job)
    if same_job is False or (same_job is None and found.is_refused):
        return False
    return found.world_size == mine.world_size and found.call >= mine.call


def _run_tasks(request: WriteRequest, run: RankRun) -> None:
    """Run tasks until the run has ended."""
    while (plan := _read(run.directory / _PLAN, RunPlan)) is None:
        if run.wait():
            return

    def step() -> None:
        if run.check():
            raise _RunEndedError

    job = request.job(plan.job, run.directory.parent.parent, step, plan.batch)
    missing = {number: WriteTask(number, *bounds) for number, bounds in enumerate(plan.ranges)}
    with suppress(_RunEndedError):
        while not run.check():
            for number in finished_tasks(job.staging, job.name) & missing.keys():
                del missing[number]
            done = run.run_next(job, missing)
            if done is not None:
                del missing[done[0].number]
            elif run.wait():
                return


class _RunEndedError(Exception):
    """The run succeeded while this rank was at a task, which another rank has run."""


def _outcome(request: WriteRequest, run: RankRun) -> str:
    """Fingerprint of the dataset that the ranks wrote."""
    if run.fingerprint:
        return run.fingerprint
    assert run.error is not None
    if run.is_removed and (request.dest / MANIFEST_NAME).exists():
        manifest = load_manifest(request.dest)
        if request.is_in(manifest):
            return manifest.fingerprint
    raise run.error


def _open_when_visible(dest: Path, fingerprint: str) -> PackedSource:
    """The dataset, once this host sees what rank 0 committed."""
    deadline = time.monotonic() + _VISIBLE
    while True:
        try:
            source = PackedSource(dest)
            if source.manifest.fingerprint == fingerprint:
                return source
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
