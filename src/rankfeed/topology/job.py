"""Which launch this process belongs to: a name for all processes of a job, another one when it is started anew."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOADED = time.monotonic()
#: Variables that together name a launch of their launcher, on all its hosts.
_NAMES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMIX_NAMESPACE",),
    ("LSB_JOBID", "LSB_JOBINDEX"),
)
#: Variables that tell that a launcher started this process, without saying which launch it was.
_MARKS = ("TORCHELASTIC_RUN_ID", "PMI_RANK", "MV2_COMM_WORLD_RANK", "LOCAL_RANK")

#: A mark, and the name of a launch, that say something on one host alone begin so.
HERE, PARENT = "on ", "parent "


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
        >>> agent = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "0"}
        >>> launch_name({**agent, "WORLD_SIZE": "16", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
        'MASTER_ADDR=node1 MASTER_PORT=29500 0'
        >>> launch_name({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"})
        'MASTER_ADDR=job-master-0 MASTER_PORT=23456 '
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
    if (
        "TORCHELASTIC_RUN_ID" in environ
        and environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")
        and environ.get("MASTER_ADDR")
    ):
        # torchrun on several hosts without a name for the job: there is a parent on each.
        return f"MASTER_ADDR={environ['MASTER_ADDR']} MASTER_PORT={environ.get('MASTER_PORT', '')} {restart}"
    marked = any(name in environ for name in _MARKS)
    # Lightning, whose rank 0 started the others, so that their parents differ; and who is told no more than this.
    by_lightning = "LOCAL_RANK" in environ and "RANK" not in environ
    if environ.get("MASTER_PORT") and (by_lightning or ("RANK" in environ and not marked)):
        address = environ.get("MASTER_ADDR", "localhost")
        host = socket.gethostname() if address in ("localhost", "127.0.0.1", "::1") else ""
        return f"MASTER_ADDR={address} MASTER_PORT={environ['MASTER_PORT']} {host}"
    if marked:
        return f"{PARENT}{os.getppid()} {started(os.getppid())} {restart}"
    return ""


def job_mark(environ: Mapping[str, str] | None = None) -> str:
    """What tells the job of this process from others that run at the same time; empty where nothing does.

    Examples:
        >>> job_mark({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        'SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_RESTART_COUNT='
        >>> job_mark({"PMI_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
        'node1:29500'
        >>> job_mark({})
        ''
    """
    environ = os.environ if environ is None else environ
    name = launch_name(environ)
    if not name.startswith(PARENT):
        return name
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return f"{HERE}{socket.gethostname()} {name}"


def age() -> float:
    """Seconds since this process was started; where the system does not tell, since it came here."""
    ticks = started(os.getpid())
    if ticks <= 0 or not hasattr(time, "CLOCK_BOOTTIME"):
        return time.monotonic() - _LOADED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def started(pid: int) -> int:
    """When a process of this host was started, in clock ticks since the kernel was.

    Returns:
        0 where there is no such process, or only its remains are there; -1 where the system does not tell, as of
        other users' processes on many clusters.
    """
    if not Path("/proc/self/stat").exists():
        return -1
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return -1 if _is_there(pid) else 0
    except OSError:  # ended while it was looked at, or none of our business
        return 0 if not Path(f"/proc/{pid}").exists() else -1
    state, *numbers = told.rpartition(")")[2].split()  # the name in brackets may hold anything
    return 0 if state in "ZX" else int(numbers[18])


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, as by SIGSTOP; False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


@cache
def boot() -> str:
    """Name of this start of the kernel; empty where the system does not tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_space() -> int:
    """Number of the namespace in which processes have their numbers here; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        if int(os.readlink("/proc/self")) == os.getpid():  # else /proc tells of other processes than ours
            return os.stat("/proc/self/ns/pid").st_ino
    return 0


def numbering() -> str:
    """Name of what gives processes their numbers here, so that one number is one process; empty if unknown."""
    kernel, space = boot(), pid_space()
    return f"{kernel}/{space}" if kernel and space else ""


def _is_there(pid: int) -> bool:
    """Whether there is a process that /proc keeps from this user (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
