"""Processes of this host, their CPUs and memory, from the kernel; other systems give the documented fallback."""

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_IMPORTED = time.monotonic()


def process_start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if there is none (or a zombie), -1 if it is hidden."""
    if not Path("/proc/self/stat").exists():
        return -1
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # there is none, it ended meanwhile, or it is hidden
        return -1 if _exists(pid) else 0
    state, *numbers = status.rpartition(")")[2].split()  # the name in brackets may hold anything
    return 0 if state in "ZX" else int(numbers[18])


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, as by SIGSTOP; False if the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def process_age() -> float:
    """Seconds since this process started; since this module was imported if the system does not say."""
    ticks = process_start_time(os.getpid())
    if ticks <= 0 or not hasattr(time, "CLOCK_BOOTTIME"):
        return time.monotonic() - _IMPORTED
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@cache
def boot_id() -> str:
    """Identifies this boot of the host; empty if the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> int:
    """Number of the pid namespace of this process; 0 if the system does not say."""
    with suppress(OSError, ValueError):
        if int(os.readlink("/proc/self")) == os.getpid():  # else /proc belongs to another namespace
            return os.stat("/proc/self/ns/pid").st_ino
    return 0


def pid_namespace_id() -> str:
    """Identifies boot and pid namespace, so that one pid is one process; empty if unknown."""
    boot, namespace = boot_id(), pid_namespace()
    return f"{boot}/{namespace}" if boot and namespace else ""


def cpus_per_process(processes: int) -> int:
    """CPUs for this process: those that it is bound to, else its share among some processes of this host."""
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return usable if usable < total else total // processes


def _exists(pid: int) -> bool:
    """Whether there is a process that /proc hides from this user (``hidepid``)."""
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True


def private_bytes() -> int:
    """Resident memory of this process without file-backed and shared pages, in bytes; 0 where it is unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_bytes().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
