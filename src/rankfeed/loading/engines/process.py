"""Worker processes: for transforms that hold Python's lock for long.

A worker is sent step numbers and sends batches back, through a pipe of its own. Step s belongs to worker
s mod their number. A worker that dies (out of memory, say) is started again and its steps are made again: a batch
is a pure function of its step. There is no named shared memory and no lock; when the parent is gone, a worker
reads the end of its pipe and goes too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines import serialization
from rankfeed.plan import Schedule

#: How often a step may kill the worker that makes it.
_ATTEMPTS = 3
#: Seconds in which a forked worker says its first word, which takes milliseconds.
_FIRST_WORD = 30.0
#: Seconds between looks whether the parent is still there, where no pipe says so.
_PULSE = 1.0


class _RemoteTraceback(Exception):
    """The traceback of an error in a worker, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    #: The process that started it. Under fork others inherit this object, and must leave the worker alone.
    owner: int = field(default_factory=os.getpid)
    #: Steps (of a schedule) or shares (of a stream) sent to it whose batches have not come back, in order.
    tasks: deque[int | BatchSpec] = field(default_factory=deque)

    @property
    def ours(self) -> bool:
        return self.owner == os.getpid()

    def send(self, message: object) -> None:
        # As plain bytes: sent by multiprocessing's own pickler, a sample's tensors would take a file handle each.
        content = pickle.dumps(message, protocol=5)
        with suppress(OSError):  # it died: whoever waits for its next batch starts it again
            self.connection.send_bytes(content)


class ProcessEngine:
    """Processes make batches ahead. They are started at the first iteration and stay for the next.

    Args:
        num_workers: processes, started by multiprocessing's default method.
        prefetch_factor: batches each makes ahead of need.
    """

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self.builder = builder
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        #: Workers of an iteration that came to its end, for the next one.
        self._idle: list[_Worker] = []

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        idle, self._idle = self._idle, []
        # Each iteration has workers of its own, so that two of them at once do not get each other's batches.
        crew = WorkerPool(self.builder, schedule.rank, schedule, [worker for worker in idle if worker.ours])
        try:
            yield from crew.batches(min(self.num_workers, len(schedule)), self.prefetch_factor)
            if not self._idle:
                self._idle, crew.workers = crew.workers, []
        finally:
            # Left early, workers are in the middle of batches nobody wants: they go rather than be drained.
            dismiss(crew.workers)

    def close(self) -> None:
        idle, self._idle = self._idle, []
        dismiss(idle)

    def __del__(self) -> None:
        self.close()


class WorkerPool:
    """The workers of one iteration.

    Args:
        maker: sent to each.
        rank: of this process.
        schedule: whose steps they make; None where they are sent shares of a stream.
        workers: those that are there already.
    """

    def __init__(
        self, builder: BatchBuilder, rank: int, schedule: Schedule | None, workers: list[_Worker]
    ) -> None:
        self.builder = builder
        self.rank = rank
        self.schedule = schedule
        self.workers = workers
        #: Nobody is started any more.
        self.closed = False

    def batches(self, count: int, prefetch_factor: int) -> Iterator[BatchResult]:
        """All batches of the schedule in order, by ``count`` workers or as many as there are already."""
        assert self.schedule is not None
        for worker in self.workers:
            worker.send(self.schedule)
        while len(self.workers) < count:
            self.workers.append(self.start())
        steps, count = len(self.schedule), len(self.workers)
        ahead = count * prefetch_factor
        for step in range(min(ahead, steps)):
            self.ask(step % count, step)
        for step in range(steps):
            made = self.receive(step % count, step)
            if step + ahead < steps:
                self.ask(step % count, step + ahead)
            yield made

    def start(self) -> _Worker:
        """A new worker. One that is forked says that it lives: it may hang for ever before its first line.

        A lock that another thread held at the fork stays held in the child, where that thread is not. One of them
        is Python's own, held while a thread of gloo, say, enters or leaves Python (seen with 3.11).
        """
        if self.closed:
            raise WorkerError("the iteration is over", where=f"rank {self.rank}")
        forks = multiprocessing.get_context().get_start_method() == "fork"
        for _ in range(_ATTEMPTS):
            worker = self._begin(greets=forks)
            if not forks:
                return worker
            if worker.connection.poll(_FIRST_WORD):
                with suppress(EOFError, OSError):  # it died: found out when a batch is asked of it
                    worker.connection.recv_bytes()
                return worker
            dismiss([worker])
        raise WorkerError(
            f"{_ATTEMPTS} worker processes did not come to life within {_FIRST_WORD:.0f} seconds each",
            where=f"rank {self.rank}",
            remedy="call multiprocessing.set_start_method('forkserver'), or take worker_kind='thread'",
        )

    def _begin(self, *, greets: bool) -> _Worker:
        context = multiprocessing.get_context()
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work,
            args=(theirs, ours, self.builder, self.rank, self.schedule, greets),
            name="rankfeed",
            daemon=True,
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ArgumentError(
                "the loader cannot be sent to a worker process",
                found=str(error),
                remedy="make transforms functions of a module (no lambdas), or take worker_kind='thread'",
            ) from error
        finally:
            theirs.close()
        return _Worker(process, ours)

    def ask(self, index: int, task: int | BatchSpec) -> None:
        """Send a worker a step of the schedule, or a share of a stream."""
        worker = self.workers[index]
        worker.tasks.append(task)
        worker.send(task)

    def receive(self, index: int, task: int | BatchSpec) -> BatchResult:
        """The batch of the task that this worker was sent first; of a worker that dies, by another one.

        Raises:
            WorkerError: several died of it. Or what went wrong in the worker.
        """
        ending = ""
        for _ in range(_ATTEMPTS):
            worker = self.workers[index]
            try:
                wait([worker.connection, worker.process.sentinel])
                if not worker.connection.poll():
                    raise EOFError
                made = serialization.receive(worker.connection, self.builder.allocate)
            except (EOFError, OSError):
                ending = self._replace(index)
                continue
            worker.tasks.popleft()
            if isinstance(made, BatchResult):
                return made
            error, text = made
            raise error from _RemoteTraceback(text)
        raise WorkerError(
            f"a worker process died {_ATTEMPTS} times making the same batch",
            found=ending,
            where=f"{_where(self.rank, task)}, worker {index}",
            remedy="if it was killed for memory, take fewer workers or smaller batches",
        )

    def _replace(self, index: int) -> str:
        """Start a worker instead of one that is gone; how that one ended."""
        old = self.workers[index]
        old.connection.close()
        old.process.join(5)
        ending = _ending(old.process.exitcode)
        dismiss([old])
        self.workers[index] = self.start()
        for task in old.tasks:
            self.ask(index, task)
        return ending


def dismiss(workers: Sequence[_Worker], exiting: Callable[[], bool] = sys.is_finalizing) -> None:
    """End workers, whatever they are doing: one in the middle of a batch is not waited for."""
    if exiting():  # modules are being taken down, and multiprocessing has ended its daemons before that
        return
    for worker in workers:
        worker.connection.close()
        if worker.ours:
            # It has nothing to clean up, and SIGTERM would run the handler of the job in one only just forked.
            worker.process.kill()
    for worker in workers:
        if worker.ours:
            worker.process.join()


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _work(
    connection: Connection,
    others: Connection,
    builder: BatchBuilder,
    rank: int,
    schedule: Schedule | None,
    greets: bool,
) -> None:
    """What a worker process does: make the batch of each step or share it is sent, until the pipe ends."""
    import torch

    others.close()  # under fork this process holds the parent's end too, and would never read the end of it
    if greets:
        connection.send_bytes(b"")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    # A job's own handler (saving a checkpoint before preemption, say) is inherited by fork, and not meant here.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    try:
        while True:
            while not connection.poll(_PULSE):
                if os.getppid() != parent:
                    return
            message: Any = connection.recv()
            if isinstance(message, Schedule):
                schedule = message
                continue
            where = _where(rank, message)
            _deliver(connection, _attempt(builder, schedule, message, where), where)
    except (EOFError, OSError):
        return


def _deliver(connection: Connection, made: object, where: str) -> None:
    try:
        content = serialization.serialize(made)
    except Exception as error:
        refusal = WorkerError(
            "a batch cannot be sent from its worker process",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=where,
            remedy="let transform and collate_fn return what pickles, or take worker_kind='thread'",
        )
        content = serialization.serialize((refusal, traceback.format_exc()))
    serialization.send(connection, content)


def _attempt(
    builder: BatchBuilder, schedule: Schedule | None, task: int | BatchSpec, where: str
) -> BatchResult | tuple[RankfeedError, str]:
    try:
        if isinstance(task, BatchSpec):
            return builder.build(task)
        assert schedule is not None
        return builder.build_step(schedule, task)
    except RankfeedError as error:
        return error, traceback.format_exc()
    except BaseException as error:  # a worker is never interrupted: it is the user's code that raised it
        # Whatever the maker did not foresee still has to arrive, and in one piece.
        return WorkerError(f"{type(error).__name__}: {safe_str(error)}", where=where), traceback.format_exc()


def _where(rank: int, task: int | BatchSpec) -> str:
    return f"rank {rank}, step {task.step if isinstance(task, BatchSpec) else task}"


class ProcessBuilder:
    """Builds batches of a stream in worker processes, each of which gets one BatchSpec at a time."""

    def __init__(self, builder: BatchBuilder, rank: int, count: int) -> None:
        self._crew = WorkerPool(builder, rank, None, [])
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._owner = os.getpid()
        for index in range(count):
            self._crew.workers.append(self._crew.start())
            self._idle.put(index)

    @property
    def is_mine(self) -> bool:
        """Whether this process started them, and not one that it was forked from."""
        return self._owner == os.getpid()

    def __call__(self, spec: BatchSpec) -> BatchResult:
        """The batch of a spec; called by as many threads as there are workers."""
        index = self._idle.get()
        try:
            try:
                self._crew.ask(index, spec)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise StreamError(
                    "samples of the stream cannot be sent to a worker process",
                    found=f"{type(error).__name__}: {safe_str(error)}",
                    where=spec.where,
                    remedy="let the stream yield what pickles, or take worker_kind='thread'",
                ) from error
            return self._crew.receive(index, spec)
        finally:
            self._idle.put(index)

    def close(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers."""
        if exiting() or self._crew.closed or not self.is_mine:
            return
        self._crew.closed = True
        for worker in self._crew.workers:
            worker.process.kill()
        taken = [self._idle.get() for _ in self._crew.workers]
        dismiss(self._crew.workers)
        for index in taken:
            self._idle.put(index)

    def __del__(self) -> None:
        self.close()
