"""Which launch this process belongs to: a name for all processes of a job, another one when it is started anew."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

_LOADED = time.time()
#: Variables that together name a launch of their launcher, on all its hosts.
_NAMES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMIX_NAMESPACE",),
    ("LSB_JOBID", "LSB_JOBINDEX"),
)
#: Variables that tell that a launcher started this process, without saying which launch it was.
_MARKS = ("TORCHELASTIC_RUN_ID", "PMI_RANK", "LOCAL_RANK")


def launch_name(environ: Mapping[str, str] | None = None) -> str:
    """A name for the launch that this process belongs to; empty where nobody says.

    Where the launcher does not name its launches, it is the parent process, which is the launcher on this host.

    Args:
        environ: variables; those of this process if None.

    Examples:
        >>> launch_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        'SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_RESTART_COUNT='
        >>> launch_name({"LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "5000"})  # of Lightning's own
        'MASTER_ADDR=node1 MASTER_PORT=5000 '
        >>> launch_name({"HOME": "/root"})
        ''
    """
    environ = os.environ if environ is None else environ
    restart = environ.get("TORCHELASTIC_RESTART_COUNT")
    for names in _NAMES:
        if environ.get(names[0]) and (names[0] != "SLURM_JOB_ID" or environ.get("SLURM_STEP_ID")):
            if "TORCHELASTIC_RUN_ID" in environ:
                break  # torchrun inside it, which may start its processes anew
            return " ".join(f"{name}={environ.get(name, '')}" for name in names)
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return f"TORCHELASTIC_RUN_ID={run} {restart}"
    if "LOCAL_RANK" in environ and "RANK" not in environ and environ.get("MASTER_PORT"):
        # Lightning, whose rank 0 started the others: their parents differ.
        address = environ.get("MASTER_ADDR", "localhost")
        host = socket.gethostname() if address in ("localhost", "127.0.0.1", "::1") else ""
        return f"MASTER_ADDR={address} MASTER_PORT={environ['MASTER_PORT']} {host}"
    if any(name in environ for name in _MARKS):
        return f"parent {os.getppid()} {started(os.getppid())} {restart}"
    return ""


def born() -> float:
    """When this process was started, in seconds since 1970; where the system does not tell, when it came here."""
    ticks = started(os.getpid())
    if ticks <= 0 or not hasattr(time, "CLOCK_BOOTTIME"):
        return _LOADED
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def started(pid: int) -> int:
    """When a process of this host was started, in clock ticks since the kernel was.

    Returns:
        0 where there is no such process, or only its remains are there; -1 where the system does not tell.
    """
    if not Path("/proc/self/stat").exists():
        return -1
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0
    except OSError:  # ended while it was looked at, or none of our business
        return 0 if not Path(f"/proc/{pid}").exists() else -1
    state, *numbers = told.rpartition(")")[2].split()  # the name in brackets may hold anything
    return 0 if state in "ZX" else int(numbers[18])
