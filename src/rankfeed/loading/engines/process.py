"""Builds batches in worker processes, for transforms that hold the GIL for long.

A worker is sent a step number and sends a batch back. Step s belongs to worker s mod their number. A worker that
dies (out of memory, say) is replaced and its batch is built again: a batch is a pure function of its step.
"""

from __future__ import annotations

import pickle
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankfeed._util.pickling import dumps, main_classes
from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed._util.workers import Channel, Payload, PeerGoneError, RemoteTraceback, WorkerPool, is_supported
from rankfeed.errors import ArgumentError, RankfeedError, StreamError, WorkerError, safe_str
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines.regions import BorrowedRegions, RegionPool, RegionSlice
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

#: Number of buffers of a message, and the place of each; a region of -1 means that it is in the message.
_COUNT, _PLACE = struct.Struct("<16xQ8x"), struct.Struct("<4q")
_ALIGNMENT = 16

Task = int | BatchSpec


class ProcessEngine:
    """Builds batches ahead in processes, which are kept for the next iteration, and here until they are ready."""

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self._builder, self._num_workers, self._depth = builder, num_workers, num_workers * prefetch_factor
        #: Workers of an iteration that came to its end, for the next one.
        self._idle: ProcessBuilder | None = None

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        with self.workers(schedule.rank) as processes:

            def submit(step: int) -> Future[BatchResult]:
                return processes.thread(step).submit(processes.build, step, step, schedule)

            step = 0
            while step < len(schedule) and not processes.start(0.0 if step else INLINE_AFTER):
                yield self._builder.build_step(schedule, step)
                step += 1
            for result in run_ahead(range(step, len(schedule)), submit, self._depth):
                processes.delivered += 1
                yield result

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

    def build(self, step: int, task: Task, schedule: Schedule | None = None) -> BatchResult:
        """The batch of a step of the schedule, or of a BatchSpec, built in the worker of the step."""
        index = step % len(self._threads)
        with self._locks[index]:
            return self._build(index, task, schedule)

    def _build(self, index: int, task: Task, schedule: Schedule | None) -> BatchResult:
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
                continue
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
    """Runs in a worker: builds the batch of each step or BatchSpec that it is sent, then its next step."""

    def __init__(self, builder: BatchBuilder, rank: int) -> None:
        self._builder, self._rank = builder, rank
        #: Created in the rank, which has these classes.
        self._main_classes = main_classes()
        self._schedule: Schedule | None = None
        self._regions: RegionPool | None = None
        #: A step that was built before it was requested, and its batch.
        self._ahead: tuple[int, SerializedBatch] | None = None

    def __call__(self, message: bytearray, channel: Channel) -> None:
        if self._regions is None:
            self._regions = RegionPool(channel.memory)
            self._builder.allocate = self._regions.allocate
        task = receive(message)
        if isinstance(task, list):
            for region in task:
                self._regions.take_back(region)
            return
        if isinstance(task, Schedule):
            self._schedule, self._ahead = task, None
            return
        ahead, self._ahead = self._ahead, None
        is_step = isinstance(task, int)
        batch = ahead[1] if is_step and ahead is not None and ahead[0] == task else self._serialized(task)
        batch.send(channel)
        if is_step and self._schedule is not None and (step := task + self._builder.stride) < len(self._schedule):
            self._ahead = step, self._serialized(step)  # while the rank receives this one

    def _serialized(self, task: Task) -> SerializedBatch:
        where = _where(self._rank, task)
        assert self._regions is not None
        try:
            batch = serialize(self._build(task, where), self._main_classes, self._regions)
        except Exception as error:
            refusal = WorkerError(
                "a batch cannot be sent from its worker process",
                found=f"{type(error).__name__}: {safe_str(error)}",
                where=where,
                remedy="let transform and collate_fn return what can be pickled, or use worker_kind='thread'",
            )
            return serialize((refusal, traceback.format_exc()))
        # User code that kept an array may change it later: the rank gets a copy.
        return batch._replace(buffers=self._regions.copy_kept(batch.buffers))

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
    return f"rank {rank}, step {task.step if isinstance(task, BatchSpec) else task}"


class SerializedBatch(NamedTuple):
    """A pickle, and its tensors and arrays: small ones, and where the large ones are in shared memory."""

    content: bytes
    buffers: list[memoryview | RegionSlice]

    def send(self, channel: Channel) -> None:
        table = [
            each if isinstance(each, RegionSlice) else RegionSlice(-1, 0, 0, each.nbytes) for each in self.buffers
        ]
        small = [each for each in self.buffers if not isinstance(each, RegionSlice)]
        parts: list[bytes | memoryview] = [_COUNT.pack(len(table)), *(_PLACE.pack(*each) for each in table)]
        for each in small:  # aligned, since arrays will be views of the message
            parts += [each, bytes(-each.nbytes % _ALIGNMENT)]
        channel.send(b"".join([*parts, self.content]))


def serialize(value: Any, by_name: Collection[str] = (), regions: RegionPool | None = None) -> SerializedBatch:
    """Pickle a value without sending it, so that a failure can still be reported."""
    content, buffers = dumps(value, by_name)
    if regions is None:
        return SerializedBatch(content, list(buffers))
    empty = memoryview(b"")  # an empty array may be a view of a region, too
    return SerializedBatch(content, [regions.lend(each) or each if each.nbytes else empty for each in buffers])


def receive(message: bytearray, regions: BorrowedRegions | None = None) -> Any:
    """The value of a message that `SerializedBatch.send` sent; its arrays are views of the message and regions."""
    view, at = memoryview(message), _COUNT.size
    (count,) = _COUNT.unpack_from(message)
    table = [RegionSlice(*each) for each in _PLACE.iter_unpack(view[at : at + count * _PLACE.size])]
    at += count * _PLACE.size
    shared = {} if regions is None else regions.borrow([each for each in table if each.region >= 0])
    buffers = []
    for each in table:
        if each.region >= 0:
            buffers.append(shared[each])
        else:
            buffers.append(view[at : at + each.nbytes])
            at += each.nbytes + -each.nbytes % _ALIGNMENT
    return pickle.loads(view[at:], buffers=buffers)  # noqa: S301  (of our own worker)
