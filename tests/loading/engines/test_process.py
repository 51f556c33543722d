"""Worker processes may be killed, left or orphaned: the batches stay the same and nothing is left over."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
from tests.loading.feeds import (
    FatalOnce,
    assert_once,
    delivered,
    fatal_at_13,
    feed,
    loaded,
    same,
    slowly,
    state_after,
    take,
    wide,
    workers,
)
from tests.support.marks import slow, soak

import rankfeed as rf
from rankfeed import errors

ROOT = Path(__file__).parents[3]
WORKERS: dict[str, Any] = {"num_workers": 2, "worker_kind": "process"}


def gone(processes: list[psutil.Process], seconds: float = 300) -> bool:
    """Whether all processes end, reaped or not, in time; orphans are reaped by a process that may be busy."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, processes))


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_over() -> set[str]:
    """Names in shared memory such as torch and multiprocessing use, and ours."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if name.startswith(("torch_", "psm_", "rankfeed"))}


class BrieflyFast:
    """By the clock of its worker, steps take 0.1 and 1.2 ms in turn; if asked, some in succession take 0.1 ms."""

    def __init__(self, asked: Path) -> None:
        self.asked, self.now = asked, 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a worker
        self.__dict__.update(state)
        time.perf_counter = lambda: self.now

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        step = int(batch["id"][0])
        is_fast = step // 2 % 2 == 0 or (50 <= step < 68 and self.asked.exists())
        self.now += 1e-4 if is_fast else 1.2e-3
        return batch


class SmallAtTheEnd(BrieflyFast):
    """The last of 128 batches is small."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch = super().__call__(batch)
        return batch if int(batch["id"][0]) < 127 else {"x": batch["x"][:, :1].clone()}


def shared_bytes() -> int:
    """Size of the files of this process that have no name, such as the memory that workers share with it."""
    total = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(each).startswith("/memfd:"):
                total += each.stat().st_size
    return total


def run(code: str, *arguments: str, timeout: float = 100) -> Any:
    """What a script prints last, as JSON. Its workers import it, as a user's script is imported."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_killed_worker_process_is_replaced_and_its_batches_are_built_again(tmp_path: Path) -> None:
    expected = list(feed())
    loader = feed(transform=FatalOnce(tmp_path, 3, 14, 15, 40), **WORKERS)
    assert same(list(loader), expected)
    assert len(list(tmp_path.iterdir())) == 4
    assert loader.epoch == 1


def test_a_worker_that_dies_three_times_raises_worker_error_naming_rank_and_step() -> None:
    rank = int(13 in delivered(list(feed(1, 2))))
    with pytest.raises(errors.WorkerError, match=rf"(?s)died 3 times.*SIGKILL.*rank {rank}, step \d+, worker"):
        list(feed(rank, 2, transform=fatal_at_13, **WORKERS))
    assert_once(delivered(list(feed(size=20, **WORKERS))), 20)


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return float, ("no number",)


def fails_at(number: int, how: str, marker: Path) -> Callable[[Any], Any]:
    """A batch transform that fails for the batch of one sample."""

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["x"].item() == number:
            if how == "dies" or (how == "dies once" and not marker.exists()):
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError(how)
            if how == "is not pickled":
                return {**batch, "y": threading.Lock()}
            if how == "is not unpickled":
                return {**batch, "y": Unreadable()}
        return batch

    return transform


def single(**options: Any) -> rf.Loader:
    """A loader of 120 batches; each takes far less than 2 ms, so that requests have several steps."""
    return rf.Loader([{"x": x} for x in range(120)], 1, shuffle=False, **{**WORKERS, **options})


def numbers(batches: Iterable[dict[str, Any]]) -> Iterator[int]:
    return (batch["x"].item() for batch in batches)


@pytest.mark.parametrize("how", ["raises", "dies", "is not pickled", "is not unpickled"])
@pytest.mark.parametrize("number", [90, *map(slow, (112, 119))])
def test_all_batches_before_one_that_fails_are_delivered(how: str, number: int, tmp_path: Path) -> None:
    loader = single(batch_transform=fails_at(number, how, tmp_path / "marker"))
    received: list[int] = []
    with pytest.raises(errors.RankfeedError, match=rf"step {number}\b"):
        received.extend(numbers(loader))
    assert received == list(range(number))


@pytest.mark.parametrize("number", [90, *map(slow, (64, 112, 119))])
@pytest.mark.parametrize("prefetch_factor", [1, 2])
def test_a_worker_that_dies_with_several_pending_requests_is_replaced_without_losing_batches(
    number: int, prefetch_factor: int, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    loader = single(batch_transform=fails_at(number, "dies once", marker), prefetch_factor=prefetch_factor)
    for _ in range(2):
        assert list(numbers(loader)) == list(range(120))
    assert marker.exists()


def test_more_prefetch_requests_than_a_socket_buffer_holds_do_not_deadlock() -> None:
    for batch_size in (1, 7):
        iterator = iter(rf.Loader([{"x": x} for x in range(3000)], batch_size, **WORKERS, prefetch_factor=1000))
        first = next(iterator)["x"].tolist()
        time.sleep(0.3)
        assert first + [x for batch in iterator for x in batch["x"].tolist()] == list(range(3000))


def test_an_iterator_raises_worker_error_in_a_forked_child_and_continues_in_the_parent() -> None:
    iterator = numbers(single())
    assert next(iterator) == 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            list(iterator)
        except errors.WorkerError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(iterator) == list(range(1, 120))


PIPES = """
import signal
from tests.loading.feeds import *

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
loader = feed(num_workers=2, worker_kind="process")
for processes in (workers, servers):
    batches = list(loader)
    running = workers()
    for process in processes():
        process.kill()
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in running):
        time.sleep(0.01)
print(len(list(loader)))
"""


def test_a_rank_with_default_sigpipe_survives_the_death_of_its_workers_and_their_server() -> None:
    assert run(PIPES) == 13


def test_workers_killed_between_epochs_are_replaced() -> None:
    loader, expected = feed(**WORKERS), feed()
    assert same(list(loader), list(expected))
    for worker in workers():
        worker.kill()
    assert same(list(loader), list(expected))


def test_worker_processes_are_reused_for_the_next_epoch() -> None:
    loader = feed(transform=slowly, id_column=None, columns=["y"], **WORKERS)
    pids = [{pid for batch in loader for pid in batch["pid"].tolist()} for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 2


def test_an_epoch_resumed_near_its_end_does_not_leave_the_next_with_fewer_workers() -> None:
    loader = loaded(state_after(len(feed()) - 1), transform=slowly, **WORKERS)
    assert len(list(loader)) == 1
    assert len({pid for batch in loader for pid in batch["pid"].tolist()}) == 2


def test_breaking_out_ends_the_workers_and_iterating_again_gives_the_same_batches() -> None:
    loader = feed(**WORKERS)
    expected = list(feed())
    for stop in (1, 4, 7):
        for step, batch in enumerate(loader, start=1):
            assert same(batch, expected[step - 1])
            if step == stop:
                break
        assert not workers()
    assert same(list(loader), expected)


def test_worker_processes_end_when_the_loader_is_garbage_collected() -> None:
    loader = feed(**WORKERS)
    list(loader)
    running = workers()
    assert running
    del loader
    gc.collect()
    assert gone(running)


def test_a_forked_child_that_iterates_the_loader_does_not_use_or_end_the_workers_of_its_parent() -> None:
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


def test_lambdas_and_closures_work_as_transforms_in_worker_processes() -> None:
    offset = 1
    loader = feed(transform=lambda sample: {"y": sample["y"] + offset}, **WORKERS)
    assert next(iter(loader))["y"].tolist() == [
        sample_id * 10 + 1 for sample_id in delivered([next(iter(feed()))])
    ]


def test_a_transform_that_cannot_be_pickled_raises_argument_error_before_the_first_batch() -> None:
    lock = threading.Lock()
    with pytest.raises(errors.ArgumentError, match=r"(?s)cannot be sent to a worker process.*cannot pickle.*lock"):
        next(iter(feed(transform=lambda sample: sample if lock else None, **WORKERS)))


SCRIPT = """
import json, os, sys
import numpy as np
import rankfeed as rf
from rankfeed.loading.engines import process
process.INLINE_AFTER = float(sys.argv[1])

array = np.arange(1_000_000)

class Pair:
    received = 0

    def __init__(self, x, pid):
        self.x, self.pid = x, pid

def double(sample):
    return {"x": 2 * sample["x"], "y": array[sample["x"]], "pid": os.getpid()}

def pairs(samples):
    return [Pair(each["x"], each["pid"]) for each in samples]

source = [{"x": number} for number in range(300)]
loader = rf.Loader(source, 2, transform=double, num_workers=2, worker_kind="process")
batches = list(loader)
assert [x for batch in batches for x in batch["x"].tolist()] == [2 * x for x in range(300)]
assert [y for batch in batches for y in batch["y"].tolist()] == list(range(300))
loader = rf.Loader(source, 2, transform=double, collate_fn=pairs, num_workers=2, worker_kind="process")
batches = []
for batch in loader:
    assert all(type(pair) is Pair for pair in batch)
    Pair.received += 1  # kept, although the class comes again with every batch
    batches.append(batch)
assert Pair.received == 150
print(len({pair.pid for batch in batches for pair in batch}))
"""


@pytest.mark.parametrize(
    ("how", "inline"),
    [("script", "60"), *(slow(*case) for case in (("stdin", "0"), ("-c", "60"))), soak("script", "0")],
)
def test_worker_processes_run_functions_and_classes_of_a_script_without_a_main_guard(
    how: str, inline: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = {"script": [str(script), inline], "stdin": ["-", inline], "-c": ["-c", SCRIPT, inline]}[how]
    options: dict[str, Any] = {"input": SCRIPT if how == "stdin" else "", "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], timeout=100, check=False, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert inline == "0" or done.stdout == "2\n"


SPAWNED = """
import multiprocessing, sys
from rankfeed.loading.engines import process
from tests.loading.feeds import *

class Twice:
    def __call__(self, sample):
        return {"y": 2 * sample["y"]}

def rank():
    batches = list(feed(transform=Twice(), id_column=None, num_workers=2, worker_kind="process"))
    assert sorted(y for batch in batches for y in batch["y"].tolist()) == [20 * each for each in range(50)]

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    child = multiprocessing.Process(target=rank)
    child.start()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", slow("forkserver"), soak("fork")])
def test_a_process_started_by_multiprocessing_can_use_worker_processes(method: str, tmp_path: Path) -> None:
    before = left_over()
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    assert run("import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')", str(script), method) == 0
    assert left_over() <= before


ORPHANS = """
import json, os, sys
import numpy as np
import psutil
from tests.loading.feeds import *

def keeps_files_open(sample):
    if sample["y"] == 200 and os.fork() == 0:  # inherits all files of the worker
        time.sleep(10_000)
        os._exit(0)
    return slowly(sample)

transform = keeps_files_open if sys.argv[1] == "child" else slowly
options = dict(shuffle=False, num_workers=3, worker_kind="process", prefetch_factor=8)
loader = feed(size=10_000, transform=transform, **options)
for step, _ in enumerate(loader):
    if step == 10:
        (server,) = psutil.Process().children()
        workers = server.children()
        children = [child for worker in workers for child in worker.children()]
        print(json.dumps([[each.pid for each in some] for some in ([server, *workers], children)]), flush=True)
"""


@pytest.mark.parametrize("child", [slow(""), "child"])
def test_worker_processes_end_when_their_parent_is_killed(child: str) -> None:
    before = left_over()
    command = [sys.executable, "-c", ORPHANS, child]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids, children = json.loads(parent.stdout.readline())
        running = [psutil.Process(pid) for pid in pids]
        parent.kill()
    assert len(running) == 4
    assert len(children) == bool(child)
    assert gone(running)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert left_over() <= before


def test_a_dead_worker_is_replaced_while_a_process_that_it_started_lives_on(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    def dies_and_leaves_a_child(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["y"] == 200 and not marker.exists():
            pid = os.fork()
            if pid == 0:
                time.sleep(10_000)
                os._exit(0)
            marker.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    assert same(list(feed(transform=dies_and_leaves_a_child, **WORKERS)), list(feed()))
    os.kill(int(marker.read_text()), signal.SIGKILL)  # which has not ended


def test_no_shared_memory_file_is_left_over_during_or_after_an_iteration_with_killed_workers() -> None:
    before = left_over()
    iterator = iter(feed(**WORKERS))
    take(iterator, 3)
    assert left_over() <= before
    for worker in workers():
        worker.kill()
    list(iterator)
    assert left_over() <= before


def test_a_short_burst_of_fast_steps_does_not_raise_shared_memory_use(tmp_path: Path) -> None:
    source = rf.from_dataset([{"x": np.zeros(40_000, np.float32)} for _ in range(128)])
    transform = BrieflyFast(tmp_path / "asked")
    loader = rf.Loader(source, 1, batch_transform=transform, id_column="id", **WORKERS)
    for pause in (0, 0, 0.005, 0):
        for _ in loader:
            time.sleep(pause)  # the workers build all that they may
    before = shared_bytes()
    assert before
    transform.asked.touch()
    for _ in range(5):
        for _ in loader:
            pass
    assert shared_bytes() == before


@pytest.mark.parametrize("transforms", [BrieflyFast, SmallAtTheEnd])
def test_shared_memory_stays_bounded_for_large_batches(transforms: type[BrieflyFast], tmp_path: Path) -> None:
    source = rf.from_dataset([{"x": np.zeros(1 << 21, np.float32)}] * 128)
    transform = transforms(tmp_path / "asked")
    loader = rf.Loader(source, 1, batch_transform=transform, id_column="id", **WORKERS)
    for pause in (0, 0.005):
        for _ in loader:
            time.sleep(pause)
    assert 2 << 23 < shared_bytes() <= 2 * (3 * 2 + 1 << 23)  # of two requests, and what is left of another one


def test_rows_of_any_size_are_equal_with_and_without_worker_processes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows: Any = (
        {
            "dense": rng.integers(0, 256, 515, np.uint8),
            "ragged": rng.integers(0, 256, rng.integers(0, 2000), np.uint8),
            "wide": rng.standard_normal((rng.integers(0, 40), 7)),
            "raw": rng.bytes(rng.integers(0, 2000)),
        }
        for _ in range(1000)
    )
    rf.write(rows, tmp_path / "data", shard_bytes=1 << 20, progress=False)
    options: dict[str, Any] = {"batch_size": 150, "shuffle": True, "seed": 1, "bytes_as": "view"}
    loaders = [rf.Loader(rf.open(tmp_path / "data"), **options, **each) for each in ({}, WORKERS)]
    for batches in zip(*loaders, strict=True):
        raw = [[bytes(row) for row in batch.pop("raw")] for batch in batches]
        assert raw[0] == raw[1]
        assert same(*batches)


def killed_at_random(epochs: int, folder: Path | None = None) -> int:
    """Iterate while workers are killed, in the middle of making and of sending batches; how many were.

    With a folder, its small rows are only copied, so that batches of several steps are in one message.
    """
    packed: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 1, "topology": rf.Topology()}

    def loader(**options: Any) -> rf.Loader:
        if folder is None:
            return feed(size=120, transform=wide, **options)
        return rf.Loader(rf.open(folder), **packed, **options)

    if folder is not None:
        rows = ({"x": np.full(3, i), "r": np.full(i % 7, i)} for i in range(480))
        rf.write(rows, folder, shard_bytes=4000, progress=False)
    expected = list(loader())
    chance, kills = random.Random(1), 0
    for _ in range(epochs):
        kept = []
        for step, batch in enumerate(loader(**WORKERS)):
            assert same(batch, expected[step])
            kept.append(batch)
            time.sleep(chance.random() / 200)
            running = workers()  # none while both are being replaced
            if running and chance.random() < 0.4:
                with suppress(psutil.NoSuchProcess):
                    chance.choice(running).kill()
                    kills += 1
        assert same(kept, expected)  # in the memory of workers that are gone
    return kills


@pytest.mark.parametrize("rounds", [1, soak(30)])
def test_workers_killed_at_random_lose_and_repeat_no_batch(rounds: int, tmp_path: Path) -> None:
    kills = killed_at_random(2 * rounds), killed_at_random(rounds, tmp_path / "data")
    print(f"{3 * rounds} epochs, {kills} workers killed, all batches the same")
    assert kills[0] > 10
    assert kills[1] > 5


def resident(_: Any) -> dict[str, int]:
    """Memory of this process that is no file's, in bytes."""
    status = Path("/proc/self/status").read_text()
    return {"bytes": sum(1024 * int(size) for size in re.findall(r"Rss(?:Anon|Shmem):\s*(\d+)", status))}


def test_a_large_array_in_a_transform_closure_is_shared_and_not_copied_by_worker_processes() -> None:
    array = np.ones(16_000_000)  # 128 MB

    def reads(sample: dict[str, Any]) -> dict[str, Any]:
        assert array[int(sample["y"])] == 1
        return resident(sample)

    used = [max(max(batch["bytes"]) for batch in feed(transform=each, **WORKERS)) for each in (resident, reads)]
    assert used[1] - used[0] < 16_000_000


THREADS = """
import faulthandler, sys, threading, time
from tests.loading.feeds import *
from rankfeed.loading.engines import process

process.INLINE_AFTER = 0.0  # while the workers start, all threads build batches themselves

def noisy(batch):
    time.sleep(0.01)
    return batch_from_globals(batch)

expected = list(feed(transform=keyed_all, batch_transform=noisy))

def read(results):
    for _ in range(2):
        ours = feed(transform=keyed_all, batch_transform=noisy, num_workers=2, worker_kind="process")
        results.append(same(list(ours), expected))

for round in range(int(sys.argv[1])):
    faulthandler.dump_traceback_later(200, exit=True)
    results = []
    threads = [threading.Thread(target=read, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6, results
print(1)
"""


@pytest.mark.parametrize("rounds", [2, soak(50)])
def test_loaders_with_workers_in_several_threads_do_not_hang_or_seed_the_generators_of_each_other(
    rounds: int,
) -> None:
    assert run(THREADS, str(rounds), timeout=280 * rounds) == 1


class InterruptedRequest(Exception):
    """Raised in the middle of a request to the server of worker processes."""


def in_a_request(function: Callable[[], object]) -> Any:
    """A profiler that calls a function once, while a thread receives what the server answers."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_receive":
            sys.setprofile(None)
            function()

    return profile


def test_garbage_collecting_a_loader_during_a_worker_request_of_another_does_not_hang() -> None:
    dropped, expected = feed(**WORKERS), list(feed())
    list(dropped)
    assert workers()
    cycle: list[Any] = [dropped]
    cycle.append(cycle)
    delivered: list[Any] = []

    def read() -> None:
        sys.setprofile(in_a_request(gc.collect))
        delivered.extend(feed(**WORKERS))

    gc.disable()
    try:
        del dropped, cycle
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert same(delivered, expected)


def test_an_exception_during_a_worker_request_does_not_disturb_the_next_loader() -> None:
    def interrupt() -> None:
        raise InterruptedRequest

    sys.setprofile(in_a_request(interrupt))
    try:
        with pytest.raises(InterruptedRequest):
            list(feed(transform=slowly, **WORKERS))
    finally:
        sys.setprofile(None)
    loader = feed(transform=slowly, **WORKERS)
    assert len({pid for batch in loader for pid in batch["pid"].tolist()}) == 2


IMPORTING = """
import os, sys
from tests.loading.feeds import *
from rankfeed.loading.engines import process
process.INLINE_AFTER = 0.0
os.environ["SECONDS"] = "10000"
next(iter(feed(num_workers=2, worker_kind="process")))
"""


def test_a_process_exits_without_waiting_for_a_worker_server_that_is_still_importing(tmp_path: Path) -> None:
    code = "import os, time; time.sleep(float(os.environ.get('SECONDS', '0')))"
    (tmp_path / "sitecustomize.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", IMPORTING], cwd=ROOT, env=environ, timeout=600, check=True)


def test_a_worker_server_whose_client_has_ended_exits_without_a_traceback() -> None:
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["true"]) as client:
        pass
    code = "import sys; from rankfeed._util.workers.server import serve; serve(*map(int, sys.argv[1:]), [])"
    command = [sys.executable, "-c", code, str(theirs.fileno()), str(client.pid)]
    with ours, theirs:
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
