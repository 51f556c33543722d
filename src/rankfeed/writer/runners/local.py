"""Runs tasks in this process, or in worker processes of this machine."""

import pickle
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

from rankfeed._util.process_info import cpus_per_process
from rankfeed._util.signals import reraise_interrupt
from rankfeed._util.workers import Channel, Payload, PeerGoneError, WorkerPool, is_supported
from rankfeed.errors import WriteError
from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask, WrittenTask, picklable_error, run_task

#: Seconds in which the workers have to start.
_START_LIMIT = 600.0


def run_locally(workers: int | None, job: WriteJob, tasks: list[WriteTask]) -> Iterator[WrittenTask]:
    """Run tasks in this process, or in worker processes: one per core if ``workers`` is None."""
    count = min(len(tasks), cpus_per_process(1) if workers is None else workers)
    if count > 1 and is_supported():
        try:
            return _run_in_workers(Payload(partial(answer_task, job)), tasks, count)
        except Exception as error:  # the job cannot be pickled
            reraise_interrupt(error)
    return ((task, run_task(job, task)) for task in tasks)


def answer_task(job: WriteJob, message: bytearray, channel: Channel) -> None:
    """Run the task of a message in a worker, and reply with the shards or the error."""
    try:
        reply: list[Part] | Exception = run_task(job, pickle.loads(message))  # noqa: S301  (of our parent)
    except Exception as error:
        reply = picklable_error(error)
    channel.send(pickle.dumps(reply))


def _run_in_workers(payload: Payload, tasks: list[WriteTask], count: int) -> Iterator[WrittenTask]:
    pool, idle = WorkerPool(payload, ("cloudpickle", __name__)), queue.SimpleQueue[int]()

    def run_one(task: WriteTask) -> WrittenTask:
        index = idle.get()
        try:
            pool.workers[index].channel.send(pickle.dumps(task))
            result = pickle.loads(pool.receive(index, str(task)))  # noqa: S301  (of our own worker)
        except PeerGoneError as error:
            raise WriteError(
                "a worker process died",
                found=pool.replace(index),
                where=task,
                remedy="if it was killed for its memory, use fewer workers or smaller shards; called again, write "
                "continues",
            ) from error
        finally:
            idle.put(index)
        if isinstance(result, Exception):
            raise result
        return task, result

    threads = ThreadPoolExecutor(count)
    try:
        if not pool.start(count, _START_LIMIT):
            raise WriteError(f"the worker processes did not start within {_START_LIMIT:g} s")
        for index in range(count):
            idle.put(index)
        for future in as_completed([threads.submit(run_one, task) for task in tasks]):
            yield future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        pool.kill()
        threads.shutdown()
        pool.close()
