"""How much memory a call takes."""

import multiprocessing
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def peak(call: Callable[[], _Result]) -> tuple[int, _Result]:
    """Return the most bytes that `call` held at once, and what it returned (by pickle).

    It runs in a forked child: threads that other tests left allocate there no memory.
    """

    def measured() -> None:
        tracemalloc.start()
        result = call()
        send.send((tracemalloc.get_traced_memory()[1], result))

    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    child = fork.Process(target=measured)
    child.start()
    send.close()
    assert receive.poll(600)
    try:
        return receive.recv()
    finally:
        child.join()
