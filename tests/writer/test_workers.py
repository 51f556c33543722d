"""Worker processes of a local write: no user code makes a write hang or leaves a process."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.jobs import ENVIRON, ROOT, until

import rankfeed as rf
from rankfeed.errors import WriteError

_pool: Any = None


def in_worker() -> bool:
    return "serve(" in " ".join(psutil.Process().cmdline())


def reads_standard_input(sample: dict[str, Any]) -> dict[str, Any]:
    if in_worker() and sample["id"] == 300:
        assert sys.stdin.read() == ""
        assert subprocess.run(["cat"], capture_output=True, check=True).stdout == b""
        os.write(1, b"printed")
    return sample


def leaves_a_child_and_dies(sample: dict[str, Any]) -> dict[str, Any]:
    if in_worker() and sample["id"] == 300:
        if os.fork() == 0:  # it has the worker's pipes
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def exits(sample: dict[str, Any]) -> dict[str, Any]:
    if in_worker() and sample["id"] == 300:
        os._exit(4)
    return sample


def square(value: int) -> int:
    return value * value


def asks_a_pool(sample: dict[str, Any]) -> dict[str, Any]:
    global _pool
    if in_worker():
        if _pool is None:
            _pool = multiprocessing.get_context("fork").Pool(1)
            Path(os.environ["SEEN_PIDS"], str(_pool._pool[0].pid)).touch()
        assert _pool.apply(square, (4,)) == 16
    return sample


@pytest.fixture
def source(tmp_path: Path) -> rf.Source:
    return rf.write(({"id": i} for i in range(500)), tmp_path / "source", shard_bytes=500, progress=False)


def write(source: rf.Source, dest: Path, function: Any) -> rf.Source:
    return rf.write(source, dest, map=function, shard_bytes=500, workers=2, progress=False)


def test_a_map_that_is_a_closure_runs_in_worker_processes(source: rf.Source, tmp_path: Path) -> None:
    caller = os.getpid()
    written = write(source, tmp_path / "p", lambda sample: {"pid": os.getpid(), "caller": caller})
    pids = {int(sample["pid"]) for sample in written}
    assert os.getpid() not in pids
    assert {int(sample["caller"]) for sample in written} == {caller}


def test_a_map_that_reads_standard_input_reads_nothing(source: rf.Source, tmp_path: Path) -> None:
    assert [sample["id"] for sample in write(source, tmp_path / "p", reads_standard_input)] == list(range(500))


def test_a_crashed_worker_raises_even_if_its_child_keeps_the_pipe_open(source: rf.Source, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"(?s)worker process died.*killed by SIGKILL.*task"):
        write(source, tmp_path / "p", leaves_a_child_and_dies)
    with pytest.raises(WriteError, match=r"(?s)worker process died.*exit status 4.*task"):
        write(source, tmp_path / "p", exits)


def test_a_process_with_a_thousand_open_files_writes_with_workers(source: rf.Source, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip("this machine does not allow a process that many")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, limits[0]), limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1030):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert len(write(source, tmp_path / "p", dict)) == 500


def test_processes_that_a_map_function_started_end_with_the_write(
    source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "pids"
    seen.mkdir()
    monkeypatch.setenv("SEEN_PIDS", str(seen))
    assert len(write(source, tmp_path / "p", asks_a_pool)) == 500
    left = [psutil.Process(int(path.name)) for path in seen.iterdir() if psutil.pid_exists(int(path.name))]
    assert len(list(seen.iterdir())) == 2
    assert psutil.wait_procs(left, timeout=10)[1] == []


def hangs(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 301:
        Path(os.environ["HANGING_PID"]).write_text(str(os.getpid()))
        time.sleep(1000)
    return sample


def test_a_worker_with_a_hanging_map_ends_when_its_driver_is_killed(source: rf.Source, tmp_path: Path) -> None:
    code = (
        "import sys, rankfeed as rf\n"
        "from tests.writer.test_workers import hangs, write\n"
        "write(rf.open(sys.argv[1]), sys.argv[2], hangs)\n"
    )
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "p")]
    with subprocess.Popen(command, cwd=ROOT, env={**ENVIRON, "HANGING_PID": str(pid_file)}) as driver:
        try:
            until(lambda: pid_file.exists() and pid_file.read_text(), driver)
            worker = psutil.Process(int(pid_file.read_text()))
            assert worker.pid != driver.pid
        finally:
            driver.kill()
    assert psutil.wait_procs([worker], timeout=20)[1] == []
