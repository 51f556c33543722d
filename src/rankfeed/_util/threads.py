"""A pool of daemon threads, work that runs ahead in one, and functions that run on many files at once."""

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from rankfeed._util.progress import progress_bar

_Result = TypeVar("_Result")
_Argument = TypeVar("_Argument")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]

#: Threads of :func:`in_parallel`: most of the time is spent waiting for the disk.
_THREADS = min(16, 4 * (os.cpu_count() or 1))
#: Seconds that the interpreter's exit waits for running tasks, over all pools.
_EXIT_WAIT = 1.0


class DaemonPool:
    """Runs tasks in daemon threads, in the order in which they were submitted.

    The interpreter joins the threads of a ``ThreadPoolExecutor`` when it exits, so that one hanging task keeps the
    process alive after its error. These threads are stopped at exit, which waits for at most a second.
    """

    def __init__(self, threads: int, name: str) -> None:
        #: Set by :meth:`close`; a task of several steps ends after its current step.
        self.stopped = False
        self._count, self._name, self._started = threads, name, 0
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # A signal handler that interrupts the start of the only thread makes it two.
        self._turn = threading.Lock() if threads == 1 else nullcontext()
        _pools.add(self)

    def submit(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Run ``function(*arguments)`` in a thread; the future's ``result()`` raises what it raises."""
        future: Future[_Result] = Future()
        self._tasks.put((future, function, arguments))
        if self._started < self._count:
            thread = threading.Thread(target=_work, args=(self._tasks, self._turn), name=self._name, daemon=True)
            _threads.add(thread)
            thread.start()
            self._started += 1
        return future

    def close(self, last: Callable[[], _Result] | None = None) -> Future[_Result] | None:
        """Cancel the waiting tasks and end the threads; ``last`` runs after the task of a single thread."""
        if self.stopped:
            return None
        self.stopped = True
        with suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        future = None if last is None else self.submit(last)
        self._tasks.put(None)
        _pools.discard(self)
        return future


def run_ahead(
    arguments: Iterable[_Argument], submit: Callable[[_Argument], Future[_Result]], depth: int
) -> Iterator[_Result]:
    """Results in the order of the arguments, ``depth`` of them submitted before they are asked for."""
    pending: deque[Future[_Result]] = deque()
    for argument in arguments:
        pending.append(submit(argument))
        if len(pending) > depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def in_parallel(
    work: Callable[[_Argument], _Result], items: Sequence[_Argument], label: str = "", *, progress: bool = False
) -> list[_Result]:
    """Results of ``work`` for each item, read from disk, in order; an error stops the rest."""
    if len(items) < 2:
        return [work(argument) for argument in items]
    results = []
    with ThreadPoolExecutor(_THREADS) as pool, progress_bar(label, len(items), enabled=progress) as advance:
        for result in pool.map(work, items):  # if an item raises, those that have not begun are cancelled
            results.append(result)
            advance()
    return results


#: Pools that are not closed, and threads that have not ended. No weak references: their callbacks swallow the
#: exceptions of signal handlers, as finalizers do. So a thread frees itself, too.
_pools: set[DaemonPool] = set()
_threads: set[threading.Thread] = set()


def _work(tasks: queue.SimpleQueue[_Task | None], turn: AbstractContextManager[object]) -> None:
    while (task := tasks.get()) is not None:
        with turn:
            _run(*task)
        del task  # an idle thread holds no arguments and no result
    tasks.put(None)  # for the next thread
    _threads.discard(threading.current_thread())


def _run(future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:
        future.set_exception(error)
        del future, function, arguments  # else the traceback's frame holds them, and itself
    else:
        future.set_result(result)


@atexit.register
def _stop_all() -> None:
    """Let the threads leave Python while it still runs: they cannot be interrupted later."""
    for pool in _pools.copy():
        pool.close()
    deadline = time.monotonic() + _EXIT_WAIT
    for thread in _threads - {threading.current_thread()}:
        if thread.is_alive():  # its start may have been interrupted
            thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_pools.clear)  # a forked child has none of the threads
os.register_at_fork(after_in_child=_threads.clear)
