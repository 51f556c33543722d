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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rankfeed._util.native import native_library
from rankfeed._util.pickling import main_classes
from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed._util.threads import DaemonPool
from rankfeed._util.workers import Channel, Payload, PeerGoneError, WorkerPool, is_supported
from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines.messages import SerializedBatch, receive, serialize
from rankfeed.loading.engines.regions import BorrowedRegions, RegionPool
from rankfeed.plan import Schedule

#: How many workers may die of the same batch while no other one is delivered.
_ATTEMPTS = 3
#: Seconds to wait for the workers before the first batches are built in this process.
INLINE_AFTER = 0.0
#: Seconds that other threads than the main thread wait for the workers.
_START_WAIT = 300.0
#: Seconds in which builds end whose workers were killed.
_CLOSE_WAIT = 60.0
#: What the server imports before it forks a worker: this module, and so torch.
_PRELOAD = ("cloudpickle", __name__)

#: How long a worker builds the steps of one request, and the most of them: waking a process takes about 100 us.
_GROUP_SECONDS, _MAX_GROUP = 2e-3, 8
#: Steps whose mean decides how many that are.
_STEPS_MEASURED = 16

#: Steps of the schedule, or what a rank reads of a stream.
Task = range | BatchSpec
_Request = tuple[Task, Schedule | None]
#: Batches by step, and the error of one.
Built = dict[int, BatchResult | Exception]


class ProcessEngine:
    """Builds batches ahead in processes, which are kept for the next iteration, and here until they are ready."""

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self._builder, self._num_workers, self._depth = builder, num_workers, num_workers * prefetch_factor
        self._group_size = 1
        #: Workers of an iteration that came to its end, for the next one.
        self._idle: ProcessBuilder | None = None

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        with self.workers(schedule.rank) as processes:
            first = 0
            while first < len(schedule) and not processes.start(0.0 if first else INLINE_AFTER):
                yield self._builder.build_step(schedule, first)
                first += 1

            groups, requested = self._groups(first, len(schedule)), 0
            built: Built = {}
            seconds, measured = 0.0, 0
            for step in range(first, len(schedule)):
                while step not in built:
                    if requested:
                        built.update(processes.receive(step))
                        requested -= 1
                    for group in islice(groups, self._depth - requested):
                        processes.request(group[0], group, schedule)
                        requested += 1
                seconds, measured = seconds + sum(_result_of(built[step]).seconds), measured + 1
                if measured == _STEPS_MEASURED:
                    size = round(_GROUP_SECONDS * measured / max(seconds, 1e-9))
                    self._group_size = max(1, min(_MAX_GROUP, size))
                yield _result_of(built.pop(step))
                processes.delivered += 1

    def _groups(self, first: int, end: int) -> Iterator[range]:
        """The steps of each request, in the order in which the first ones are needed."""
        while first < end:
            last = min(first + self._num_workers * self._group_size, end)
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
    if isinstance(result, Exception):
        raise result
    return result


@dataclass
class _Peer:
    """What the rank knows of a worker."""

    channel: Channel
    regions: BorrowedRegions
    schedule: Schedule | None = None  # the last one that it was sent


class ProcessBuilder:
    """Builds batches in worker processes, each of which answers its requests in order.

    A request of steps is small, so sending it never waits for the worker. That of a stream has its samples: there,
    each worker has one request at a time, and a thread that waits for the answer.
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
        self._builder, self._rank, self._count = builder, rank, count
        self._pool = WorkerPool(payload, _PRELOAD)
        self._threads = [DaemonPool(1, "rankfeed-worker") for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]
        #: Batches that the consumer has received: deaths of workers between two of them count together.
        self.delivered = 0
        self._peers: list[_Peer | None] = [None] * count
        #: Of each worker, the requests that it has not answered.
        self._requests: list[deque[_Request]] = [deque() for _ in range(count)]

    @property
    def is_mine(self) -> bool:
        return self._pool.is_mine

    def start(self, seconds: float) -> bool:
        """Start the workers and wait for them; whether they are ready."""
        # Only the main thread continues without them: building a batch in this process seeds the global generators
        # of random numbers, which all of its threads share.
        if threading.current_thread() is not threading.main_thread():
            seconds = _START_WAIT
        return self._pool.start(self._count, seconds)

    def thread(self, step: int) -> DaemonPool:
        """The thread that waits for the worker of a step of a stream."""
        return self._threads[step % self._count]

    def build(self, step: int, spec: BatchSpec) -> BatchResult:
        """The batch of a BatchSpec, built in the worker of the step."""
        with self._locks[step % self._count]:
            self.request(step, spec)
            (result,) = self.receive(step).values()
        return _result_of(result)

    def request(self, step: int, task: Task, schedule: Schedule | None = None) -> None:
        """Let the worker of a step do a task after those that were requested before."""
        index = step % self._count
        requests, request = self._requests[index], (task, schedule)
        requests.append(request)
        try:
            self._send(index, [request])
        except PeerGoneError:
            pass  # it is replaced when its answer is missing
        except StreamError:
            requests.pop()
            raise

    def receive(self, step: int) -> Built:
        """The answer of the worker of a step to its first request: the batches until one fails, and its error."""
        index = step % self._count
        requests, deaths, delivered, ending = self._requests[index], 0, -1, ""
        while deaths < _ATTEMPTS:
            steps = _steps_of(requests[0][0])
            where = f"rank {self._rank}, step {steps[0]}"
            try:
                regions = self._send(index, ()).regions
                answer = receive(self._pool.receive(index, f"the batch of {where}"), regions)
            except PeerGoneError:
                now = self.delivered  # before the replacement, which may be killed before it is seen here
                deaths, delivered = deaths + 1 if now == delivered else 1, now
                ending = self._pool.replace(index)
                if len(steps) > 1:  # which of them it died of is not known
                    self._requests[index] = requests = _split(requests)
                    deaths = 0
                continue
            requests.popleft()
            if isinstance(answer, list):
                return dict(zip(steps, answer, strict=True))
            results, error, text = answer
            error.__cause__ = RemoteTraceback(text)
            return dict(zip(steps, [*results, error], strict=False))
        requests.popleft()
        error = WorkerError(
            f"a worker process died {_ATTEMPTS} times while building the same batch",
            found=ending,
            where=f"{where}, worker {index}",
            remedy="if it was killed for memory, use fewer workers or smaller batches",
        )
        return {steps[0]: error}

    def _send(self, index: int, requests: Iterable[_Request]) -> _Peer:
        """Send requests to a worker; to one that has replaced another, all that are not answered."""
        channel, peer = self._pool.workers[index].channel, self._peers[index]
        if peer is None or peer.channel is not channel:
            peer = self._peers[index] = _Peer(channel, BorrowedRegions(channel.memory))
            requests = self._requests[index]
        for task, schedule in requests:
            news = None if schedule is peer.schedule else schedule
            peer.schedule = schedule
            _serialize(task, news, peer.regions.take_returned(), self._rank).send(channel)
        return peer

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Kill the workers and free what they hold; at the interpreter's exit the server has done that."""
        if is_finalizing() or not self.is_mine:
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
        schedule, returned, task = receive(message)
        self._schedule = self._schedule if schedule is None else schedule
        for region in returned:
            self._regions.take_back(region)
        self._serialized(task).send(channel)

    def _serialized(self, task: Task) -> SerializedBatch:
        assert self._regions is not None
        try:
            batches = serialize(self._build(task), self._main_classes, self._regions)
        except Exception as error:
            refusal = WorkerError(
                "a batch cannot be sent from its worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=_where(self._rank, task),
                remedy="let transform and collate_fn return what can be pickled, or use worker_kind='thread'",
            )
            return serialize(([], refusal, traceback.format_exc()))
        # User code that kept an array may change it later: the rank gets a copy.
        return batches._replace(buffers=self._regions.copy_kept(batches.buffers))

    def _build(self, task: Task) -> list[BatchResult] | tuple[list[BatchResult], RankfeedError, str]:
        """The batches; if one fails, those before it and the error."""
        results: list[BatchResult] = []
        try:
            if isinstance(task, BatchSpec):
                return [self._builder.build(task)]
            assert self._schedule is not None
            for result in self._builder.build_steps(self._schedule, task):
                results.append(result)
        except RankfeedError as error:
            return results, error, traceback.format_exc()
        except BaseException as error:  # of the user's code: interrupts are not delivered to workers
            where = f"rank {self._rank}, step {_steps_of(task)[len(results)]}"
            raised = WorkerError(f"{type(error).__name__}: {safe_str(error)}", where=where)
            return results, raised, traceback.format_exc()
        return results


def _serialize(task: Task, schedule: Schedule | None, returned: list[int], rank: int) -> SerializedBatch:
    try:
        return serialize((schedule, returned, task))
    except Exception as error:
        raise StreamError(
            "samples of the stream cannot be sent to a worker process",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=_where(rank, task),
            remedy="let the stream yield what can be pickled, or use worker_kind='thread'",
        ) from error


def _steps_of(task: Task) -> Sequence[int]:
    return (task.step,) if isinstance(task, BatchSpec) else task


def _split(requests: Iterable[_Request]) -> deque[_Request]:
    """Requests of one step each."""
    found: deque[_Request] = deque()
    for task, schedule in requests:
        steps = [task] if isinstance(task, BatchSpec) else [range(each, each + 1) for each in task]
        found += [(each, schedule) for each in steps]
    return found


def _where(rank: int, task: Task) -> str:
    return f"rank {rank}, step {_steps_of(task)[0]}"
