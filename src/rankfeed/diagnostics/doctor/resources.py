"""Findings about waiting times, memory, file handles shared by workers, and the number of CPUs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from rankfeed.diagnostics.doctor.records import RankLog, RunLog
from rankfeed.diagnostics.findings import Finding, finding

#: Bytes that are not worth a finding: of data, and of buffers that are filled while data are read.
_DATA, _BUFFERS = 32 << 20, 64 << 20
#: A first batch is slow from this many seconds, and this multiple of the median.
_SLOW, _TIMES = 5.0, 8
#: Share of the time that the consumer may wait.
_WAITS = 0.2
_MIB = 1 << 20


def handles(run: RunLog) -> Iterator[Finding]:
    """Files that were open before workers were forked, and that they read through the same handle."""
    for rank in run.ranks:
        for moved in rank.moved:
            text = f"{run.job.name}, rank {rank.rank}: {moved.path}, from byte {moved.start} to {moved.end}"
            what = "workers share the position in a file that was opened before they were forked"
            yield finding("handles-before-fork", "error", what, text)


def memory(run: RunLog, without: RunLog | None = None) -> Iterator[Finding]:
    """Memory that grows from epoch to epoch, and data that each worker has, compared with no workers."""
    ranks = without.ranks if without else ()
    first = [epoch.sizes for rank in ranks for epoch in rank.epochs[:1] if epoch.sizes]
    loads = max((max(size.rank for size in sizes) - sizes[0].rank for sizes in first), default=0)
    for rank in run.ranks:
        where = f"{run.job.name}, rank {rank.rank}"
        ends = [epoch.sizes[-1] for epoch in rank.whole if epoch.sizes]
        lasting = set.intersection(*({*end.children} for end in ends)) if ends else set()
        workers = {f"worker process {pid}": [end.children[pid] for end in ends] for pid in sorted(lasting)}
        for process, sizes in {"the rank": [end.rank for end in ends], **workers}.items():
            growth = [later - earlier for earlier, later in pairwise(sizes)]
            # Buffers and caches that are still being filled grow by less, less evenly, or not for long.
            is_even = len(growth) >= 2 and min(growth) > max(growth) / 2
            if is_even and (min(growth) > _DATA / 2 or (len(growth) >= 4 and sum(growth) > _DATA)):
                values = ", ".join(f"{size // _MIB} MiB" for size in sizes)
                text = f"{where}, {process}, after each epoch: {values}"
                yield finding("memory-grows", "warning", "memory grows from epoch to epoch", text)
        if run.job.workers and (text := _copied(rank, run.job.start_method == "fork", loads)):
            yield finding("memory-copied", "warning", "each worker has a copy of the data", f"{where}: {text}")


def _copied(rank: RankLog, forked: bool, loads: int) -> str:
    built = rank.built
    if built is None:
        return ""
    if built.pickled is not None and built.pickled > _DATA:
        return f"{built.pickled // _MIB} MiB are sent to each worker that is started"
    children = [[*sizes.children.values()] for epoch in rank.epochs for sizes in epoch.sizes]
    largest = max((size for sizes in children for size in sizes), default=0)
    if forked and built.bytes > _DATA and largest > max(_DATA, built.bytes / 2):
        return f"the data take {built.bytes // _MIB} MiB, and a forked worker has {largest // _MIB} MiB of its own"
    full = max((sum(size > loads * 0.8 for size in sizes) for sizes in children), default=0)
    if forked and loads > _BUFFERS and full > 1:
        return f"without workers a rank loads {loads // _MIB} MiB; {full} workers each have as much"
    return ""


def times(run: RunLog) -> Iterator[Finding]:
    """A slow first batch, and a consumer that waits."""
    for rank in run.ranks:
        where = f"{run.job.name}, rank {rank.rank}"
        for epoch in rank.whole[:1]:
            first, *rest = [step.waited for step in epoch.steps] or [0.0]
            # A new interpreter imports torch first, which is no fault of the loader.
            spawned = run.job.workers and run.job.start_method != "fork"
            if rest and not spawned and first > max(_SLOW, _TIMES * median(rest)):
                text = f"{where}: {first:.1f} s, then {median(rest):.3g} s a batch"
                yield finding("slow-first-batch", "warning", "the first batch takes long", text)
        work = run.job.step_seconds
        waits = [step.waited for epoch in rank.whole for step in epoch.steps[1:]]
        share = sum(waits) / (sum(waits) + work * len(waits)) if work and waits else 0
        if share > _WAITS:
            text = f"{where}: {share:.0%} of the time, with {work:g} s of work a step"
            yield finding("starved", "warning", "the consumer waits for data", text)


def workers(runs: Sequence[RunLog], cpus: int) -> Iterator[Finding]:
    """More workers than CPUs."""
    for run in runs:
        most = max((built.traits.workers for built in run.built), default=0)
        if most > cpus:
            text = f"{most} workers a rank, and {cpus} CPUs by affinity, cgroup and Slurm"
            yield finding("too-many-workers", "warning", "a rank has more workers than CPUs", text)
        elif most * run.job.ranks > cpus:
            text = f"{run.job.ranks} ranks with {most} workers each, and {cpus} CPUs"
            what = "on this machine the ranks have more workers than CPUs"
            yield finding("too-many-workers", "note", what, text)


def cpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """CPUs that this process may use, at least 1: the least of affinity, cgroup v2 and Slurm."""
    found = [len(os.sched_getaffinity(0))]
    with suppress(KeyError, ValueError):
        found.append(int(environ["SLURM_CPUS_PER_TASK"]))
    with suppress(OSError, ValueError):
        group = (root / "proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        top = root / "sys/fs/cgroup"
        for folder in (top / group.lstrip("/"), *(top / group.lstrip("/")).parents):
            with suppress(OSError, ValueError):  # "max" is no number
                quota, period = map(int, (folder / "cpu.max").read_text().split())
                found.append(-(-quota // period))
    return max(1, min(found))
