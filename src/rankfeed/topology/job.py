"""Identifiers of a launch: the same on all processes of a job, another one after a restart."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from rankfeed._util.process_info import process_start_time

#: Variables that together identify a launch of their launcher, on all its hosts.
_LAUNCH_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMIX_NAMESPACE",),
    ("LSB_JOBID", "LSB_JOBINDEX"),
)
#: Variables of launchers that do not identify the launch.
_ANONYMOUS = ("TORCHELASTIC_RUN_ID", "PMI_RANK", "MV2_COMM_WORLD_RANK", "LOCAL_RANK")

#: Prefixes of identifiers that are unique on one host only: of a job, and of a launch.
ONE_HOST, PARENT = "on ", "parent "


def launch_id(environ: Mapping[str, str] | None = None) -> str:
    """Identifies the launch that this process belongs to; empty without a launcher.

    If the launcher does not identify its launches, the parent process does, which is the launcher on this host.

    Examples:
        >>> launch_id({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        'SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_RESTART_COUNT='
        >>> launch_id({"LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "5000"})  # Lightning's own
        'MASTER_ADDR=node1 MASTER_PORT=5000 '
        >>> agent = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "0"}
        >>> launch_id({**agent, "WORLD_SIZE": "16", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
        'MASTER_ADDR=node1 MASTER_PORT=29500 0'
        >>> launch_id({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"})
        'MASTER_ADDR=job-master-0 MASTER_PORT=23456 '
        >>> launch_id({"HOME": "/root"})
        ''
    """
    environ = os.environ if environ is None else environ
    restart = environ.get("TORCHELASTIC_RESTART_COUNT")
    for names in _LAUNCH_VARIABLES:
        if environ.get(names[0]) and (names[0] != "SLURM_JOB_ID" or environ.get("SLURM_STEP_ID")):
            if "TORCHELASTIC_RUN_ID" in environ:
                break  # torchrun inside it, which may restart its processes
            return " ".join(f"{name}={environ.get(name, '')}" for name in names)
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return f"TORCHELASTIC_RUN_ID={run} {restart}"
    if (
        "TORCHELASTIC_RUN_ID" in environ
        and environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")
        and environ.get("MASTER_ADDR")
    ):
        # torchrun on several hosts without a run id: each host has its own parent.
        return f"MASTER_ADDR={environ['MASTER_ADDR']} MASTER_PORT={environ.get('MASTER_PORT', '')} {restart}"
    anonymous = any(name in environ for name in _ANONYMOUS)
    # Lightning, whose rank 0 starts the others, so that their parents differ; and RANK without any launcher.
    by_lightning = "LOCAL_RANK" in environ and "RANK" not in environ
    if environ.get("MASTER_PORT") and (by_lightning or ("RANK" in environ and not anonymous)):
        address = environ.get("MASTER_ADDR", "localhost")
        host = socket.gethostname() if address in ("localhost", "127.0.0.1", "::1") else ""
        return f"MASTER_ADDR={address} MASTER_PORT={environ['MASTER_PORT']} {host}"
    if anonymous:
        return f"{PARENT}{os.getppid()} {process_start_time(os.getppid())} {restart}"
    return ""


def job_id(environ: Mapping[str, str] | None = None) -> str:
    """Tells the job of this process from others that run at the same time; empty if nothing does.

    Examples:
        >>> job_id({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        'SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_RESTART_COUNT='
        >>> job_id({"PMI_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
        'node1:29500'
        >>> job_id({})
        ''
    """
    environ = os.environ if environ is None else environ
    launch = launch_id(environ)
    if not launch.startswith(PARENT):
        return launch
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return f"{ONE_HOST}{socket.gethostname()} {launch}"


def is_same_job(one: str, other: str) -> bool | None:
    """Whether two job ids are of one job; None if they do not say.

    Examples:
        >>> is_same_job("a:1", "a:1"), is_same_job("a:1", "a:2"), is_same_job("a:1", "")
        (True, False, None)
        >>> is_same_job("on host1 parent 5", "on host2 parent 5") is None  # a parent process on each host
        True
    """
    if not one or not other:
        return None
    hosts = [job.split(" ")[1] if job.startswith(ONE_HOST) else "" for job in (one, other)]
    return one == other if hosts[0] == hosts[1] else None
