"""A hint, from who built to those who wait in the same job, that the time has come to look again.

The file system stays the truth: a hint that comes late, twice, or never changes nothing but when somebody looks.
It names the turn that is over by the name of its lease, which is used once, so an old one is taken for no other.

There are two ways for it, neither of them a collective, and neither brought in by this file:

- The store of an initialised `torch.distributed`. A thread asks it now and then: asking takes a lock that a wait
  in another thread may hold for long, and lasts for as long as the store's host is stopped.
- Messages of MPI, where the caller gives a communicator. They are sent and probed for without waiting.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from rankfeed._util.validate import invalid

#: Prefix in the store, and tag of the messages.
_PREFIX, _TAG = "rankfeed/prepare_once", 28531
#: Seconds between questions to the store, between probes for messages, and to spend at most on telling.
_ASKED, _PROBED, _TOLD = 0.1, 0.02, 1.0
#: Questions a second that the ranks of a job ask the store in all.
_QUESTIONS = 2000

#: A forked process shares connections with its parent, and must not speak on them. Who is a child of
#: multiprocessing and was not spawned may have been forked before this file was here to notice.
_forked = multiprocessing.parent_process() is not None and "--multiprocessing-fork" not in sys.orig_argv
#: Names that messages brought, of whatever path; messages that are under way.
_heard: deque[str] = deque(maxlen=1000)
_sent: list[Any] = []


def _now_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_now_forked)


class Hint:
    """The hints of one call: what it hears while it waits, and what it tells when its own turn is over.

    Args:
        comm: communicator of the processes that call; None for none.
    """

    def __init__(self, comm: Any = None) -> None:
        self.turn = ""
        self._store, ranks = _store()
        self._every = max(_ASKED, ranks / _QUESTIONS)
        self._comm = comm
        self._asking = _Asking()
        self._believed: set[str] = set()
        self._receive()  # what earlier builds left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.over.set()

    def wait(self, name: str, pause: float) -> bool:
        """Wait for a hint that somebody's turn is over, each hint being given once.

        Args:
            name: of the lease.
            pause: seconds to wait at most.

        Returns:
            Whether there was one.
        """
        if self._store is not None and self._asking.name != name:
            self._asking.over.set()
            self._asking = _Asking(name)
            store, asking, every = self._store, self._asking, self._every
            _aside(lambda: asking.ask(store, every))
        until = time.monotonic() + pause
        while True:
            self._receive()
            if name not in self._believed and (self._asking.heard.is_set() or name in _heard):
                self._believed.add(name)
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            if name in self._believed:
                time.sleep(left)
            else:
                self._asking.heard.wait(min(left, _PROBED) if _may_speak(self._comm) else left)

    def tell(self) -> None:
        """Tell the others that this process's turn is over, if it had one (`turn` is the name of its lease)."""
        name, self.turn = self.turn, ""
        if not name or _forked:
            return
        if self._store is not None:
            store = self._store
            _aside(lambda: store.set(name, "")).join(_TOLD)
        self._send(name)

    def _receive(self) -> None:
        with suppress(Exception):  # whatever goes wrong with a hint is not worth a build
            while _may_speak(self._comm) and (message := self._comm.Improbe(tag=_TAG)) is not None:
                name = bytearray(len("0123456789abcdef"))
                message.Recv(name)
                _heard.append(name.decode())

    def _send(self, name: str) -> None:
        with suppress(Exception):
            if not _may_speak(self._comm):
                return
            me = self._comm.Get_rank()
            others = [rank for rank in range(self._comm.Get_size()) if rank != me]
            # A request is kept until it is done, and what it sends with it.
            _sent.extend(self._comm.Isend(name.encode(), dest=rank, tag=_TAG) for rank in others)
            until = time.monotonic() + _TOLD
            while True:
                _sent[:] = [request for request in _sent if not request.Test()]
                if not _sent or time.monotonic() > until:  # to one who does not listen it may take for ever
                    return
                time.sleep(0.001)


class _Asking:
    """A question that is put to the store until it is answered, or nobody wants to know."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.heard, self.over = threading.Event(), threading.Event()

    def ask(self, store: Any, every: float) -> None:
        while not self.over.is_set():
            if store.check([self.name]):
                self.heard.set()
                return
            self.over.wait(every)


def _aside(work: Callable[[], Any]) -> threading.Thread:
    """Do something that may hang, or fail, without harm: rank 0, whose store it is, may have gone."""

    def run() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=run, name="rankfeed-hint", daemon=True)
    thread.start()
    return thread


def _store() -> tuple[Any, int]:
    """The store of this job's default process group, and its number of ranks; None where there is none."""
    with suppress(Exception):
        torch = sys.modules.get("torch.distributed")
        if torch is not None and not _forked and torch.is_available() and torch.is_initialized():
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

            return PrefixStore(_PREFIX, _get_default_store()), torch.get_world_size()
    return None, 0


def _may_speak(comm: Any) -> bool:
    """Whether this thread may call MPI now."""
    mpi = sys.modules.get("mpi4py.MPI")
    if comm is None or mpi is None or _forked or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE or mpi.Is_thread_main())


def communicator(comm: Any) -> Any:
    """A communicator of mpi4py, or None.

    Raises:
        ArgumentError: it is something else.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # whoever has a communicator has imported it
    if comm is None or (mpi is not None and isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL):
        return comm
    raise invalid("comm", "a communicator of mpi4py, such as MPI.COMM_WORLD", comm)
