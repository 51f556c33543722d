"""Lockstep neither harms a healthy process nor is harmed by it: iterators, hooks, children."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankfeed as rf
from rankfeed.diagnostics.lockstep import rank_monitor
from rankfeed.diagnostics.lockstep.progress import LocalProgress
from rankfeed.diagnostics.lockstep.status import Cause, LoopFailure, RankStatus
from rankfeed.errors import LockstepError


class Monitor:
    """What a Lockstep and the end of a process need of a RankMonitor."""

    def __init__(self) -> None:
        self.local, self.cause, self.pid, self.over = LocalProgress(), None, os.getpid(), False
        self.seen: list[object] = []

    def check(self) -> None:
        if self.cause is not None:
            raise LockstepError("rank 1 is gone")

    def end_pass(self, state: Any) -> None:
        self.local.end_pass(state)

    def close(self, most: float = 5.0) -> None:
        self.local.close()
        self.seen.append("closed")

    def fail(self, error: BaseException) -> None:
        self.seen.append(error)

    def stop(self) -> None: ...


def monitored(loader: Any) -> tuple[rf.Lockstep[Any], Any]:
    lockstep, monitor = rf.Lockstep(loader), Monitor()
    lockstep._monitor, lockstep._begun = monitor, True  # type: ignore[assignment]
    return lockstep, monitor


def test_closing_an_old_lockstep_iterator_does_not_end_the_pass_of_the_current_one() -> None:
    lockstep, monitor = monitored([1, 2, 3])
    old = iter(lockstep)
    next(old)
    new = iter(lockstep)
    next(new)
    old.close()  # type: ignore[attr-defined]  # as the garbage collection does, at any time
    progress = monitor.local.progress
    assert (progress.passes, progress.steps, progress.state, progress.done) == (2, 1, "step", (0, 0))
    assert list(new) == [2, 3]
    assert (monitor.local.progress.done, monitor.local.progress.state) == ((2, 3), "ended")


def test_leaving_the_with_block_of_a_lockstep_closes_and_discards_its_monitor() -> None:
    """One rank may be through with a block while another rank is still in it."""
    lockstep, monitor = monitored([1])
    with lockstep as batches:
        assert list(batches) == [1]
    assert monitor.seen == ["closed"]
    assert (lockstep._monitor, lockstep._begun) == (None, False)


def test_lockstep_raises_before_the_next_batch_if_a_cause_was_found_while_the_loader_read() -> None:
    def loader() -> Iterator[int]:
        yield 1
        monitor.cause = "told while data were read again and again"
        yield 2

    lockstep, monitor = monitored(loader())
    batches = iter(lockstep)
    assert next(batches) == 1
    with pytest.raises(LockstepError):
        next(batches)


def test_an_excepthook_that_chains_to_the_lockstep_hook_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(rank_monitor, "_monitors", [])
    monkeypatch.setattr(rank_monitor, "_previous_hook", None)
    monkeypatch.setattr(sys, "excepthook", lambda *_: calls.append("first"))
    rank_monitor._monitor_process(Monitor())  # type: ignore[arg-type]
    ours = sys.excepthook

    def chained(*failure: Any) -> None:
        calls.append("chained")
        ours(*failure)

    monkeypatch.setattr(sys, "excepthook", chained)
    rank_monitor._monitor_process(Monitor())  # type: ignore[arg-type]
    sys.excepthook(ValueError, ValueError("no"), None)
    assert calls == ["chained", "first"]


def _leaves(path: Path) -> None:
    class Leaving(Monitor):
        def stop(self) -> None:
            path.write_text("closed")

    rank_monitor._monitor_process(Leaving())  # type: ignore[arg-type]


def test_a_multiprocessing_child_stops_its_lockstep_monitor_when_it_exits(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_leaves, args=(tmp_path / "left",))
    child.start()
    child.join(600)
    child.kill()
    assert (tmp_path / "left").read_text() == "closed"


@pytest.mark.parametrize("is_echo", [True, False])
def test_only_an_error_of_a_collective_is_replaced_by_a_lockstep_error_with_its_cause(is_echo: bool) -> None:
    """All ranks may end a loop by an exception of their own, which a caller expects."""
    monitor = rank_monitor.RankMonitor.__new__(rank_monitor.RankMonitor)
    monitor.local, monitor.pid, monitor.rank, monitor.over = LocalProgress(), os.getpid(), 1, False
    monitor._acknowledged, monitor._has_store = threading.Event(), False
    monitor._status = lambda: RankStatus(1)  # type: ignore[method-assign]
    monitor.cause = Cause(0, "rank 0 is the cause")
    monitor.local.failure = LoopFailure("an error", [], is_echo)
    if is_echo:
        with pytest.raises(LockstepError, match="rank 0 is the cause"):
            monitor.fail(RuntimeError("gloo: connection closed by peer"))
    else:
        monitor.fail(KeyError("stop"))
