"""Several hosts: once on each of their local disks, once on what they share, though the builder's host is lost."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.prepare_job import FILES, content
from tests.support.hosts import need_hosts, started_on

#: Wants PATH prepared, and says on which host it was built. Lost hosts are noticed soon, for the test's sake.
JOB = """\
import socket, sys, time
from pathlib import Path
from rankfeed.prepare import prepare_once
from rankfeed.storage import lease
from tests.faults.prepare_job import build
lease.HEARTBEAT, lease.DURATION = 0.2, 2.0
path, key, out, slow = Path(sys.argv[1]), "key", Path(sys.argv[2]), float(sys.argv[3])
def make(staging):
    (out / f"{socket.gethostname()}.building").touch()
    time.sleep(slow)
    build(staging, key, out)
folder = prepare_once(path, make, key=key, scope="node" if len(sys.argv) > 4 else "shared", timeout=60)
lines = [(folder / f"{number}.txt").read_text() for number in range(6)]
(out / f"{socket.gethostname()}-{sys.argv[-1]}.read").write_text("".join(lines))
"""
EXPECTED = "".join(content("key", number) for number in range(FILES))


def end(process: object, log: Path) -> None:
    assert process.wait(90) == 0, log.read_text(errors="replace")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_host_that_is_lost_while_it_builds_is_replaced(tmp_path: Path) -> None:
    need_hosts()
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", JOB, str(tmp_path / "data"), str(tmp_path / "out")]
    first = started_on("first", [*command, "30"], tmp_path / "first.log")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "first.building").exists():
            assert time.monotonic() < deadline, (tmp_path / "first.log").read_text()
            time.sleep(0.02)
        others = [started_on(f"h{number}", [*command, "0"], tmp_path / f"h{number}.log") for number in range(3)]
        time.sleep(3)  # longer than a host may be silent: this one is not
        assert all(other.poll() is None for other in others)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait(10)
    for number, other in enumerate(others):
        end(other, tmp_path / f"h{number}.log")
    read = list((tmp_path / "out").glob("*.read"))
    assert len(read) == 3
    assert all(path.read_text() == EXPECTED for path in read)
    assert len(list((tmp_path / "out").glob("*.built-*"))) == 1
    assert sorted(path.name for path in tmp_path.glob(".data*")) == []


@pytest.mark.slow
def test_a_builder_that_keeps_its_threads_from_running_is_not_taken_over_from_for_ever(tmp_path: Path) -> None:
    """One long call that keeps the interpreter's lock, at the same place of each build."""
    need_hosts()
    (tmp_path / "out").mkdir()
    job = JOB.replace('"stale"] = 2.0', '"stale"] = 1.0').replace(
        "time.sleep(slow)", "ctypes.PyDLL(None).sleep(4)"
    )
    command = [sys.executable, "-c", "import ctypes\n" + job, str(tmp_path / "data"), str(tmp_path / "out"), "0"]
    logs = [tmp_path / f"h{number}.log" for number in range(3)]
    jobs = [started_on(log.stem, command, log) for log in logs]
    for process, log in zip(jobs, logs, strict=True):
        end(process, log)
    assert len(list((tmp_path / "out").glob("*.building"))) > 1  # a live builder was taken for dead
    assert sorted(path.name for path in tmp_path.glob(".data*")) == []
