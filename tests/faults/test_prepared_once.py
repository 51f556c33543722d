"""Many processes want one folder at once, and any of them may be killed at any moment."""

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.prepare_job import committed, join, read_held
from tests.launch.slurm import slurm
from tests.support.environ import of_no_launcher
from tests.support.jobs import free_port, started, until
from tests.support.launchers import MPICH, OPENMPI, TORCHRUN, need
from tests.support.marks import slow, soak
from tests.support.prepared import control
from tests.support.seeds import fresh_seed

from rankfeed.prepare import prepare_once

SCRIPT = Path(__file__).parent / "prepare_job.py"
#: Seconds within which a round has to end: far more than it takes.
HANG = 60


class Reader(threading.Thread):
    """Reads the directory all the time, as a process that does not build it."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.looks, self.wrong = 0, Counter[str]()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.002):
            with suppress(FileNotFoundError):
                key, right = read_held(self.path)
                self.looks += 1
                if not right:
                    self.wrong[key] += 1

    def stop(self) -> None:
        self._over.set()
        self.join(10)


def assert_nothing_is_left(path: Path, key: str) -> None:
    """Nothing is built or left after one more call: a process that was killed last cannot clean up."""

    def fails(staging: Path) -> None:
        raise AssertionError("it was there already")

    prepare_once(path, fails, key=key)
    assert not control(path).exists(), sorted(control(path).rglob("*"))


def until_all(processes: list[int]) -> Counter[int]:
    """How children ended."""
    ended: Counter[int] = Counter()
    deadline = time.monotonic() + HANG
    waiting = set(processes)
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.remove(pid)
                ended[os.waitstatus_to_exitcode(status)] += 1
        if time.monotonic() > deadline:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{len(waiting)} processes hang")
        time.sleep(0.002)
    return ended


def process_round(path: Path, key: str, out: Path, within: float, chance: random.Random) -> bool:
    """Plain processes, one of which is mostly killed within some seconds; the rest finish. Whether one was."""
    processes = []
    for _ in range(chance.randint(2, 8)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                join(path, key, out)
                status = 0
            finally:
                os._exit(status)
        processes.append(pid)
    kill = chance.random() < 0.8
    if kill:
        time.sleep(chance.uniform(0, within))
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if living := [pid for pid in processes if os.waitid(os.P_PID, pid, how) is None]:
            os.kill(chance.choice(living), signal.SIGKILL)
    ended = until_all(processes)
    killed = ended[-signal.SIGKILL]
    assert killed <= kill
    assert ended == Counter({0: len(processes) - killed, -signal.SIGKILL: killed}), ended
    assert committed(path, key)
    return bool(killed)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "shared").mkdir()
    result = Reader(tmp_path / "shared" / "data")
    result.start()
    yield result
    result.stop()
    assert not result.wrong, result.wrong


def process_rounds(rounds: int, path: Path, folder: Path, seed: int) -> Counter[str]:
    """Run these rounds, and more until a process was killed in a quarter of them: builds may end before."""
    chance = random.Random(seed)
    figures: Counter[str] = Counter()
    within = 0.1
    while (index := figures["rounds"]) < rounds or 4 * figures["killed"] < rounds:
        out = folder / f"out{index}"
        out.mkdir()
        begun = time.monotonic()
        killed = process_round(path, f"key{index}", out, within, chance)
        figures["killed"] += killed
        # Some of the kills are to come before the build is done, however fast or busy the machine is.
        within = min(time.monotonic() - begun, 0.25) if killed else within / 2
        figures["builds"] += len(list(out.glob("*.built-*")))
        assert_nothing_is_left(path, f"key{index}")
        figures["rounds"] += 1
    # One build a round, and another one for each builder that was killed.
    assert figures["rounds"] <= figures["builds"] <= figures["rounds"] + figures["killed"]
    return figures


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [12, slow(25), soak(700)])
def test_processes_killed_at_random_leave_one_complete_build(rounds: int, reader: Reader, tmp_path: Path) -> None:
    figures = process_rounds(rounds, reader.path, tmp_path, fresh_seed())
    print(f"\n{dict(figures)}, {reader.looks} looks of a reader")
    assert reader.looks > 0


# Launchers


def command_of(launcher: str, count: int, arguments: list[str], script: Path = SCRIPT) -> list[str]:
    """The command that starts a script on that many ranks."""
    job = [sys.executable, str(script), *arguments]
    if launcher == "srun":
        return ["srun", "--overcommit", "-N2", f"-n{max(2, count)}", "--kill-on-bad-exit=0", "--wait=0", *job]
    if launcher == "openmpi":
        return [*OPENMPI, "-np", str(count), *job]
    if launcher == "mpich":
        return [*MPICH, "-n", str(count), *job]
    port = f"--master-port={free_port()}"
    return [*TORCHRUN, f"--nproc-per-node={count}", "--master-addr=127.0.0.1", port, str(script), *arguments]


def launcher_round(
    launcher: str, path: Path, key: str, out: Path, chance: random.Random, environ: dict[str, str]
) -> bool:
    """One launch of which a process is killed, mostly; those that end the survivors are launched once more."""
    count = chance.randint(2, 4)
    command = command_of(launcher, count, [str(path), key, str(out)])
    environ = {**of_no_launcher(environ), "OMP_NUM_THREADS": "1"}
    killed = False
    with started(command, out / "log1", environ) as job:
        if chance.random() < 0.8:
            until(lambda: list(out.glob("*.started")), job, out / "log1", HANG)
            files = list(out.glob("*.started"))
            time.sleep(chance.uniform(0, 0.25))
            victim = int(chance.choice(files).stem)
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                killed = SCRIPT.name in " ".join(psutil.Process(victim).cmdline())
                os.kill(victim, signal.SIGKILL)
        status = job.wait(HANG)
    said = (out / "log1").read_text(errors="replace")
    if not killed:
        assert status == 0, said
    elif launcher == "srun":  # the survivors finish
        assert len(list(out.glob("*.done"))) >= max(2, count) - 1, said
    else:
        command = command_of(launcher, count, [str(path), key, str(out)])
        with started(command, out / "log2", environ) as job:
            assert job.wait(HANG) == 0, (out / "log2").read_text(errors="replace")
    assert committed(path, key)
    return killed


def launches(launcher: str, rounds: int, path: Path, folder: Path, seed: int) -> Counter[str]:
    chance = random.Random(f"{launcher} {seed}")
    figures: Counter[str] = Counter()
    with slurm(2, 4) if launcher == "srun" else nullcontext(dict(os.environ)) as environ:
        for index in range(rounds):
            out = folder / f"{launcher}{index}"
            out.mkdir()
            figures["killed"] += launcher_round(launcher, path, f"{launcher}{index}", out, chance, environ)
            assert_nothing_is_left(path, f"{launcher}{index}")
            figures["rounds"] += 1
    return figures


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("launcher", "rounds"),
    [
        ("mpich", 2),
        *(slow(launcher, 2) for launcher in ("openmpi", "srun")),
        *(soak(*case) for case in (("torchrun", 40), ("srun", 100), ("openmpi", 80), ("mpich", 80))),
    ],
)
def test_launched_ranks_killed_at_random_leave_one_complete_build(
    launcher: str, rounds: int, reader: Reader, tmp_path: Path
) -> None:
    need(launcher)
    figures = launches(launcher, rounds, reader.path, tmp_path, fresh_seed())
    print(f"\n{launcher}: {dict(figures)}, {reader.looks} looks of a reader")
