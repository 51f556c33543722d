"""A watch neither harms what is well nor is harmed by it: iterators, hooks, children, threads, connections."""

import multiprocessing
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankfeed as rf
from rankfeed.diagnostics.lockstep import process
from rankfeed.diagnostics.lockstep import wake as waking
from rankfeed.diagnostics.lockstep.here import Here
from rankfeed.errors import LockstepError


class Watched:
    """What a Lockstep and the end of a process need of a watch."""

    def __init__(self) -> None:
        self.here, self.verdict, self.pid, self.over = Here(), None, os.getpid(), False
        self.heard: list[object] = []
        self.back = True

    def error(self) -> LockstepError | None:
        return None if self.verdict is None else LockstepError("rank 1 is gone")

    def end_pass(self, state: Any) -> None:
        self.here.end(state)

    def close(self, most: float = 5.0) -> None:
        self.here.closed = True
        self.heard.append("closed")

    def fail(self, error: BaseException) -> LockstepError | None:
        self.heard.append(error)
        return None

    def acknowledge(self) -> None: ...

    def linger(self) -> None: ...

    def stop(self) -> None: ...

    def is_back(self) -> bool:
        return self.back


def watched(loader: Any) -> tuple[rf.Lockstep[Any], Any]:
    lockstep, watch = rf.Lockstep(loader), Watched()
    lockstep._watch, lockstep._begun = watch, True  # type: ignore[assignment]
    return lockstep, watch


def test_an_iterator_that_is_closed_late_does_not_end_the_pass_of_another() -> None:
    lockstep, watch = watched([1, 2, 3])
    old = iter(lockstep)
    next(old)
    new = iter(lockstep)
    next(new)
    old.close()  # type: ignore[attr-defined]  # as the garbage collection does, at any time
    assert (watch.here.lap, watch.here.step, watch.here.state, watch.here.done) == (2, 1, "step", (0, 0))
    assert list(new) == [2, 3]
    assert (watch.here.done, watch.here.state) == ((2, 3), "ended")


def test_each_with_block_is_a_watch_of_its_own() -> None:
    """One rank is through with the first while another is in the second already."""
    lockstep, watch = watched([1])
    with lockstep as batches:
        assert list(batches) == [1]
    assert watch.heard == ["closed"]
    assert (lockstep._watch, lockstep._begun) == (None, False)


def test_a_loader_that_swallows_the_error_is_left_before_the_next_step() -> None:
    def loader() -> Iterator[int]:
        yield 1
        watch.verdict = "told while data were read again and again"
        yield 2

    lockstep, watch = watched(loader())
    batches = iter(lockstep)
    assert next(batches) == 1
    with pytest.raises(LockstepError):
        next(batches)


def test_a_hook_that_calls_ours_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(process, "_watches", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: calls.append("first"))
    process.remember(Watched())
    ours = sys.excepthook

    def chained(*what: Any) -> None:
        calls.append("chained")
        ours(*what)

    monkeypatch.setattr(sys, "excepthook", chained)
    process.remember(Watched())
    sys.excepthook(ValueError, ValueError("no"), None)
    assert calls == ["chained", "first"]


def test_a_watch_that_is_made_after_an_error_was_raised_tells_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_watches", [])
    monkeypatch.setattr(process, "_first", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    outer, inner, later = Watched(), Watched(), Watched()
    outer.back = False
    assert process.tells_first(outer)
    process.remember(inner)
    assert not process.tells_first(inner)
    outer.back = True
    assert not process.tells_first(inner)
    process.remember(later)
    assert process.tells_first(later)


def _leaves(path: Path) -> None:
    class Leaving(Watched):
        def close(self, most: float = 5.0) -> None:
            path.write_text("closed")

    process.remember(Leaving())


def test_a_child_of_multiprocessing_says_that_it_leaves(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_leaves, args=(tmp_path / "left",))
    child.start()
    child.join(60)
    child.kill()
    assert (tmp_path / "left").read_text() == "closed"


def test_a_reminder_of_another_thread_leaves_the_main_one_alone() -> None:
    waking.arm()
    go, raised = threading.Event(), []

    def work() -> None:
        try:
            go.wait(60)
        except LockstepError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    waking.wake(thread.ident, LockstepError("rank 1 is gone"))
    waking.remind(thread.ident)
    time.sleep(0.05)
    go.set()
    thread.join(60)
    assert len(raised) == 1


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near:
            far, _ = server.accept()
            with far:
                yield near, far, port


def test_looking_at_connections_leaves_them_as_they_are(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, port = connected
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # a new socket object of Python makes its connection one that does not block
    try:
        assert port in waking.listening(0)
    finally:
        socket.setdefaulttimeout(before)
    assert os.get_blocking(near.fileno())
    assert os.get_blocking(far.fileno())


def test_only_connections_of_gloo_are_shut_down(connected: Any) -> None:
    near, far, port = connected
    waking.let_go([port, near.getsockname()[1]], 0)  # such as a server of the user's own
    near.sendall(b"well")
    assert far.recv(4) == b"well"
    for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # gloo gives its own the timeout of the process group
        near.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", 1800, 0))
    waking.let_go([port], 0)
    assert far.recv(4) == b""
