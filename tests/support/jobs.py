"""Starting jobs of several processes, and ending them for certain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
# A process that dies of a signal says where: pytest switches that on for itself alone.
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_python(code: str, *arguments: object, given: str = "", **environ: str) -> str:
    """What a Python program prints that has to succeed, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environ,
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def torchrun(ranks: int, script: Path, *arguments: object) -> list[str]:
    """The command that starts a script on that many ranks of this machine."""
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *place]
    return [*launcher, str(script), *map(str, arguments)]


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


@contextmanager
def started(
    command: Sequence[str], log: Path, environ: Mapping[str, str] = ENVIRON
) -> Iterator[subprocess.Popen[bytes]]:
    """A job under way, without input; whatever of it is left at the end is killed."""
    with log.open("wb") as out:
        options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        job = subprocess.Popen(command, **options, env=environ, start_new_session=True)
    try:
        yield job
    finally:
        end(family(job.pid))
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(10)


def run(command: Sequence[str], log: Path, timeout: float) -> None:
    """Run a job to its end. A job that fails or hangs fails the test, and shows what it said."""
    with started(command, log) as job:
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{log.read_text()[-6000:]}") from None
    assert code == 0, f"exit status {code}:\n{log.read_text()[-6000:]}"


def until(
    condition: Callable[[], object],
    job: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    timeout: float = 100,
) -> None:
    """Wait for a condition; a job that ends before fails the test, and shows what it said."""
    deadline = time.monotonic() + timeout
    while not condition():
        if (job is not None and job.poll() not in (None, 0)) or time.monotonic() > deadline:
            output = "" if log is None else log.read_text(errors="replace")[-6000:]
            raise AssertionError(f"nothing after {timeout} s, or the job ended early\n{output}")
        time.sleep(0.02)
