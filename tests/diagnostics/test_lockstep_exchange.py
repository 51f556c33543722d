"""Ranks read of each other through a store, and see processes end, whichever of them is gone."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rankfeed._util.process_info import process_start_time
from rankfeed.diagnostics.lockstep import progress as observing
from rankfeed.diagnostics.lockstep.collectives import FlightRecorder
from rankfeed.diagnostics.lockstep.exchange import Exchange, JobStore, Judgement
from rankfeed.diagnostics.lockstep.find_cause import JobHistory
from rankfeed.diagnostics.lockstep.progress import LocalProgress, Observer, is_echo
from rankfeed.diagnostics.lockstep.rank_monitor import RankMonitor, SiblingProcesses
from rankfeed.diagnostics.lockstep.status import GroupCalls, LoopFailure, Progress, RankStatus


class Job:
    """Some ranks on one store and one clock."""

    def __init__(self, ranks: int, limit: float = 100.0, store: Any = None) -> None:
        self.now = 0.0
        self.facts: list[dict[str, Any]] = [{} for _ in range(ranks)]
        store = JobStore(store or dist.HashStore(), "loop/0")
        self.exchanges = [Exchange(store, rank, JobHistory(ranks, limit)) for rank in range(ranks)]

    def run(self, seconds: int, *gone: int) -> list[str]:
        for _ in range(seconds):
            self.now += 1.0
            for rank, exchange in enumerate(self.exchanges):
                if rank not in gone:
                    facts = {"beat": int(self.now), **self.facts[rank]}
                    exchange.round(RankStatus(rank, "host", 100 + rank, rank, **facts), self.now)
        return [member.judgement.cause.summary if member.judgement.cause else "" for member in self.exchanges]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_all_ranks_read_the_same_cause_of_a_failure_from_the_store(kind: str, tmp_path: Path) -> None:
    job = Job(3, store=dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3))
    assert job.run(3) == ["", "", ""]
    assert [{rank: peer.pid for rank, peer in exchange.peers.items()} for exchange in job.exchanges] == [
        {1: 101, 2: 102},
        {0: 100, 2: 102},
        {0: 100, 1: 101},
    ]
    job.facts[1] = {"progress": Progress(1, 1, 3, "step"), "failure": LoopFailure("ValueError: no", [], False)}
    causes = job.run(2)
    assert causes == [causes[0]] * 3
    assert causes[0].endswith("failed in step 3 of pass 1: ValueError: no")


def test_a_rank_watches_rank_0_and_the_ranks_at_power_of_two_distances() -> None:
    watched = [Exchange(JobStore(dist.HashStore(), "loop/0"), 9, JobHistory(64, 9.0))._unknown for _ in range(1)]
    assert watched == [{0, 1, 5, 7, 8, 10, 11, 13, 17, 25, 41, 57}]  # some are on its host, if it takes every 8th


@pytest.mark.parametrize("judge", [0, 1])
def test_if_rank_0_or_1_falls_silent_the_other_of_them_publishes_that_as_the_cause(judge: int) -> None:
    job = Job(3, limit=20.0)
    job.run(3)
    step = Progress(1, 1, 2, "step")
    job.facts = [
        {"progress": step, "numbers": {"all": entered}, "age": age, "ages": {"all": age}}
        for age, entered in ((0.0, 4) if rank == judge else (30.0, 5) for rank in range(3))
    ]
    job.run(1)
    causes = job.run(22, judge)
    assert f"rank {judge} (host host, process {100 + judge}) has published nothing for 2" in causes[2]
    assert causes[1 - judge] == causes[2]


def test_a_published_cause_stays_when_the_failed_rank_no_longer_reports_it() -> None:
    job = Job(3)
    job.facts[2] = {"progress": Progress(1, 1, 3, "step"), "failure": LoopFailure("ValueError: no", [], False)}
    job.run(2)
    job.facts[2] = {}
    assert all("ValueError: no" in cause for cause in job.run(2))


def test_rank_0_needs_its_store_until_every_rank_has_left_or_is_silent() -> None:
    job = Job(3)
    for facts in job.facts:
        facts["progress"] = Progress(1, 1, 2, "ended", closed=True)
    job.run(2)
    first = job.exchanges[0]
    assert (first.judgement.over, first.needs_store()) == (True, True)
    job.exchanges[1].leave(RankStatus(1, beat=9))
    job.run(1, 1, 2)
    assert first.needs_store()
    job.run(5, 1, 2)
    assert not first.needs_store()  # rank 2 is silent


class FailingExchange:
    """An exchange whose first rounds fail."""

    def __init__(self, monitor: RankMonitor, rounds: int) -> None:
        self.monitor, self.rounds, self.judgement = monitor, rounds, Judgement()
        self.failed = 0

    def round(self, *_: Any) -> None:
        if self.failed < self.rounds:
            self.failed += 1
            raise RuntimeError("wait timeout after 30000ms")
        self.monitor.over = True

    def leave(self, status: RankStatus) -> None: ...


@pytest.mark.parametrize("exists", [True, False])
def test_the_monitor_reconnects_to_a_slow_store_and_gives_up_if_the_store_is_gone(exists: bool) -> None:
    monitor = RankMonitor.__new__(RankMonitor)
    monitor.local, monitor.over, monitor.rank, monitor.cause = LocalProgress(), False, 1, None
    monitor._store_is_gone, monitor._has_store, monitor._owner = False, False, 0
    monitor._siblings, monitor._hurry = SiblingProcesses(), threading.Event()
    monitor._observer, monitor._limit = Observer(RankStatus(1), monitor.local), 9.0
    monitor._exchange = exchange = FailingExchange(monitor, 2)  # type: ignore[assignment]
    connections: list[bool] = []
    monitor._store = SimpleNamespace(exists=lambda: exists, connect=lambda: connections.append(True))  # type: ignore[assignment]
    monitor._talk()
    assert (exchange.failed, len(connections)) == ((2, 2) if exists else (1, 0))
    assert monitor._store_is_gone != exists


def test_job_store_exists_is_true_while_its_port_accepts_connections() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    keys = JobStore(store, "loop/0")
    assert (keys.exists(), keys.port) == (True, store.port)
    assert keys.read("a", RankStatus(1)) == keys.read("a", RankStatus(2)) == RankStatus(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        keys.port = server.getsockname()[1]
    assert not keys.exists()


def test_the_age_of_progress_excludes_time_in_which_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 0.0, 1.0, 2.0, 3602.0, 3603.0])
    monkeypatch.setattr(observing.time, "monotonic", lambda: next(clock))
    observer = Observer(RankStatus(0), LocalProgress())
    ages = [observer.status({}).age for _ in range(4)]
    assert ages == [1.0, 2.0, 4.0, 5.0]


def test_observer_status_has_progress_collective_numbers_and_their_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    now, numbers = [0.0], {"all": 7, "idle": 3}
    monkeypatch.setattr(observing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(observing, "collective_numbers", lambda: dict(numbers))
    local = LocalProgress()
    observer = Observer(RankStatus(0), local)
    now[0] = 2.0
    local.begin_pass()
    local.step()
    now[0], numbers["all"], numbers["new"] = 3.0, 8, 1
    status = observer.status({})
    assert (status.beat, status.progress, status.age) == (1, local.progress, 1.0)
    assert (status.numbers, status.ages) == ({"all": 1, "idle": 0, "new": 1}, {"all": 0.0, "new": 0.0})
    now[0] = 5.0
    status = observer.status({})
    assert (status.age, status.ages, status.standing) == (3.0, {"all": 2.0, "new": 2.0}, 2.0)
    assert any("observer.status({})" in line for line in status.stack)


def test_flight_recorder_gives_the_collectives_of_each_group_and_rereads_only_after_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [(7, "gloo:all_reduce", 9), (8, "gloo:broadcast", 1), (8, "gloo:barrier", 2), (9, "nccl:reduce", 3)]
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "pg_id": group,
            "profiling_name": name,
            "collective_seq_id": sequence,
            "retired": name != "gloo:barrier",
            "state": "scheduled",
        }
        for group, name, sequence in calls
    ]
    reads: list[bool] = []

    def dump(with_entries: bool, only_active: bool) -> str:
        reads.append(with_entries)
        return json.dumps({"entries": entries if with_entries else []})

    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", dump, raising=False)
    recorder, keys = FlightRecorder(), ["0/ab/gloo", "0/ab/nccl", "1/ab/gloo"]
    expected = {"0/ab/gloo": GroupCalls(2, 2, {1: "broadcast", 2: "barrier"})}
    assert [recorder.calls(keys) for _ in range(3)] == [expected] * 3
    assert reads == [False, True, False, True, False]  # all of it only after a change, since that takes long
    monkeypatch.delattr("torch._C._distributed_c10d._dump_fr_trace_json")
    assert FlightRecorder().calls(keys) == {}  # an older torch


def test_sibling_processes_reports_a_killed_process_and_a_reused_pid_as_dead() -> None:
    waiting = [sys.executable, "-c", "import time; time.sleep(10000)"]
    with subprocess.Popen(waiting) as first, subprocess.Popen(waiting) as other:
        siblings = SiblingProcesses()
        siblings.add(0, first.pid, process_start_time(first.pid))
        siblings.add(2, other.pid, process_start_time(other.pid) + 1)
        assert siblings.states()[0] == "alive"
        assert siblings.dead == {2}  # its number belongs to another process
        assert not siblings.wait(0.01)
        threading.Timer(0.2, first.kill).start()
        assert siblings.wait(600)
        assert siblings.states() == {0: "dead", 2: "dead"}
        siblings.close()
        other.kill()


def test_is_echo_is_true_only_for_errors_raised_by_a_collective() -> None:
    local = LocalProgress()
    local.begin_pass()
    failure = local.fail(RuntimeError("DataLoader timed out after 5 seconds"))  # while data are waited for
    assert not failure.is_echo
    assert is_echo(RuntimeError("NCCL communicator was aborted on rank 1"))
    assert not is_echo(ValueError("a peer's label"))
    assert not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
