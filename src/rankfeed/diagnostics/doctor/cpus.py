"""How many CPUs this process may use: what the machine has is more than what a job is given."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def cpus(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """The least of what affinity, cgroups (both versions) and Slurm say, at least 1.

    Args:
        environ: variables; those of this process if None.
        root: of the file system.

    Examples:
        >>> cpus({"SLURM_CPUS_PER_TASK": "1"})
        1
    """
    environ = os.environ if environ is None else environ
    found = [len(os.sched_getaffinity(0)), *_quotas(root)]
    with suppress(KeyError, ValueError):
        found.append(int(environ["SLURM_CPUS_PER_TASK"]))
    return max(1, min(found))


def _quotas(root: Path) -> list[int]:
    """CPUs of this process's control group and of those above it."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = (line + "::").split(":")[:3]
            top = root / "sys/fs/cgroup" / ("cpu" if "cpu" in controllers.split(",") else "")
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = top / name.lstrip("/")
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):
                    found.append(_quota(folder))
                if folder == top:
                    break
    return [-(-quota // period) for quota, period in found if quota > 0 < period]


def _quota(folder: Path) -> tuple[int, int]:
    """Microseconds of CPU time in each period; -1 for no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
        return -1 if quota == "max" else int(quota), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
