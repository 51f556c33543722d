"""Builds batches in worker processes, for transforms that hold the GIL for long.

A worker is sent step numbers and sends their batches back. Step s belongs to worker s mod their number. A worker
that dies (out of memory, say) is replaced and its batches are built again: a batch is a pure function of its step.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rankfeed._util.pickling import main_classes
from rankfeed._util.remote_traceback import RemoteTraceback
from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed._util.workers import Channel, Payload, PeerGoneError, WorkerPool, is_supported
from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines.messages import SerializedBatch, receive, serialize
from rankfeed.loading.engines.regions import BorrowedRegions, RegionPool
from rankfeed.plan import Schedule

#: How many workers may die of the same batch while no other one is delivered.
_ATTEMPTS = 3
#: Seconds to wait for the workers before the first batches are built in this process.
INLINE_AFTER = 0.05
#: Seconds that other threads than the main thread wait for the workers.
_START_WAIT = 300.0
#: Seconds in which builds end whose workers were killed.
_CLOSE_WAIT = 60.0
#: What the server imports before it forks a worker: this module, and so torch.
_PRELOAD = ("cloudpickle", __name__)

#: How long a worker builds steps for one message, and the most of them: a message takes about 100 us.
_GROUP_SECONDS, _MAX_GROUP = 2e-3, 8
#: Steps whose mean decides how many that are.
_STEPS_MEASURED = 16

#: Steps of the schedule, or what a rank reads of a stream.
Task = range | BatchSpec
#: Steps, the batches of the first ones, and the error of the step behind these.
Built = tuple[range, list[BatchResult], Exception | None]


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

            def groups() -> Iterator[range]:
                begin = first
                while begin < len(schedule):
                    end = min(begin + self._num_workers * self._group_size, len(schedule))
                    for step in range(begin, min(begin + self._num_workers, end)):
                        yield range(step, end, self._num_workers)
                    begin = end

            def submit(steps: range) -> Future[Built]:
                return processes.thread(steps[0]).submit(processes.build_steps, steps, schedule)

            waiting: dict[int, BatchResult | Exception] = {}
            seconds, built = 0.0, 0
            for steps, results, error in run_ahead(groups(), submit, self._depth):
                seconds, built = seconds + sum(sum(each.seconds) for each in results), built + len(results)
                if built >= _STEPS_MEASURED and self._group_size == 1:
                    self._group_size = max(1, min(_MAX_GROUP, round(_GROUP_SECONDS * built / max(seconds, 1e-9))))
                waiting.update(zip(steps, [*results, error] if error else results, strict=False))
                results.clear()
                while first in waiting:
                    yield _result_of(waiting.pop(first))
                    processes.delivered += 1
                    first += 1

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
    schedule: Schedule | None = None  # that it was sent


class ProcessBuilder:
    """Builds batches in worker processes, each of which has one task at a time, and a thread that waits for it."""

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
        self._builder, self._rank = builder, rank
        self._pool = WorkerPool(payload, _PRELOAD)
        self._threads = [DaemonPool(1, "rankfeed-worker") for _ in range(count)]
        self._locks = [threading.Lock() for _ in range(count)]
        #: Batches that the consumer has received: deaths of workers between two of them count together.
        self.delivered = 0
        self._peers: list[_Peer | None] = [None] * count

    @property
    def is_mine(self) -> bool:
        return self._pool.is_mine

    def start(self, seconds: float) -> bool:
        """Start the workers and wait for them; whether they are ready."""
        # Only the main thread continues without them: building a batch in this process seeds the global generators
        # of random numbers, which all of its threads share.
        if threading.current_thread() is not threading.main_thread():
            seconds = _START_WAIT
        return self._pool.start(len(self._threads), seconds)

    def thread(self, step: int) -> DaemonPool:
        """The thread that waits for the worker of a step."""
        return self._threads[step % len(self._threads)]

    def build(self, step: int, spec: BatchSpec) -> BatchResult:
        """The batch of a BatchSpec, built in the worker of the step."""
        index = step % len(self._threads)
        with self._locks[index]:
            return self._build(index, spec, None)[0]

    def build_steps(self, steps: range, schedule: Schedule) -> Built:
        """The batches of some steps of a schedule, all of which belong to one worker."""
        index, results = steps[0] % len(self._threads), list[BatchResult]()
        with self._locks[index]:
            try:
                while len(results) < len(steps):
                    results += self._build(index, steps[len(results) :], schedule)
            except Exception as error:
                return steps, results, error
        return steps, results, None

    def _build(self, index: int, task: Task, schedule: Schedule | None) -> list[BatchResult]:
        """The batch of a BatchSpec, or of at least the first step."""
        where, ending = _where(self._rank, task), ""
        request, deaths, delivered = _serialize(task, where), 0, -1
        while deaths < _ATTEMPTS:
            worker = self._pool.workers[index]
            try:
                peer = self._peers[index]
                if peer is None or peer.channel is not worker.channel:  # a new worker
                    peer = self._peers[index] = _Peer(worker.channel, BorrowedRegions(worker.channel.memory))
                if schedule is not None and peer.schedule is not schedule:
                    serialize(schedule).send(peer.channel)
                    peer.schedule = schedule
                if returned := peer.regions.take_returned():
                    serialize(returned).send(peer.channel)
                request.send(peer.channel)
                result = receive(self._pool.receive(index, f"the batch of {where}"), peer.regions)
            except PeerGoneError:
                now = self.delivered  # before the replacement, which may be killed before it is seen here
                deaths, delivered = deaths + 1 if now == delivered else 1, now
                ending = self._pool.replace(index)
                if isinstance(task, range) and len(task) > 1:  # which of them it died of is not known
                    task, deaths = task[:1], 0
                    request = _serialize(task, where)
                continue
            if isinstance(result, list):
                return result
            error, text = result
            raise error from RemoteTraceback(text)
        raise WorkerError(
            f"a worker process died {_ATTEMPTS} times while building the same batch",
            found=ending,
            where=f"{where}, worker {index}",
            remedy="if it was killed for memory, use fewer workers or smaller batches",
        )

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
    """Runs in a worker: builds the batches of the steps or the BatchSpec that it is sent, then its next steps."""

    def __init__(self, builder: BatchBuilder, rank: int) -> None:
        self._builder, self._rank = builder, rank
        #: Created in the rank, which has these classes.
        self._main_classes = main_classes()
        self._schedule: Schedule | None = None
        self._regions: RegionPool | None = None
        #: Steps that were built before they were requested, and their batches; and the most steps of a request.
        self._ahead: tuple[range, SerializedBatch] | None = None
        self._group_size = 1

    def __call__(self, message: bytearray, channel: Channel) -> None:
        if self._regions is None:
            self._regions = RegionPool(channel.memory)
            self._builder.allocate = self._regions.allocate
        task = receive(message)
        if isinstance(task, Schedule):
            self._schedule, self._ahead = task, None
        elif isinstance(task, BatchSpec):
            self._serialized(task).send(channel)
        elif isinstance(task, range):
            self._send_steps(task, channel)
        else:
            for region in task:
                self._regions.take_back(region)

    def _send_steps(self, steps: range, channel: Channel) -> None:
        assert self._schedule is not None
        ahead, self._ahead = self._ahead, None
        built, batches = ahead if ahead is not None else (steps, self._serialized(steps))
        if built != steps[: len(built)]:
            built, batches = steps, self._serialized(steps)
        batches.send(channel)
        self._group_size = max(self._group_size, len(steps))
        left = steps[len(built) :]
        if not left:
            stride = self._builder.stride
            left = range(steps[-1] + stride, len(self._schedule), stride)[: self._group_size]
        if left:
            self._ahead = left, self._serialized(left)  # while the rank receives the others

    def _serialized(self, task: Task) -> SerializedBatch:
        where = _where(self._rank, task)
        assert self._regions is not None
        try:
            batches = serialize(self._build(task, where), self._main_classes, self._regions)
        except Exception as error:
            refusal = WorkerError(
                "a batch cannot be sent from its worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=where,
                remedy="let transform and collate_fn return what can be pickled, or use worker_kind='thread'",
            )
            return serialize((refusal, traceback.format_exc()))
        # User code that kept an array may change it later: the rank gets a copy.
        return batches._replace(buffers=self._regions.copy_kept(batches.buffers))

    def _build(self, task: Task, where: str) -> list[BatchResult] | tuple[RankfeedError, str]:
        """The batches before the first error, which is raised when its step is requested again; or that error."""
        results: list[BatchResult] = []
        try:
            if isinstance(task, BatchSpec):
                return [self._builder.build(task)]
            assert self._schedule is not None
            for result in self._builder.build_steps(self._schedule, task):
                results.append(result)
        except RankfeedError as error:
            return results or (error, traceback.format_exc())
        except BaseException as error:  # of the user's code: interrupts are not delivered to workers
            raised = WorkerError(f"{type(error).__name__}: {safe_str(error)}", where=where)
            return results or (raised, traceback.format_exc())
        return results


def _serialize(task: Task, where: str) -> SerializedBatch:
    try:
        return serialize(task)
    except Exception as error:
        raise StreamError(
            "samples of the stream cannot be sent to a worker process",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=where,
            remedy="let the stream yield what can be pickled, or use worker_kind='thread'",
        ) from error


def _where(rank: int, task: Task) -> str:
    return f"rank {rank}, step {task.step if isinstance(task, BatchSpec) else task[0]}"
