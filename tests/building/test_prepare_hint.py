"""Those who wait are told when a build is over; and where they are not, nothing is lost but time.

Ranks look again after an hour only, where nothing else is said: that a job ends at all is by its hints.
"""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import ENVIRON, end, family, free_port, run, started, torchrun, until
from tests.support.launchers import LAUNCHERS, need
from tests.support.prepared import build

import rankfeed as rf
from rankfeed.building import hint
from rankfeed.errors import ArgumentError

SCRIPT = Path(__file__).parent / "hint_job.py"
#: Seconds in which a job has to end: far more than it takes, and far less than an hour.
HANG = 100
FAILED = "preparing the data failed: KeyError: 'no such column'"
KINDS = [pytest.param("torchrun", marks=pytest.mark.soak), "openmpi", "mpich"]
#: MPICH 5.0 now and then kills a rank that forked and had a message it did not receive, also without rankfeed.
THAT_FORK = KINDS[:2]

pytestmark = pytest.mark.timeout(300)


def command_of(kind: str, path: Path, out: Path, ranks: int, *modes: str) -> list[str]:
    out.mkdir()
    if kind == "torchrun":
        return torchrun(ranks, SCRIPT, "torch", path, out, *modes)
    need(kind)
    return [*LAUNCHERS[kind], "-n", str(ranks), sys.executable, str(SCRIPT), "mpi", str(path), str(out), *modes]


@pytest.fixture(scope="module", params=KINDS)
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks told, which did one thing after the other."""
    folder = tmp_path_factory.mktemp(request.param)
    modes = ["done", "raises", "interrupted", "again", "two", "alone"]
    if request.param != "mpich":
        modes.append("forked")
    run(command_of(request.param, folder / "data", folder / "out", 3, *modes), folder / "log", HANG)
    return folder / "out"


def outcomes(out: Path, ranks: Iterable[int] = range(3)) -> list[list[str]]:
    """What each rank saw of each folder."""
    return [(out / f"{rank}.outcome").read_text().splitlines() for rank in ranks]


def builds(out: Path) -> Counter[str]:
    """Which rank built which key how often."""
    return Counter(path.name.removeprefix("built-").rpartition("@")[0] for path in out.glob("built-*"))


def test_a_build_that_is_done_wakes_all_who_wait(out: Path) -> None:
    assert outcomes(out / "done") == [["there"]] * 3
    assert builds(out / "done") == Counter({"0-": 1})


def test_a_build_that_raises_reaches_all_who_wait(out: Path) -> None:
    assert outcomes(out / "raises") == [[FAILED]] * 3
    assert builds(out / "raises") == Counter({"2-": 1})


def test_who_waits_for_one_that_was_interrupted_builds_at_once(out: Path) -> None:
    assert outcomes(out / "interrupted") == [[], ["there"], ["there"]]
    assert builds(out / "interrupted") in (Counter({"0-": 1, "1-": 1}), Counter({"0-": 1, "2-": 1}))


def test_hints_of_earlier_builds_do_no_harm(out: Path) -> None:
    assert outcomes(out / "again") == [["there"] * 3] * 3
    assert builds(out / "again") == Counter({"0-key0": 1, "1-late": 1, "2-key2": 1})


def test_one_rank_may_call_alone(out: Path) -> None:
    assert outcomes(out / "alone") == [["there"], [], []]
    assert builds(out / "alone") == Counter({"0-": 1})


def test_threads_that_wait_for_two_folders_are_both_told(out: Path) -> None:
    assert outcomes(out / "two") == [["there"] * 2, ["there"] * 2, []]
    assert builds(out / "two") == Counter({"0-": 2})


@pytest.mark.parametrize("out", THAT_FORK, indirect=True)
def test_a_forked_child_leaves_its_parent_s_connections_alone(out: Path) -> None:
    assert outcomes(out / "forked") == [["there"]] * 3
    assert builds(out / "forked") == Counter({"0-": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_job_builds_is_found_without_a_hint(kind: str, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out" / "another_job"
    command = command_of(kind, tmp_path, tmp_path / "out", 3, "another_job")
    jobs = []
    with ExitStack() as stack:

        def while_they_wait(staging: Path) -> None:
            (staging / "data").write_text("")
            jobs.append(stack.enter_context(started(command, log)))
            until(lambda: len(list(out.glob("waits-?"))) == 3, jobs[0], log, HANG)

        rf.prepare_once(tmp_path / "another_job", while_they_wait)
        assert jobs[0].wait(HANG) == 0, log.read_text()[-6000:]
    assert outcomes(out) == [["there"]] * 3
    assert builds(out) == Counter()


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three ranks without a launcher, so that rank 0 keeps the store."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        end(family(process.pid))
        process.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["gone", pytest.param("stopped", marks=pytest.mark.soak)])
def test_a_store_whose_host_is_gone_or_stopped_does_no_harm(
    harm: str, by_hand: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    out, port = tmp_path / "out", str(free_port())
    out.mkdir()
    command = [sys.executable, str(SCRIPT), "torch", str(tmp_path / "data"), str(out), harm]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
    for rank in range(3):
        with (tmp_path / f"log{rank}").open("wb") as log:
            environ = {**ENVIRON, **place, "RANK": str(rank)}
            by_hand.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ))
    for rank in (1, 2):
        assert by_hand[rank].wait(HANG) == 0, (tmp_path / f"log{rank}").read_text()[-6000:]
    assert outcomes(out / harm, (1, 2)) == [["there"]] * 2
    assert builds(out / harm) == Counter({"1-": 1})


def test_mpi_is_not_imported_for_a_hint(tmp_path: Path) -> None:
    code = (
        "import sys, rankfeed as rf\n"
        f"rf.prepare_once({str(tmp_path / 'data')!r}, lambda staging: (staging / 'a').touch())\n"
        "print('mpi4py' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("comm", ["COMM_WORLD", 0, object()])
def test_what_is_no_communicator_is_refused(comm: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="invalid comm"):
        rf.prepare_once(tmp_path / "data", build, comm=comm)


class Broken:
    """A store that fails whatever is asked of it."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("gone")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("gone")


def test_a_store_that_fails_is_asked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint, "_store", lambda: (Broken(), 2))
    begun, threads = threading.Event(), []

    def slow(staging: Path) -> None:
        begun.set()
        waiting.start()
        build(staging)

    waiting = threading.Thread(target=lambda: threads.append(rf.prepare_once(tmp_path / "data", build)))
    rf.prepare_once(tmp_path / "data", slow)
    waiting.join(HANG)
    assert threads == [tmp_path / "data"]
