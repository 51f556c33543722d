"""Builds batches in worker processes, for transforms that hold the GIL for long.

A worker is sent step numbers and sends batches back. Step s belongs to worker s mod their number. A worker that
dies (out of memory, say) is replaced and its steps are built again: a batch is a pure function of its step.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rankfeed._util.workers import Channel, Payload, PeerGoneError, RemoteTraceback, WorkerPool, is_supported
from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines.serialization import receive, serialize
from rankfeed.plan import Schedule

#: How many workers may die of the same batch.
_ATTEMPTS = 3
#: Seconds to wait for the workers before the first batches are built in this process.
INLINE_AFTER = 0.05
#: What the server imports before it forks a worker: this module, and so torch.
_PRELOAD = ("cloudpickle", __name__)

Task = int | BatchSpec


class ProcessEngine:
    """Builds batches ahead in processes. They are started at the first iteration and kept for the next.

    The first batches are built in the calling process until the workers are ready.

    Args:
        builder: builds batches; sent to the workers.
        num_workers: number of processes.
        prefetch_factor: batches that each builds ahead.
    """

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self._builder, self._num_workers, self._prefetch_factor = builder, num_workers, prefetch_factor
        #: Workers of an iteration that came to its end, for the next one.
        self._idle: BuilderPool | None = None

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        """The batches of all steps."""
        # Each iteration has its own workers, so that two at once do not get each other's batches.
        pool, self._idle = self._idle, None
        if pool is None or not pool.is_mine:
            pool = BuilderPool(self._builder, schedule.rank)
        try:
            yield from self._run(pool, schedule)
            if self._idle is None:
                self._idle, pool = pool, None
        finally:
            if pool is not None:  # left early: the workers are in the middle of batches that are not needed
                pool.close()

    def _run(self, pool: BuilderPool, schedule: Schedule) -> Iterator[BatchResult]:
        steps = len(schedule)
        count = min(self._num_workers, steps)
        first = 0
        while first < steps and not pool.start(count, 0.0 if first else INLINE_AFTER):
            yield self._builder.build_step(schedule, first)
            first += 1
        count = max(count, pool.size)  # those of an earlier iteration
        pool.set_schedule(schedule)
        ahead = count * self._prefetch_factor
        for step in range(first, min(first + ahead, steps)):
            pool.request(step % count, step)
        for step in range(first, steps):
            result = pool.result(step % count, step)
            if step + ahead < steps:
                pool.request(step % count, step + ahead)
            yield result

    def __del__(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()


class ProcessBuilder:
    """Builds batches of a stream in worker processes, each of which has one BatchSpec at a time.

    With more than one, a worker that sends a large batch and a parent that sends it large samples would wait for
    each other.

    Args:
        builder: builds batches; sent to the workers.
        rank: of this process.
        count: number of workers.
    """

    def __init__(self, builder: BatchBuilder, rank: int, count: int) -> None:
        self._builder, self._count = builder, count
        self._pool = BuilderPool(builder, rank)
        self._start_lock, self._start_wait = threading.Lock(), INLINE_AFTER
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(count):
            self._idle.put(index)

    @property
    def is_mine(self) -> bool:
        """Whether this process created it, and not one that it was forked from."""
        return self._pool.is_mine

    def __call__(self, spec: BatchSpec) -> BatchResult:
        """The batch of a spec; called by as many threads as there are workers."""
        index = self._idle.get()
        try:
            with self._start_lock:
                is_ready = self._pool.start(self._count, self._start_wait)
                self._start_wait = 0.0
            if not is_ready:
                return self._builder.build(spec)
            self._pool.request(index, spec)
            return self._pool.result(index, spec)
        finally:
            self._idle.put(index)

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Kill the workers."""
        if is_finalizing() or not self.is_mine:
            return
        self._pool.kill()
        indices = [self._idle.get() for _ in range(self._count)]  # calls in progress end with an error
        self._pool.close()
        for index in indices:
            self._idle.put(index)

    def __del__(self) -> None:
        self.close()


class BuilderPool:
    """Worker processes with a BatchBuilder each; replaces those that die.

    Args:
        builder: sent to the workers.
        rank: of this process.
    """

    def __init__(self, builder: BatchBuilder, rank: int) -> None:
        if not is_supported():
            raise ArgumentError(
                "worker processes need Linux 5.3 or newer (memfd and pidfd)",
                found=f"worker_kind='process' on {sys.platform}",
                remedy="use worker_kind='thread', which delivers the same batches",
            )
        try:
            payload = Payload(BuildHandler(builder, rank))
        except Exception as error:
            raise ArgumentError(
                "the loader cannot be sent to a worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                remedy="leave what cannot be pickled (an open file, a lock) out of transforms and datasets, or "
                "use worker_kind='thread'",
            ) from error
        self._builder, self._rank = builder, rank
        self._pool = WorkerPool(payload, _PRELOAD)
        self._schedule: Schedule | None = None
        #: Tasks of each worker whose batches have not come back, in order.
        self._tasks: list[deque[Task]] = []

    @property
    def is_mine(self) -> bool:
        """Whether this process created it, and not one that it was forked from."""
        return self._pool.is_mine

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._pool.workers)

    def start(self, count: int, seconds: float) -> bool:
        """Start ``count`` workers in all and wait for them; whether they are ready."""
        ready = self._pool.start(count, seconds)
        self._tasks += [deque() for _ in range(self.size - len(self._tasks))]
        return ready

    def set_schedule(self, schedule: Schedule) -> None:
        """The schedule of the steps that are requested from now on."""
        self._schedule = schedule
        for index in range(self.size):
            self._send(index, schedule)

    def request(self, index: int, task: Task) -> None:
        """Have a worker build the batch of a step or of a BatchSpec."""
        self._tasks[index].append(task)
        try:
            self._send(index, task)
        except PeerGoneError:
            pass  # found when the batch is received
        except Exception as error:
            self._tasks[index].pop()
            raise StreamError(
                "samples of the stream cannot be sent to a worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=_where(self._rank, task),
                remedy="let the stream yield what can be pickled, or use worker_kind='thread'",
            ) from error

    def result(self, index: int, task: Task) -> BatchResult:
        """The batch of the first task of a worker; of another worker if that one dies."""
        where, ending = _where(self._rank, task), ""
        for _ in range(_ATTEMPTS):
            try:
                message = self._pool.receive(index, f"the batch of {where}")
                result = receive(message, self._pool.workers[index].channel, self._builder.allocate)
            except PeerGoneError:
                ending = self._replace(index)
                continue
            self._tasks[index].popleft()
            if isinstance(result, BatchResult):
                return result
            error, text = result
            raise error from RemoteTraceback(text)
        raise WorkerError(
            f"a worker process died {_ATTEMPTS} times while building the same batch",
            found=ending,
            where=f"{where}, worker {index}",
            remedy="if it was killed for memory, use fewer workers or smaller batches",
        )

    def _replace(self, index: int) -> str:
        ending = self._pool.replace(index)
        tasks, self._tasks[index] = self._tasks[index], deque()
        if self._schedule is not None:
            self._send(index, self._schedule)
        for task in tasks:
            self.request(index, task)
        return ending

    def _send(self, index: int, message: Any) -> None:
        serialize(message).send(self._pool.workers[index].channel)

    def kill(self) -> None:
        """Kill the workers; calls in progress end with an error."""
        self._pool.kill()

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Kill the workers and free what they hold; at the interpreter's exit the server has done that."""
        if not is_finalizing():
            self._pool.close()


class BuildHandler:
    """Runs in a worker: builds the batch of each step or BatchSpec that it is sent."""

    def __init__(self, builder: BatchBuilder, rank: int) -> None:
        self._builder, self._rank = builder, rank
        self._schedule: Schedule | None = None

    def __call__(self, message: bytes, channel: Channel) -> None:
        task = receive(message, channel, np.empty)
        if isinstance(task, Schedule):
            self._schedule = task
            return
        where = _where(self._rank, task)
        try:
            batch = serialize(self._build(task, where))
        except Exception as error:
            refusal = WorkerError(
                "a batch cannot be sent from its worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=where,
                remedy="let transform and collate_fn return what can be pickled, or use worker_kind='thread'",
            )
            batch = serialize((refusal, traceback.format_exc()))
        batch.send(channel)

    def _build(self, task: Task, where: str) -> BatchResult | tuple[RankfeedError, str]:
        try:
            if isinstance(task, BatchSpec):
                return self._builder.build(task)
            assert self._schedule is not None
            return self._builder.build_step(self._schedule, task)
        except RankfeedError as error:
            return error, traceback.format_exc()
        except BaseException as error:  # of the user's code: interrupts are not delivered to workers
            return WorkerError(f"{type(error).__name__}: {safe_str(error)}", where=where), traceback.format_exc()


def _where(rank: int, task: Task) -> str:
    return f"rank {rank}, step {task.step if isinstance(task, BatchSpec) else task}"
