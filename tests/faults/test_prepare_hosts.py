"""Several hosts: once on each of their local disks, once on what they share, though the builder's host is lost."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.prepare_job import FILES, content
from tests.support.hosts import need_hosts, started_on
from tests.support.jobs import until

#: Has PATH prepared in a build that takes some seconds; below zero, in one call that keeps the interpreter's lock.
#: Lost hosts are noticed soon, for the test's sake.
JOB = """\
import ctypes, socket, sys, time
from pathlib import Path
from rankfeed.prepare import prepare_once
from rankfeed.storage import lease
from tests.faults.prepare_job import FILES, build
lease.HEARTBEAT, lease.DURATION = 0.2, 2.0
path, out, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def make(staging):
    (out / f"{socket.gethostname()}.building").touch()
    time.sleep(seconds) if seconds >= 0 else ctypes.PyDLL(None).sleep(-seconds)
    build(staging, "key", out)
folder = prepare_once(path, make, key="key", timeout=60)
texts = [(folder / f"{index}.txt").read_text() for index in range(FILES)]
(out / f"{socket.gethostname()}.read").write_text("".join(texts))
"""
EXPECTED = "".join(content("key", index) for index in range(FILES))


class Launch:
    """Hosts that share a folder."""

    def __init__(self, folder: Path) -> None:
        need_hosts()
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()

    def start(self, host: str, seconds: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", JOB, str(self.folder / "data"), str(self.out), str(seconds)]
        return started_on(host, command, self.folder / f"{host}.log")

    def end(self, hosts: dict[str, subprocess.Popen[bytes]]) -> None:
        """All of them end well, with the same files, and nothing is left beside these."""
        for host, process in hosts.items():
            assert process.wait(90) == 0, (self.folder / f"{host}.log").read_text(errors="replace")
        assert {path.stem: path.read_text() for path in self.out.glob("*.read")} == dict.fromkeys(hosts, EXPECTED)
        assert sorted(path.name for path in self.folder.glob(".data*")) == []


@pytest.mark.slow
def test_another_host_builds_once_when_the_building_host_is_lost(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    first = launch.start("first", 30)
    try:
        until((launch.out / "first.building").exists, first, tmp_path / "first.log", 60)
        others = {host: launch.start(host, 0) for host in ("h0", "h1", "h2")}
        time.sleep(3)  # longer than a host may be silent: this one is not
        assert all(other.poll() is None for other in others.values())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait(10)
    launch.end(others)
    assert len(list(launch.out.glob("*.built-*"))) == 1


@pytest.mark.slow
def test_builds_that_hold_the_gil_longer_than_the_lease_finish_on_all_hosts(tmp_path: Path) -> None:
    """One long call that keeps the interpreter's lock, at the same place of each build."""
    launch = Launch(tmp_path)
    launch.end({host: launch.start(host, -4) for host in ("h0", "h1", "h2")})
    assert len(list(launch.out.glob("*.building"))) > 1  # a live builder was taken for dead
