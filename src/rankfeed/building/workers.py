"""Processes that pack stretches of a source.

They are started as plain commands, not through `multiprocessing`, since that runs the user's script again in each:
a script that calls `pack` outside of ``if __name__ == "__main__"``, a notebook or ``python -`` would fail. They
speak in pickles over their standard input and output, with the process that started them, and end with it.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from rankfeed.errors import PackError

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from rankfeed.building.workers import serve; serve()"
)


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
            worker.stop()
        pool.shutdown()


class _Worker:
    def __init__(self, function: Callable[..., Any], shared: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._first: tuple[Any, ...] | None = (function, shared)

    def ask(self, task: tuple[Any, ...]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if self._first is not None:
                pickle.dump(sys.path, self.process.stdin)
                pickle.dump(self._first, self.process.stdin)
                self._first = None
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()
            good, result = pickle.load(self.process.stdout)  # noqa: S301  (of our own child)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            raise PackError(
                "a process that packs died",
                found=f"exit status {self.process.wait()}",
                where=f"stretch {task[0]}",
                remedy="was it killed for its memory? Try fewer workers or smaller shards; a second call goes on",
            ) from error
        if not good:
            raise result
        return result

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()


def serve() -> None:
    """What a worker process does: tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever user code prints goes to standard error
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
                answer = _failure(error)
            outgoing.write(answer)
            outgoing.flush()


def _failure(error: Exception) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)  # noqa: S301  (some exceptions pickle and do not come back)
    except Exception:
        answer = pickle.dumps((False, PackError("packing failed", found=f"{type(error).__name__}: {error}")))
    return answer
