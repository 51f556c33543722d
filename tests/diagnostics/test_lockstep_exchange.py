"""Ranks read of each other through a store, and see processes end, whichever of them is gone."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rankfeed._util.process_info import process_start_time
from rankfeed.diagnostics.lockstep import local_progress
from rankfeed.diagnostics.lockstep.exchange import Exchange
from rankfeed.diagnostics.lockstep.local_progress import LocalProgress, Observer, is_echo
from rankfeed.diagnostics.lockstep.rank_monitor import RankMonitor
from rankfeed.diagnostics.lockstep.siblings import SiblingProcesses
from rankfeed.diagnostics.lockstep.status import Progress, RankStatus


class Job:
    """Some ranks on one store and one clock."""

    def __init__(self, ranks: int, limit: float = 100.0, store: Any = None) -> None:
        self.now = 0.0
        self.facts: list[dict[str, Any]] = [{} for _ in range(ranks)]
        store = store or dist.HashStore()
        self.exchanges = [self.exchange(store, rank, ranks, limit) for rank in range(ranks)]

    def exchange(self, store: Any, rank: int, ranks: int, limit: float) -> Exchange:
        def status(beat: int) -> RankStatus:
            return RankStatus(rank, "host", 100 + rank, rank, f"namespace {rank % 2}", beat, **self.facts[rank])

        return Exchange(store, rank, ranks, status, lambda: self.now, lambda _: False, limit, False)

    def run(self, seconds: int, *gone: int) -> list[str]:
        for _ in range(seconds):
            self.now += 1.0
            for rank, exchange in enumerate(self.exchanges):
                if rank not in gone:
                    exchange.round()
        return [each.reply.cause.summary if each.reply.cause else "" for each in self.exchanges]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_all_ranks_read_the_same_cause(kind: str, tmp_path: Path) -> None:
    job = Job(3, store=dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3))
    assert job.run(3) == ["", "", ""]
    assert [each.processes for each in job.exchanges] == [
        {0: (100, 0), 2: (102, 2)},
        {1: (101, 1)},
        {0: (100, 0), 2: (102, 2)},
    ]
    job.facts[1] = {"progress": Progress(1, 1, 3, "failed"), "failed_from": "step", "error": "ValueError: no"}
    causes = job.run(2)
    assert causes == [causes[0]] * 3
    assert causes[0].endswith("failed in step 3 of pass 1: ValueError: no")


def test_the_next_rank_judges_when_the_judge_is_gone_until_it_returns() -> None:
    job = Job(3)
    job.run(3)
    job.run(12, 0)
    assert [each.judging for each in job.exchanges[1:]] == [True, False]
    job.run(4)
    assert [each.judging for each in job.exchanges] == [True, False, False]


def test_a_silent_judge_is_judged_by_the_next_rank() -> None:
    job = Job(3, limit=20.0)
    job.run(3)
    step = Progress(1, 1, 2, "step")
    job.facts = [
        {"progress": step, "numbers": {"all": entered}, "age": age, "ages": {"all": age}}
        for age, entered in ((0.0, 4), (30.0, 5), (30.0, 5))
    ]
    job.run(1)
    causes = job.run(22, 0)
    assert "rank 0 (host host, process 100) has published nothing for 2" in causes[1]
    assert causes[1] == causes[2]


def test_rank_0_knows_how_many_ranks_have_made_their_last_request() -> None:
    job = Job(3)
    for facts in job.facts:
        facts["progress"] = Progress(1, 1, 2, "ended", closed=True)
    job.run(2)
    assert (job.exchanges[0].reply.over, job.exchanges[0].left) == (True, 0)
    for each in job.exchanges[1:]:
        each.leave()
    job.exchanges[0].round()
    assert job.exchanges[0].left == job.exchanges[0].others() == 2


class Failing:
    """An exchange whose first rounds fail."""

    def __init__(self, monitor: RankMonitor, rounds: int) -> None:
        self.monitor, self.rounds, self.reply, self.left = monitor, rounds, SimpleNamespace(over=False), 0
        self.store: Any = None
        self.failed = 0

    def round(self) -> None:
        if self.failed < self.rounds:
            self.failed += 1
            raise RuntimeError("wait timeout after 30000ms")
        self.monitor.over = True


@pytest.mark.parametrize("exists", [True, False])
def test_a_store_that_is_late_is_asked_again_and_one_that_is_gone_is_not(
    exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = RankMonitor.__new__(RankMonitor)
    monitor.local, monitor.over, monitor.rank, monitor.cause = LocalProgress(), False, 1, None
    monitor._store_is_gone, monitor._has_store, monitor._name, monitor._standing = False, False, "loop/0", 0.0
    monitor._owner = 0
    monitor._siblings, monitor._hurry = SiblingProcesses(1), threading.Event()
    monitor._observer, monitor._limit = Observer(RankStatus(1), monitor.local), 9.0
    monitor._exchange = exchange = Failing(monitor, 2)  # type: ignore[assignment]
    exchange.reply.cause = None
    monkeypatch.setattr("rankfeed.diagnostics.lockstep.rank_monitor.connect", lambda name: (name, None))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monitor._store = SimpleNamespace(host="127.0.0.1", port=server.getsockname()[1])
        if not exists:
            server.close()
        monitor._exchange_statuses()
    assert (exchange.failed, exchange.store) == ((2, "loop/0") if exists else (1, None))
    assert monitor._store_is_gone != exists


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 1.0, 2.0, 3602.0, 3603.0])
    monkeypatch.setattr(local_progress.time, "monotonic", lambda: next(clock))
    observer = Observer(RankStatus(0), LocalProgress())
    ages = [observer.status().age for _ in range(4)]
    assert ages == [1.0, 2.0, 4.0, 5.0]


def test_progress_numbers_and_ages_come_from_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers = [0.0], {"all": 7, "idle": 3}
    monkeypatch.setattr(local_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(local_progress, "collective_numbers", lambda: dict(numbers))
    local = LocalProgress()
    observer = Observer(RankStatus(0), local)
    now[0] = 2.0
    local.begin_pass()
    local.step()
    now[0], numbers["all"], numbers["new"] = 3.0, 8, 1
    status = observer.status(4)
    assert (status.beat, status.progress, status.age) == (4, local.progress, 1.0)
    assert (status.numbers, status.ages) == ({"all": 8, "idle": 3, "new": 1}, {"all": 0.0, "new": 0.0})
    now[0] = 5.0
    status = observer.status()
    assert (status.age, status.ages, status.standing) == (3.0, {"all": 2.0, "new": 2.0}, 2.0)
    assert any("observer.status()" in line for line in status.lines)
    monkeypatch.setattr(local_progress, "collective_numbers", lambda: local.step() or {"all": 9})
    assert observer.status().numbers == {}  # steps begin faster than they are read


def test_the_end_of_a_process_is_seen_at_once() -> None:
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(waiting) as first, subprocess.Popen(waiting) as other:
        siblings = SiblingProcesses(1)
        born = process_start_time(first.pid)
        siblings.add({0: (first.pid, born), 1: (1, 1), 2: (other.pid, process_start_time(other.pid) + 1)})
        assert siblings.dead == {2}  # its number belongs to another process
        assert not siblings.wait(0.01)
        threading.Timer(0.2, first.kill).start()
        begun = time.monotonic()
        assert siblings.wait(30)
        assert time.monotonic() - begun < 20
        assert siblings.missing() == {0: "dead", 2: "dead"}
        siblings.close()
        other.kill()


def test_an_error_of_the_user_differs_from_that_of_a_collective() -> None:
    local = LocalProgress()
    local.begin_pass()
    local.fail(RuntimeError("DataLoader timed out after 5 seconds"))  # while data are waited for
    assert not local.is_echo
    assert is_echo(RuntimeError("NCCL communicator was aborted on rank 1"))
    assert not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
