"""Ranks hear of each other by a store, whoever of them is gone; and a thread raises wherever it is."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rankfeed.errors import LockstepError
from rankfeed.proof.lockstep import wake as waking
from rankfeed.proof.lockstep.here import Clock, Here, Sight, is_echo
from rankfeed.proof.lockstep.link import Address, Link
from rankfeed.proof.lockstep.watch import Watch
from rankfeed.proof.lockstep.words import Word


class Job:
    """Some ranks on one store and one clock."""

    def __init__(self, ranks: int, limit: float = 100.0, store: Any = None) -> None:
        self.now = 0.0
        self.words: list[dict[str, Any]] = [{} for _ in range(ranks)]
        store = store or dist.HashStore()
        self.links = [self.link(store, rank, ranks, limit) for rank in range(ranks)]

    def link(self, store: Any, rank: int, ranks: int, limit: float) -> Link:
        def word(beat: int) -> Word:
            return Word(rank, "host", 100 + rank, beat, **self.words[rank])

        address = Address("host", 100 + rank, 1, "", [rank])
        return Link(store, rank, ranks, address, word, lambda: self.now, lambda _: False, limit, False)

    def go(self, seconds: int, *gone: int) -> list[str]:
        for _ in range(seconds):
            self.now += 1.0
            for rank, link in enumerate(self.links):
                if rank not in gone:
                    link.round()
        return [link.verdict.summary if link.verdict else "" for link in self.links]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_all_ranks_hear_the_same_verdict(kind: str, tmp_path: Path) -> None:
    job = Job(3, store=dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3))
    assert job.go(3) == ["", "", ""]
    assert [sorted(link.roster) for link in job.links] == [[0, 1, 2]] * 3
    job.words[1] = {"lap": 1, "step": 3, "state": "failed", "was": "step", "error": "ValueError: no"}
    told = job.go(2)
    assert told == [told[0]] * 3
    assert told[0].endswith("failed in step 3 of pass 1: ValueError: no")


def test_the_next_rank_judges_when_the_judge_is_gone_and_gives_way_when_it_is_back() -> None:
    job = Job(3)
    job.go(3)
    job.go(12, 0)
    assert [link.judging for link in job.links[1:]] == [True, False]
    job.go(4)
    assert [link.judging for link in job.links] == [True, False, False]


def test_a_silent_judge_is_judged_by_the_next() -> None:
    job = Job(3, limit=20.0)
    job.go(3)
    job.words = [{"lap": 1, "step": 2, "state": "step", "still": still} for still in (0.0, 30.0, 30.0)]
    told = job.go(26, 0)
    assert "rank 0 (host host, process 100) has not been heard of for 2" in told[1]
    assert told[1] == told[2]


def test_rank_0_knows_who_has_heard_that_it_left() -> None:
    job = Job(3)
    job.go(3)
    job.words[0] = {"lap": 1, "step": 2, "state": "left", "closed": True}
    job.go(3, 2)
    assert job.links[0].parted == 2
    job.go(2)
    assert job.links[0].parted == 3


def test_who_has_the_store_and_left_its_loop_stays_until_a_stalled_rank_has_heard_of_it() -> None:
    watch = Watch.__new__(Watch)
    watch.here, watch.verdict, watch.over, watch._ranks = Here(), None, False, 2
    watch.here.state = "left"
    watch._has_store, watch._lost, watch._hurry = True, None, threading.Event()
    watch._link = link = Link.__new__(Link)
    link.answer, link.parted = None, 1
    back = threading.Event()

    def stalled() -> None:
        time.sleep(2.5)
        back.set()
        link.parted = 2

    thread = threading.Thread(target=stalled)
    thread.start()
    watch.linger()
    assert back.is_set()
    thread.join()


class Failing:
    """A link whose first rounds fail."""

    def __init__(self, watch: Watch, rounds: int) -> None:
        self.watch, self.rounds, self.verdict = watch, rounds, None
        self.stores: list[Any] = []

    def go_on_by(self, store: Any) -> None:
        self.stores.append(store)

    def round(self) -> None:
        if len(self.stores) < self.rounds:
            raise RuntimeError("wait timeout after 30000ms")
        self.watch.over = True


@pytest.mark.parametrize("there", [True, False])
def test_a_store_that_is_late_is_asked_again_and_one_that_is_gone_is_not(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch.__new__(Watch)
    watch.here, watch.over, watch.rank, watch._lost, watch._name = Here(), False, 1, None, "loop/0"
    watch._clock, watch._hurry = Clock(5.0), threading.Event()
    watch._link = link = Failing(watch, 2)  # type: ignore[assignment]
    monkeypatch.setattr("rankfeed.proof.lockstep.watch.connect", lambda name: (name, None, 0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch._keep = SimpleNamespace(host="127.0.0.1", port=server.getsockname()[1])
        if not there:
            server.close()
        watch._talk()
    assert link.stores == (["loop/0", "loop/0"] if there else [])
    assert (watch._lost is None) == there


def test_a_thread_that_sleeps_is_woken_by_the_error() -> None:
    waking.arm()
    main = threading.get_ident()
    timer = threading.Timer(0.2, waking.wake, (main, LockstepError("rank 1 is gone")))
    timer.start()
    with pytest.raises(LockstepError, match="rank 1 is gone"):
        time.sleep(60)
    assert waking.was_raised()
    timer.join()


def test_another_thread_than_the_main_one_raises_too() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.01)
        except LockstepError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    error = LockstepError("rank 1 is gone", where="here")
    error.rank = 1
    waking.wake(thread.ident, error)
    thread.join(60)
    assert [str(each) for each in raised] == [str(error)]
    assert raised[0].rank == 1  # type: ignore[attr-defined]


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 3602.0, 3603.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    clock = Clock(most=5.0)
    for _ in range(4):
        clock.tick()
    assert clock.now == 8.0


def test_a_thread_is_seen_to_stand_still_until_it_takes_a_step() -> None:
    here = Here()
    sight = Sight(here)
    here.begin()
    sight.look(0.0, 5.0)
    sight.look(7.0, 5.0)
    assert (sight.still, sight.waits) == (7.0, 0.0)
    assert "sight.look(7.0, 5.0)" in "".join(sight.lines)
    here.step += 1
    sight.look(8.0, 5.0)
    assert (sight.still, sight.lines) == (0.0, [])


def test_an_error_of_ones_own_is_told_from_an_echo() -> None:
    here = Here()
    here.begin()
    here.fail(RuntimeError("DataLoader timed out after 5 seconds"))  # while data are waited for
    assert not here.collective
    assert is_echo(RuntimeError("NCCL communicator was aborted on rank 1"))
    assert not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
