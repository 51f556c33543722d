"""Builds batches in worker processes, for transforms that hold the GIL for long.

A worker is sent step numbers, some of them ahead, and sends their batches back in this order. Step s belongs to
worker s mod their number. A worker that dies (out of memory, say) is replaced and its batches are built again: a
batch is a pure function of its step.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rankfeed._util.native import native_library
from rankfeed._util.pickling import main_classes
from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed._util.signals import reraise_interrupt
from rankfeed._util.threads import DaemonPool
from rankfeed._util.workers import Channel, Payload, PeerGoneError, WorkerPool, is_supported
from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines.messages import SerializedBatch, receive, serialize
from rankfeed.loading.engines.regions import BorrowedRegions, RegionPool
from rankfeed.plan import Schedule

#: How many workers may die of the same batch.
_ATTEMPTS = 3
#: Seconds that the main thread waits for the workers before it builds the next batch itself.
INLINE_AFTER = 0.0
#: Seconds that other threads than the main thread wait for the workers.
_START_WAIT = 300.0
#: Seconds in which builds end whose workers were killed.
_CLOSE_WAIT = 60.0
#: What the server imports before it forks a worker: this module, and so torch.
_PRELOAD = ("cloudpickle", __name__)

#: Steps of one request, the most that take about this long, since waking a process takes about 100 us. Their mean
#: time follows slowly, as a request that is larger than all before takes memory, which stays.
_GROUP_SIZES, _GROUP_SECONDS, _WEIGHT = (8, 4, 2), 3e-3, 1 / 32
#: Shared memory that they take at most, unless it is one step.
_GROUP_BYTES = 16 << 20
#: Requests that a worker has at most: the socket is full after some hundred.
_MAX_REQUESTS = 64

#: Steps of the schedule that belong to one worker, or what a rank reads of a stream.
Task = range | BatchSpec


class ProcessEngine:
    """Builds batches ahead in processes, which are kept for the next iteration, and here until they are ready."""

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self._builder, self._num_workers = builder, num_workers
        self._max_requests = min(prefetch_factor, _MAX_REQUESTS)
        #: Of a step: mean time, and the most shared memory.
        self._seconds, self._bytes = _GROUP_SECONDS, 0
        #: Workers of an iteration that came to its end, for the next one.
        self._idle: ProcessBuilder | None = None

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        with self.workers(schedule.rank) as processes:
            first = 0
            while first < len(schedule) and not processes.start():
                yield self._builder.build_step(schedule, first)
                first += 1
            groups = self._groups(first, len(schedule))
            group = next(groups, None)
            built: dict[int, BatchResult | Exception] = {}
            for step in range(first, len(schedule)):
                while step not in built:
                    if processes.num_requests(step):
                        built.update(self._receive(processes, step))
                    while group is not None and processes.num_requests(group[0]) < self._max_requests:
                        processes.request(group[0], group, schedule)
                        group = next(groups, None)
                yield _result_of(built.pop(step))

    def _receive(self, processes: ProcessBuilder, step: int) -> dict[int, BatchResult | Exception]:
        """Batches of a worker; how long they took decides how many steps the next requests have."""
        built = processes.receive(step)
        for result in built.values():
            if isinstance(result, BatchResult):
                self._seconds += _WEIGHT * (sum(result.seconds) - self._seconds)
        self._bytes = max(self._bytes, processes.step_bytes)
        return built

    def _groups(self, first: int, end: int) -> Iterator[range]:
        """The steps of each request, in the order in which the first ones are needed."""
        while first < end:
            most = min(_GROUP_SECONDS / self._seconds, _GROUP_BYTES / max(1, self._bytes))
            size = next((size for size in _GROUP_SIZES if size <= most), 1)
            last = min(first + self._num_workers * size, end)
            for step in range(first, min(first + self._num_workers, last)):
                yield range(step, last, self._num_workers)
            first = last

    @contextmanager
    def workers(self, rank: int) -> Iterator[ProcessBuilder]:
        """The workers of one iteration: two at once do not get each other's batches."""
        processes, self._idle = self._idle, None
        if processes is None or not processes.is_mine:
            processes = ProcessBuilder(self._builder, rank, self._num_workers)
        is_complete = False
        try:
            yield processes
            is_complete = True
        finally:
            if is_complete and self._idle is None:
                self._idle = processes
            else:  # left early: the workers are in the middle of batches that are not needed
                processes.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": None}


def _result_of(result: BatchResult | Exception) -> BatchResult:
    try:
        if isinstance(result, Exception):
            raise result
        return result
    finally:
        del result  # the traceback has this frame: the batches built ahead would stay until garbage is collected


@dataclass
class _Peer:
    """What the rank knows of a worker."""

    channel: Channel
    regions: BorrowedRegions
    schedule: Schedule | None = None  # the last one that it was sent


class ProcessBuilder:
    """Builds batches in worker processes, each of which answers its requests in order.

    Sending a request never waits for the worker: those of steps are small and few. One of a stream has its
    samples, so that each worker has one at a time, and a thread that waits for the answer.
    """

    def __init__(self, builder: BatchBuilder, rank: int, count: int) -> None:
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
        self._rank, self._count = rank, count
        self._pool = WorkerPool(payload, _PRELOAD)
        self._threads = [DaemonPool(1, "rankfeed-worker") for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]
        self._peers: list[_Peer | None] = [None] * count
        #: Of each worker, the requests that it has not answered, and the schedule of their steps.
        self._requests: list[deque[Task]] = [deque() for _ in range(count)]
        self._schedule: Schedule | None = None
        self.step_bytes = 0  # of shared memory that a step of the last answer takes

    def num_requests(self, step: int) -> int:
        """Requests that the worker of a step has not answered."""
        return len(self._requests[step % self._count])

    @property
    def is_mine(self) -> bool:
        return self._pool.is_mine

    def start(self) -> bool:
        """Start the workers and wait a moment for them; whether they are ready."""
        # Only the main thread continues without them: building a batch in this process seeds the global generators
        # of random numbers, which all of its threads share.
        is_main = threading.current_thread() is threading.main_thread()
        return self._pool.start(self._count, INLINE_AFTER if is_main else _START_WAIT)

    def thread(self, step: int) -> DaemonPool:
        """The thread that waits for the worker of a step of a stream."""
        return self._threads[step % self._count]

    def build(self, step: int, spec: BatchSpec) -> BatchResult:
        """The batch of a BatchSpec, built in the worker of the step."""
        index = step % self._count
        with self._locks[index]:
            try:
                self.request(step, spec)
            except Exception as error:
                self._requests[index].clear()
                raise StreamError(
                    "samples of the stream cannot be sent to a worker process",
                    found=f"{type(error).__name__}: {safe_str(error)}",
                    where=_where(self._rank, spec),
                    remedy="let the stream yield what can be pickled, or use worker_kind='thread'",
                ) from error
            (result,) = self.receive(step).values()
        return _result_of(result)

    def request(self, step: int, task: Task, schedule: Schedule | None = None) -> None:
        """Let the worker of a step do a task after those that were requested before."""
        index, self._schedule = step % self._count, schedule
        self._requests[index].append(task)
        with suppress(PeerGoneError):  # it is replaced when its answer is missing
            self._send(index, [task])

    def receive(self, step: int) -> dict[int, BatchResult | Exception]:
        """What the worker of a step answers to its first request: the batches, or the error of a single step.

        Nothing if one of several steps failed: each is requested again by itself, so that the right one fails.
        """
        index, deaths = step % self._count, 0
        requests = self._requests[index]
        while True:
            steps, where = _steps_of(requests[0]), _where(self._rank, requests[0])
            try:
                regions = self._send(index, ()).regions
                message = self._pool.receive(index, f"the batch of {where}")
                requests.popleft()
                break
            except PeerGoneError:
                ending = self._pool.replace(index)
            if len(steps) > 1:  # which of them it died of is not known
                requests.popleft()
                requests.extendleft(range(step, step + 1) for step in reversed(steps))
                continue
            deaths += 1
            if deaths == _ATTEMPTS:
                requests.popleft()
                error = WorkerError(
                    f"a worker process died {_ATTEMPTS} times while building the same batch",
                    found=ending,
                    where=f"{where}, worker {index}",
                    remedy="if it was killed for memory, use fewer workers or smaller batches",
                )
                return {steps[0]: error}
        try:
            answer = receive(message, regions)
        except Exception as raised:  # of what the user's classes run
            reraise_interrupt(raised)
            answer = _refusal(raised, where), traceback.format_exc()
        if isinstance(answer, list):
            self.step_bytes = regions.last_bytes // len(steps)
            return dict(zip(steps, answer, strict=True))
        if len(steps) > 1:
            for single in steps:
                self.request(single, range(single, single + 1), self._schedule)
            return {}
        error, text = answer
        error.__cause__ = RemoteTraceback(text)
        return {steps[0]: error}

    def _send(self, index: int, tasks: Collection[Task]) -> _Peer:
        """Send tasks to a worker in one message; to one that has replaced another, all that are not answered."""
        if not self.is_mine:
            raise WorkerError(
                "the worker processes belong to another process",
                found="an iterator that was begun before this process was forked",
                remedy="begin a new one: iter(loader)",
            )
        channel, peer = self._pool.workers[index].channel, self._peers[index]
        if peer is None or peer.channel is not channel:
            peer = self._peers[index] = _Peer(channel, BorrowedRegions(channel.memory))
            tasks = self._requests[index]
        if tasks:
            news, peer.schedule = None if peer.schedule is self._schedule else self._schedule, self._schedule
            serialize((news, peer.regions.take_returned(), [*tasks])).send(channel)
        return peer

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Kill the workers and free what they hold; at the interpreter's exit that has been done before."""
        if is_finalizing():
            return
        if not self.is_mine:
            self._pool.release()
            return
        for thread in self._threads:
            thread.close()
        self._pool.kill()
        held = [lock for lock in self._locks if lock.acquire(timeout=_CLOSE_WAIT)]  # builds end with an error
        self._pool.close()
        for lock in held:
            lock.release()

    def __del__(self) -> None:
        if hasattr(self, "_locks"):
            self.close()


class BuildHandler:
    """Runs in a worker: builds the batches of the steps or the BatchSpec that it is sent."""

    def __init__(self, builder: BatchBuilder, rank: int) -> None:
        self._builder, self._rank = builder, rank
        #: Created in the rank, which has these classes.
        self._main_classes = main_classes()
        self._schedule: Schedule | None = None
        self._regions: RegionPool | None = None

    def __call__(self, message: bytearray, channel: Channel) -> None:
        if self._regions is None:
            self._regions = RegionPool(channel.memory)
            self._builder.allocate = self._regions.allocate
            if (library := native_library()) is not None:
                library.rankfeed_use_nontemporal_stores()
        schedule, returned, tasks = receive(message)
        self._schedule = self._schedule if schedule is None else schedule
        for region in returned:
            self._regions.take_back(region)
        for task in tasks:
            self._answer(task).send(channel)

    def _answer(self, task: Task) -> SerializedBatch:
        """The batches of a task; the error of one that has a single step, else None."""
        assert self._regions is not None
        where = _where(self._rank, task)
        try:
            answer = serialize(self._build(task, where), self._main_classes, self._regions)
            # User code that kept an array may change it later: the rank gets a copy.
            return answer._replace(buffers=self._regions.copy_kept(answer.buffers))
        except Exception as raised:
            if len(_steps_of(task)) > 1:
                return serialize(None)
            error = raised if isinstance(raised, RankfeedError) else _refusal(raised, where)
            return serialize((error, traceback.format_exc()))

    def _build(self, task: Task, where: str) -> list[BatchResult]:
        try:
            if isinstance(task, BatchSpec):
                return [self._builder.build(task)]
            assert self._schedule is not None
            return list(self._builder.build_steps(self._schedule, task))
        except RankfeedError:
            raise
        except BaseException as error:  # of the user's code: interrupts are not delivered to workers
            raise WorkerError(f"{type(error).__name__}: {safe_str(error)}", where=where) from error


def _refusal(error: Exception, where: str) -> WorkerError:
    return WorkerError(
        "a batch cannot be sent from its worker process",
        found=f"{type(error).__name__}: {safe_str(error)}",
        where=where,
        remedy="let transform and collate_fn return what can be pickled, or use worker_kind='thread'",
    )


def _steps_of(task: Task) -> Sequence[int]:
    return (task.step,) if isinstance(task, BatchSpec) else task


def _where(rank: int, task: Task) -> str:
    return f"rank {rank}, step {_steps_of(task)[0]}"
