"""Identifiers of a job and of its launches: the same on all processes; a launch has a new one after a restart."""

import os
import socket

from rankfeed._util.process_info import process_start_time
from rankfeed.topology.launchers import OUTER

#: Variables of processes that were started by a launcher which does not identify the launch.
_ANONYMOUS = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", *(name for row in OUTER if not row.launch for name in row.rank))

#: Prefixes of identifiers that are unique on one host only: of a job, and of a launch.
ONE_HOST, PARENT = "on ", "parent "


def launch_id() -> str:
    """Identifies the launch of this process, if necessary by the launcher's process; empty without a launcher."""
    environ = os.environ
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ  # inside another launcher too; it restarts processes
    restart = environ.get("TORCHELASTIC_RESTART_COUNT")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    for row in () if by_torchrun else OUTER:
        if row.launch and all(environ.get(names[0]) for names in (row.launch, row.step) if names):
            return " ".join(f"{name}={environ.get(name, '')}" for name in row.launch)
    if by_torchrun and environ["TORCHELASTIC_RUN_ID"] != "none":
        return f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']} {restart}"
    if by_torchrun and address and environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE"):
        # torchrun on several hosts without a run id: each host has its own parent.
        return f"MASTER_ADDR={address} MASTER_PORT={port} {restart}"
    anonymous = any(name in environ for name in _ANONYMOUS)
    # Lightning, whose rank 0 starts the others, so that their parents differ; and RANK without any launcher.
    by_lightning = "LOCAL_RANK" in environ and "RANK" not in environ
    if port and (by_lightning or ("RANK" in environ and not anonymous)):
        address = environ.get("MASTER_ADDR", "localhost")
        host = socket.gethostname() if address in ("localhost", "127.0.0.1", "::1") else ""
        return f"MASTER_ADDR={address} MASTER_PORT={port} {host}"
    if anonymous:
        return f"{PARENT}{os.getppid()} {process_start_time(os.getppid())} {restart}"
    return ""


def job_id() -> str:
    """Distinguishes the job of this process from others that run at the same time; empty if nothing does."""
    environ, launch = os.environ, launch_id()
    if not launch.startswith(PARENT):
        return launch
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return f"{ONE_HOST}{socket.gethostname()} {launch}"


def is_same_job(one: str, other: str) -> bool | None:
    """Whether two job ids are of one job; None if they do not say."""
    if not one or not other:
        return None
    hosts = [job.split(" ")[1] if job.startswith(ONE_HOST) else "" for job in (one, other)]
    return one == other if hosts[0] == hosts[1] else None
