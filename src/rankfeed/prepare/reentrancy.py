"""Detects a caller that is part of the build it would wait for.

A build is identified by the token of its lease. A thread knows the builds it runs; processes started by a build
inherit the tokens in an environment variable, which only the main thread sets: processes that the program starts
while another thread builds may rightly wait. A thread started by a build is not detected; it waits, and says so.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankfeed.errors import PrepareError
from rankfeed.storage.lease import LeaseOwner

_VARIABLE = "RANKFEED_BUILDING"


class _Builds(threading.local):
    """Lease tokens of the builds that a thread runs."""

    def __init__(self) -> None:
        self.tokens: list[str] = []


_builds = _Builds()


@contextmanager
def building(token: str) -> Iterator[None]:
    """Mark the code of a ``with`` block, in this thread, as part of a build."""
    exported = threading.current_thread() is threading.main_thread()
    before = os.environ.get(_VARIABLE, "")
    _builds.tokens.append(token)
    if exported:
        os.environ[_VARIABLE] = f"{before} {token}".strip()
    try:
        yield
    finally:
        _builds.tokens.remove(token)
        if exported and before:
            os.environ[_VARIABLE] = before
        elif exported:
            os.environ.pop(_VARIABLE, None)


def refuse_reentry(owner: LeaseOwner, path: Path) -> None:
    """Raise PrepareError if waiting for this owner would be a deadlock."""
    if owner.token in _builds.tokens:
        who = "this thread"
    elif owner.token in os.environ.get(_VARIABLE, "").split() and owner.pid != os.getpid():
        who = "the process that started this one"
    else:
        return
    raise PrepareError(
        f"deadlock: {who} is already preparing this directory",
        where=path,
        remedy="prepare another directory inside the build function, or this one before it",
    )
