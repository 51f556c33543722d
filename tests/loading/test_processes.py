"""Worker processes may be killed, left or orphaned: the batches stay the same and nothing is left over."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.loading.feeds import FatalOnce, assert_once, delivered, fatal_at_13, feed, same, slowly, take, wide
from tests.support.environ import of_no_launcher

from rankfeed import errors

ROOT = Path(__file__).parents[2]
WORKERS: dict[str, Any] = {"num_workers": 2, "worker_kind": "process"}


def workers() -> list[psutil.Process]:
    """Child processes of ours that are still running.

    Others' are left out: where Lightning has looked for MPI in this process, Open MPI's `orted` stays beside it.
    """
    found = []
    this = psutil.Process()
    for child in this.children():
        with suppress(psutil.NoSuchProcess):
            if child.exe() != this.exe():
                continue
            helper = {"resource_tracker", "forkserver"} & set(re.split(r"\W+", " ".join(child.cmdline())))
            if child.status() != psutil.STATUS_ZOMBIE and not helper:
                found.append(child)
    return found


def gone(processes: list[psutil.Process], seconds: float = 30) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


def left_over() -> set[str]:
    """Names in shared memory, and our own in the folder for temporary files."""
    temporary = {str(path) for path in Path("/tmp").glob("*rankfeed*")}
    # Others are those of tests beside this one: a stock DataLoader's semaphores, segments of Open MPI and MPICH.
    others = ("sem.", "sm_segment.", "mpich_")
    return {str(path) for path in Path("/dev/shm").iterdir() if not path.name.startswith(others)} | temporary


def run(code: str, *arguments: str, timeout: float = 100) -> Any:
    """What a script prints last, as JSON. Its workers import it, as a user's script is imported."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def test_a_worker_killed_once_is_replaced_and_its_batches_are_made_again(tmp_path: Path) -> None:
    expected = list(feed())
    loader = feed(transform=FatalOnce(tmp_path, 3, 14, 15, 40), **WORKERS)
    assert same(list(loader), expected)
    assert len(list(tmp_path.iterdir())) == 4
    assert loader.epoch == 1


def test_a_worker_that_always_dies_is_an_error_that_names_rank_and_step() -> None:
    ids = delivered(list(feed(1, 2, size=50))), delivered(list(feed(0, 2, size=50)))
    rank = 1 if 13 in ids[0] else 0
    loader = feed(rank, 2, transform=fatal_at_13, **WORKERS)
    with pytest.raises(errors.WorkerError, match=rf"(?s)died 3 times.*SIGKILL.*rank {rank}, step \d+, worker"):
        list(loader)
    assert_once(delivered(list(feed(size=20, **WORKERS))), 20)


def test_workers_killed_between_epochs_are_replaced() -> None:
    loader, expected = feed(**WORKERS), feed()
    assert same(list(loader), list(expected))
    idle = workers()
    for worker in idle:
        worker.kill()
    assert same(list(loader), list(expected))


def test_workers_stay_for_the_next_epoch() -> None:
    loader = feed(transform=slowly, id_column=None, columns=["y"], **WORKERS)
    pids = [{pid for batch in loader for pid in batch["pid"].tolist()} for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 2


def test_an_epoch_resumed_near_its_end_does_not_leave_the_next_with_fewer_workers() -> None:
    donor = feed()
    take(iter(donor), len(donor) - 1)
    loader = feed(transform=slowly, **WORKERS)
    loader.load_state_dict(donor.state_dict())
    assert len(list(loader)) == 1
    assert len({pid for batch in loader for pid in batch["pid"].tolist()}) == 2


def test_breaking_out_ends_the_workers_and_iterating_anew_gives_the_same_batches() -> None:
    loader = feed(**WORKERS)
    expected = list(feed())
    for stop in (1, 4, 7):
        for step, batch in enumerate(loader, start=1):
            assert same(batch, expected[step - 1])
            if step == stop:
                break
        assert not workers()
    assert same(list(loader), expected)


def test_a_loader_that_is_dropped_takes_its_workers_with_it() -> None:
    loader = feed(**WORKERS)
    list(loader)
    running = workers()
    assert running
    del loader
    gc.collect()
    assert gone(running)


def test_a_forked_child_leaves_the_workers_of_its_parent_alone() -> None:
    loader = feed(**WORKERS)
    expected = list(feed())
    assert same(list(loader), expected)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            loader.set_epoch(0)
            code = 0 if same(list(loader), expected) else 2
            del loader
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    running = workers()
    assert len(running) == 2
    loader.set_epoch(0)
    assert same(list(loader), expected)
    assert workers() == running


def test_a_jobs_own_handler_of_sigterm_does_not_run_in_workers(tmp_path: Path) -> None:
    pid = os.getpid()

    def handler(*_: Any) -> None:
        (tmp_path / str(os.getpid())).touch()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        iterator = iter(feed(**WORKERS))
        next(iterator)
        running = workers()
        del iterator
        assert gone(running)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir() if path.name != str(pid)] == []


def test_an_exception_in_the_training_loop_ends_the_workers() -> None:
    with pytest.raises(RuntimeError, match="of the loop"):
        _loop_that_raises()
    gc.collect()
    assert not workers()


def _loop_that_raises() -> None:
    for _ in feed(**WORKERS):
        raise RuntimeError("of the loop")


def test_lambdas_work_under_fork() -> None:
    loader = feed(transform=lambda sample: {"y": sample["y"] + 1}, **WORKERS)
    assert next(iter(loader))["y"].tolist() == [each * 10 + 1 for each in delivered([next(iter(feed()))])]


SCRIPT = """
import json, multiprocessing, sys
from tests.loading.feeds import *
if __name__ == "__main__":
    method = sys.argv[1]
    multiprocessing.set_start_method(method)
    options = dict(ragged="list", transform=keyed_all, num_workers=2, worker_kind="process")
    expected = list(feed(1, 2, ragged="list", transform=keyed_all))
    loader = feed(1, 2, **options)
    assert same(list(loader), expected)
    take(iter(loader), 2)
    loader.set_epoch(0)
    assert same(list(loader), expected)
    try:
        list(feed(transform=lambda sample: sample, num_workers=1, worker_kind="process"))
        refused = ""
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    print(json.dumps(refused))
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_every_start_method_gives_the_same_batches_and_refuses_lambdas(method: str) -> None:
    before = left_over()
    refused = run(SCRIPT, method)
    assert refused.startswith("ArgumentError: the loader cannot be sent to a worker process")
    assert "no lambdas" in refused
    assert left_over() <= before


ORPHANS = """
import json, multiprocessing, os, sys
import psutil
from tests.loading.feeds import *
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    loader = feed(size=10_000, transform=slowly, num_workers=3, worker_kind="process", prefetch_factor=8)
    for step, _ in enumerate(loader):
        if step == 10:
            print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_workers_go_when_their_parent_is_killed(method: str) -> None:
    before = left_over()
    command = [sys.executable, "-c", ORPHANS, method]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        running = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        parent.kill()
    assert len(running) >= 3
    assert gone(running)
    assert left_over() <= before


def test_nothing_is_left_in_shared_memory_while_iterating_or_after() -> None:
    before = left_over()
    loader = feed(**WORKERS)
    iterator = iter(loader)
    take(iterator, 3)
    assert left_over() <= before
    for worker in workers():
        worker.kill()
    list(iterator)
    assert left_over() <= before


def killed_at_random(epochs: int) -> int:
    """Iterate while workers are killed, in the middle of making and of sending batches; how many were."""
    expected = list(feed(size=120, transform=wide))
    chance, kills = random.Random(1), 0
    for _ in range(epochs):
        for step, batch in enumerate(feed(size=120, transform=wide, **WORKERS)):
            assert same(batch, expected[step])
            if chance.random() < 0.4:
                time.sleep(chance.random() / 200)
                os.kill(chance.choice(workers()).pid, signal.SIGKILL)
                kills += 1
    return kills


def test_workers_killed_at_random_lose_and_repeat_nothing() -> None:
    assert killed_at_random(2) > 10


@pytest.mark.soak
def test_workers_killed_at_random_lose_and_repeat_nothing_in_many_rounds() -> None:
    began = time.monotonic()
    kills = killed_at_random(100)
    print(f"100 epochs, {kills} workers killed: {time.monotonic() - began:.0f} s, all batches the same")


HANGS_AT_FORK = """
import os, sys, time
from rankfeed.loading import processes
from tests.loading.feeds import Memory
import rankfeed as rf

processes._FIRST_WORD = float(sys.argv[2])
left = [int(sys.argv[1])]

def before() -> None:
    left[0] -= 1

def in_child() -> None:
    if left[0] >= 0:
        time.sleep(1000)  # as one whose lock no thread will ever give back

os.register_at_fork(before=before, after_in_child=in_child)
loader = rf.Loader(Memory(9), 2, num_workers=2, worker_kind="process", id_column="id")
try:
    print(sorted(int(each) for batch in loader for each in batch["id"]))
except rf.errors.WorkerError as error:
    print(error)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("hanging", "seconds", "said"),
    [
        pytest.param(1, 6, str([*range(9)]), marks=pytest.mark.slow),  # six: a loaded machine is slow
        (9, 1, "did not come to life within 1 seconds"),
    ],
)
def test_a_worker_that_hangs_at_its_fork_is_forked_again(hanging: int, seconds: int, said: str) -> None:
    command = [sys.executable, "-c", HANGS_AT_FORK, str(hanging), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=of_no_launcher())
    assert said in done.stdout, (done.stdout, done.stderr)
