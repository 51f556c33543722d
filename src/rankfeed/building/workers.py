"""Processes that pack stretches of a source.

They are started as plain commands, not through `multiprocessing`, since that runs the user's script again in each:
a script that calls `pack` outside of ``if __name__ == "__main__"``, a notebook or ``python -`` would fail. They
speak in pickles over their standard input and output, with the process that started them, and end with it.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, BinaryIO

from rankfeed.errors import PackError, safe_str

_START = (
    "import os, pickle, sys; incoming = os.fdopen(os.dup(0), 'rb'); sys.path[:] = pickle.load(incoming); "
    "from rankfeed.building.workers import serve; serve(incoming, int(sys.argv[1]))"
)
#: The length of an answer, before it.
_LENGTH = struct.Struct("<Q")
#: Seconds between two looks whether the other process lives, and those that a worker has to end by itself.
_LOOK, _END = 1.0, 5.0


def can_travel(shared: Any) -> bytes | None:
    """The pickle of what workers need, or None where it cannot be unpickled in another process.

    That is so for what cannot be pickled, and for classes of the script that runs: workers do not run it.
    """
    try:
        pickled = pickle.dumps(shared)
    except Exception:
        return None
    return None if b"__main__" in pickled else pickled


def run(
    function: Callable[..., Any], shared: bytes, tasks: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    """``function(shared, *task)`` for each task, in worker processes; results come as they are done.

    Args:
        function: of a module, found there by its name.
        shared: the pickle of its first argument.
        tasks: the other arguments.
        workers: processes.

    Raises:
        PackError: a worker died.
        Exception: what the function raised.
    """
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    started: list[_Worker] = []

    def one(task: tuple[Any, ...]) -> Any:
        worker = idle.get()
        try:
            return worker.ask(task)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            started.append(_Worker(function, shared))
            idle.put(started[-1])
        for future in as_completed([pool.submit(one, task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.dismiss()
        for worker in started:
            worker.stop()
        pool.shutdown()


class _Worker:
    def __init__(self, function: Callable[..., Any], shared: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._first: tuple[Any, ...] | None = (function, shared)
        self._at_work = False

    def ask(self, task: tuple[Any, ...]) -> Any:
        self._at_work = True
        try:
            self._tell(task)
            good, result = pickle.loads(self._answer())  # noqa: S301  (of our own child)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END)
            self.process.kill()  # whatever it is that it says, it is nothing we know
            raise PackError(
                "a process that packs died",
                found=f"exit status {self.process.wait()}",
                where=f"stretch {task[0]}",
                remedy="was it killed for its memory? Try fewer workers or smaller shards; a second call goes on",
            ) from error
        self._at_work = False
        if not good:
            raise result
        return result

    def _tell(self, task: tuple[Any, ...]) -> None:
        assert self.process.stdin is not None
        try:
            if self._first is not None:
                pickle.dump(sys.path, self.process.stdin)
                pickle.dump(self._first, self.process.stdin)
                self._first = None
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()
        except ValueError as error:  # the pipe was closed meanwhile: the pack is over
            raise BrokenPipeError from error

    def _answer(self) -> bytes:
        """What it says, with its length before it.

        The end of the pipe alone does not tell that it died: what the user's code forked off keeps it open.
        """
        assert self.process.stdout is not None
        pipe, got, needed = self.process.stdout.fileno(), bytearray(), _LENGTH.size
        ready = select.poll()  # unlike select, for file descriptors of any number
        ready.register(pipe, select.POLLIN)
        while len(got) < needed:
            gone = self.process.poll() is not None
            if ready.poll(0 if gone else 1000 * _LOOK):
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    raise EOFError
                got += piece
                if len(got) >= _LENGTH.size:
                    needed = _LENGTH.size + _LENGTH.unpack_from(got)[0]
            elif gone:
                raise EOFError
        return bytes(got[_LENGTH.size :])

    def dismiss(self) -> None:
        """Let it end by itself, with the processes that the user's code started in it; not if it is at work."""
        assert self.process.stdin is not None
        if not self._at_work:
            with suppress(OSError):
                self.process.stdin.close()

    def stop(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self._at_work:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END)
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()


def serve(incoming: BinaryIO, parent: int) -> None:
    """What a worker process does: tasks from its parent until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # User code, and what it starts, has no part in what is said: it reads nothing and prints to standard error.
    outgoing = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    with suppress(EOFError, BrokenPipeError):
        function, shared_pickle = pickle.load(incoming)  # noqa: S301  (of our own parent)
        shared: Any = None
        while True:
            task = pickle.load(incoming)  # noqa: S301
            try:
                if shared is None:
                    shared = pickle.loads(shared_pickle)  # noqa: S301
                answer = pickle.dumps((True, function(shared, *task)))
            except Exception as error:
                answer = pickle.dumps((False, portable(error)))
            outgoing.write(_LENGTH.pack(len(answer)) + answer)
            outgoing.flush()


def _end_with(parent: int) -> None:
    """End this process when its parent has: one that is at a long task, or hangs, hears nothing of it."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def portable(error: Exception) -> Exception:
    """An exception that another process can unpickle and print, which not all can."""
    try:
        str(pickle.loads(pickle.dumps(error)))  # noqa: S301
    except Exception:
        return PackError("packing failed", found=f"{type(error).__name__}: {safe_str(error)}")
    return error
