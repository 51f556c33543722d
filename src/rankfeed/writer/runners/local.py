"""Runs tasks in this process, or in worker processes of this machine.

Workers are started as plain commands, since `multiprocessing` runs the user's script again in each of them: a
script that calls `write` without a main guard, a notebook or ``python -`` would fail. They receive pickles on
standard input, answer on standard output, and end with the process that started them.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rankfeed.errors import WriteError, safe_str
from rankfeed.writer.staging import Part
from rankfeed.writer.tasks import WriteJob, WriteTask, run_task

_COMMAND = (
    "import os, pickle, sys; incoming = os.fdopen(os.dup(0), 'rb'); sys.path[:] = pickle.load(incoming); "
    "from rankfeed.writer.runners.local import serve; serve(incoming, int(sys.argv[1]))"
)
#: The length of a reply, which precedes it.
_LENGTH = struct.Struct("<Q")
#: Seconds between two checks whether the other process is alive, and that a worker gets to exit.
_CHECK, _EXIT = 1.0, 5.0


@dataclass(frozen=True)
class LocalRunner:
    """This process, or worker processes of this machine.

    Args:
        workers: None: one per core.
    """

    workers: int | None
    is_remote: bool = False

    def session(self, staging: Path) -> nullcontext[None]:
        return nullcontext()

    def step(self) -> None:
        """No other process waits for progress."""

    def run(self, job: WriteJob, tasks: list[WriteTask]) -> Iterator[tuple[WriteTask, list[Part]]]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = min(len(tasks), cores if self.workers is None else self.workers)
        pickled = _pickled(job) if count > 1 else None
        if pickled is None:
            return ((task, run_task(job, task)) for task in tasks)
        return _run_in_workers(pickled, tasks, count)


def _pickled(job: WriteJob) -> bytes | None:
    """The pickle of a job; None if workers could not load it: they do not run the user's ``__main__``."""
    try:
        pickled = pickle.dumps(job)
    except Exception:
        return None
    return None if b"__main__" in pickled else pickled


def _run_in_workers(job: bytes, tasks: list[WriteTask], count: int) -> Iterator[tuple[WriteTask, list[Part]]]:
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers: list[_Worker] = []

    def run_one(task: WriteTask) -> tuple[WriteTask, list[Part]]:
        worker = idle.get()
        try:
            return task, worker.run(task)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(count)
    try:
        for _ in range(count):
            workers.append(_Worker(job))
            idle.put(workers[-1])
        for future in as_completed([pool.submit(run_one, task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.stop()
        pool.shutdown()


class _Worker:
    def __init__(self, job: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._job: bytes | None = job
        self._is_busy = False

    def run(self, task: WriteTask) -> list[Part]:
        self._is_busy = True
        try:
            self._send(task)
            succeeded, result = pickle.loads(self._receive())  # noqa: S301  (of our own child)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT)
            self.process.kill()  # what it says is not a reply
            raise WriteError(
                "a worker process died",
                found=f"exit status {self.process.wait()}",
                where=task,
                remedy="if it was killed for its memory, use fewer workers or smaller shards; called again, write "
                "continues",
            ) from error
        self._is_busy = False
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def _send(self, task: WriteTask) -> None:
        assert self.process.stdin is not None
        try:
            if self._job is not None:
                pickle.dump(sys.path, self.process.stdin)
                pickle.dump(self._job, self.process.stdin)
                self._job = None
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()
        except ValueError as error:  # the pipe was closed meanwhile: the write is over
            raise BrokenPipeError from error

    def _receive(self) -> bytes:
        """The next reply. The end of the pipe does not show a death: children of the user's code keep it open."""
        assert self.process.stdout is not None
        pipe, received, needed = self.process.stdout.fileno(), bytearray(), _LENGTH.size
        ready = select.poll()  # unlike select, for descriptors of any number
        ready.register(pipe, select.POLLIN)
        while len(received) < needed:
            is_dead = self.process.poll() is not None
            if ready.poll(0 if is_dead else 1000 * _CHECK):
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    raise EOFError
                received += piece
                if len(received) >= _LENGTH.size:
                    needed = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            elif is_dead:
                raise EOFError
        return bytes(received[_LENGTH.size :])

    def close(self) -> None:
        """Let an idle worker exit, together with the processes that the user's code started in it."""
        assert self.process.stdin is not None
        if not self._is_busy:
            with suppress(OSError):
                self.process.stdin.close()

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self._is_busy:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT)
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()


def serve(incoming: BinaryIO, parent: int) -> None:
    """Main function of a worker: run tasks until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the worker
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    # User code, and what it starts, reads nothing from the parent and prints to standard error.
    outgoing = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with suppress(EOFError, BrokenPipeError):
        pickled = pickle.load(incoming)  # noqa: S301  (of our own parent)
        job: WriteJob | None = None
        while True:
            task = pickle.load(incoming)  # noqa: S301
            try:
                if job is None:
                    job = pickle.loads(pickled)  # noqa: S301
                assert job is not None
                reply = pickle.dumps((True, run_task(job, task)))
            except Exception as error:
                reply = pickle.dumps((False, picklable_error(error)))
            outgoing.write(_LENGTH.pack(len(reply)) + reply)
            outgoing.flush()


def _exit_with(parent: int) -> None:
    """End this process with its parent, even during a long task."""
    while os.getppid() == parent:
        time.sleep(_CHECK)
    os._exit(1)


def picklable_error(error: Exception) -> Exception:
    """An error that another process can unpickle and print, which not all can."""
    try:
        str(pickle.loads(pickle.dumps(error)))  # noqa: S301
    except Exception:
        return WriteError("writing failed", found=f"{type(error).__name__}: {safe_str(error)}")
    return error
