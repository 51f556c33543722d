"""A real Slurm on one machine, as root: a controller and nodes n1, n2, ... with ports and folder of their own.

On the hosts of a network, if there is one: then srun has to be called on its hub.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.support.network import Network

# What keeps a machine without cgroups, accounting or a second host content.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
TmpFS={root}/tmp.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
"""


@contextlib.contextmanager
def slurm(
    nodes: int = 2, cpus: int = 4, patience: float = 30, net: Network | None = None
) -> Iterator[dict[str, str]]:
    """Start Slurm and give the environment in which srun, sbatch and salloc talk to it; leave nothing behind."""
    # munge's socket needs a short path.
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ["SLURM_CONF"] = str(root / "slurm.conf")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(root, nodes, cpus, net)
        on_hub = [] if net is None else net.hub.command([])
        on_host = [[]] * nodes if net is None else [host.command([]) for host in net.hosts]
        munge = [f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        for name, command in (
            ("munged", ["munged", "--foreground", "--force", f"--socket={root}/munge.sock", *munge]),
            ("slurmctld", [*on_hub, "slurmctld", "-D", "-c"]),
            *(("slurmd", [*on_host[node - 1], "slurmd", "-D", "-N", f"n{node}"]) for node in range(1, nodes + 1)),
        ):
            with (root / f"{name}.{len(daemons)}.out").open("wb") as out:
                pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                daemons.append(subprocess.Popen(command, env=environ, start_new_session=True, **pipes))
            if name == "munged":
                _until(lambda: (root / "munge.sock").exists(), patience, root)
        _until(lambda: _idle(environ, on_hub) == nodes, patience, root)
        yield environ
    finally:
        _end(daemons, environ["SLURM_CONF"])
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path, nodes: int, cpus: int, net: Network | None) -> None:
    (root / "state").mkdir()
    (root / "munge.key").write_bytes(os.urandom(1024))
    (root / "munge.key").chmod(0o400)
    host, address = socket.gethostname().split(".")[0], "127.0.0.1"
    port, *ports = _free_ports(nodes + 1)
    places = [(host, address)] * nodes
    if net is not None:
        host, address = net.hub.name, net.hub.address
        places = [(each.name, each.address) for each in net.hosts]
    lines = [CONFIG.format(host=host, address=address, port=port, root=root)]
    for node, (its_port, (host, address)) in enumerate(zip(ports, places, strict=True), 1):
        (root / f"spool.n{node}").mkdir()
        (root / f"tmp.n{node}").mkdir()  # PMIx makes a folder named after the step in it, on each node
        lines.append(f"NodeName=n{node} NodeHostname={host} NodeAddr={address} Port={its_port} CPUs={cpus}\n")
    lines.append(f"PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP\n")
    (root / "slurm.conf").write_text("".join(lines))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _idle(environ: dict[str, str], on_hub: list[str]) -> int:
    done = subprocess.run(
        [*on_hub, "sinfo", "-h", "-N", "-o", "%T"], env=environ, capture_output=True, text=True, timeout=600
    )
    return done.stdout.split().count("idle")


def _until(happened, patience: float, root: Path) -> None:
    end = time.monotonic() + patience
    while not happened():
        if time.monotonic() > end:
            logs = sorted((*root.glob("*.log"), *root.glob("*.out")))
            ends = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs]
            raise RuntimeError("Slurm does not start\n" + "\n".join(ends))
        time.sleep(0.1)


def _end(daemons: list["subprocess.Popen[bytes]"], conf: str) -> None:
    """End the daemons, then whatever else runs with this configuration (a step's keeper outlives its daemon)."""
    for daemon in reversed(daemons):
        daemon.send_signal(signal.SIGTERM)
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
    ours = [daemon.pid for daemon in daemons if daemon.poll() is None]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == conf:
                ours.append(process.pid)
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in daemons:
        daemon.wait()
