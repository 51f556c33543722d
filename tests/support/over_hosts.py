"""A launch over two hosts by each launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.environ import of_no_launcher
from tests.support.launchers import MPICH, OPENMPI, TORCHRUN
from tests.support.network import Network

ROOT = Path(__file__).parents[2]


def commands(launcher: str, net: Network, script: Sequence[str]) -> list[list[str]]:
    """What starts a script, with its arguments, on two ranks of each of two hosts."""
    job = [sys.executable, *script]
    if launcher == "srun":
        return [net.hub.command(["srun", "-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=0", "--wait=0", *job])]
    if launcher == "openmpi":
        place = ["--mca", "plm_rsh_agent", str(net.shell()), "--host", "h1:2,h2:2", "-x", "PYTHONPATH"]
        return [net.hub.command([*OPENMPI, *place, *job])]
    if launcher == "mpich":
        place = ["-launcher", "ssh", "-launcher-exec", str(net.shell()), "-hosts", "h1,h2", "-ppn", "2", "-n", "4"]
        return [net.hub.command([*MPICH, *place, *job])]
    meet = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={net.hosts[0].address}", "--master-port=29500"]
    return [
        host.command([*TORCHRUN, *meet, f"--node-rank={node}", *job[1:]]) for node, host in enumerate(net.hosts)
    ]


@contextmanager
def launched(
    launcher: str, net: Network, environ: dict[str, str], log: Path, script: Sequence[str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A launch under way; what is left of it on the hosts at the end is killed."""
    environ = of_no_launcher(environ) | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as out:
        jobs = [
            subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            for command in commands(launcher, net, script)
        ]
    try:
        yield jobs
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait(10)
        if launcher != "srun":  # whose daemons stay, and end what is left
            for process in [process for host in net.hosts for process in host.processes()]:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def end(jobs: list[subprocess.Popen[bytes]], log: Path, timeout: float = 60) -> None:
    """Wait for the end of a launch, which has to come, and well."""
    for job in jobs:
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs\n{log.read_text(errors='replace')}") from None
        assert status == 0, log.read_text(errors="replace")
