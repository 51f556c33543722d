"""Whether a caller is part of a build, so that it would wait for itself if it waited for that.

Turns are told by the names of their leases, which are used once: what is left of one that is over is nobody's.

- A thread knows its own turns.
- Processes that a builder starts inherit the name in the environment. It is put there by the main thread alone:
  while a build runs in another one, the program may start processes that rightly wait for it.

A thread that a builder starts is not told from those that rightly wait: it waits, and the log says for whom.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankfeed.building.holder import Holder
from rankfeed.errors import PrepareError

_VARIABLE = "RANKFEED_INSIDE"


class _Turns(threading.local):
    """The turns of a thread, by the names of their leases."""

    def __init__(self) -> None:
        self.names: list[str] = []


_turns = _Turns()


@contextmanager
def inside(name: str) -> Iterator[None]:
    """What this thread does in the block is part of a turn.

    Args:
        name: of its lease.
    """
    told = threading.current_thread() is threading.main_thread()
    before = os.environ.get(_VARIABLE)
    _turns.names.append(name)
    if told:
        os.environ[_VARIABLE] = " ".join([*_inherited(), name])
    try:
        yield
    finally:
        _turns.names.remove(name)
        if told and before is None:
            os.environ.pop(_VARIABLE, None)
        elif told and before is not None:
            os.environ[_VARIABLE] = before


def _inherited() -> list[str]:
    return os.environ.get(_VARIABLE, "").split()


def refuse_inside(holder: Holder, path: Path) -> None:
    """Nobody waits for a build that it is part of.

    Args:
        holder: who would be waited for.
        path: what it builds.

    Raises:
        PrepareError: the caller is part of that.
    """
    if holder.name in _turns.names:
        who = "this very thread"
    elif holder.name in _inherited() and holder.pid != os.getpid():
        who = "the process that started this one"
    else:
        return
    raise PrepareError(
        f"{who} is preparing that folder: it would wait for itself",
        where=path,
        remedy="prepare another folder inside the builder, or this one before it",
    )
