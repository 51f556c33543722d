"""How a loader's processes behave: whether they fail, how long they take, and what memory and files they hold."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from rankfeed.diagnostics.doctor.findings import Finding, Severity
from rankfeed.diagnostics.doctor.observed import IDS, IMPORT, STATE, Sizes
from rankfeed.diagnostics.doctor.seen import ProbeSeen, RankSeen
from rankfeed.errors import listed

#: Memory below this is no matter.
_LARGE = 32 << 20
#: What is loaded while data are read may be buffers, up to this.
_LOADED = 64 << 20
#: Seconds for a first batch, and times the usual: more is slow.
_SLOW, _TIMES = 5.0, 8
#: Share of the time that the consumer may wait.
_WAITS = 0.2
_MIB = 1 << 20


def failures(probe: ProbeSeen, *, others_succeed: bool, elsewhere: bool = False) -> Iterator[Finding]:
    """Ranks that did not come to their end.

    Args:
        probe: theirs.
        others_succeed: whether the loader does with another start method.
        elsewhere: whether it goes on from a state of another number of ranks.
    """
    for rank in probe.ranks:
        failure = rank.failure
        if failure is None or not failure.root:
            continue
        where = f"{probe.job.name}, rank {rank.rank}, {failure.phase}: {failure.detail}"
        evidence = (where, *(f"| {line}" for line in failure.output))
        killed = failure.kind == "died" or re.search(
            r"DataLoader worker.*(exited unexpectedly|killed by signal)", failure.detail
        )
        if killed:
            what = "a worker process died" if failure.kind == "raised" else "a rank's process died"
            yield Finding("process-died", "error", what, evidence)
        elif failure.phase == IDS:
            yield Finding("no-ids", "error", "batches have no ids where they should be", evidence)
        elif failure.phase == STATE and elsewhere:
            what = "the loader refuses the state of another number of ranks"
            yield Finding("factory-raises", "note", what, evidence)
        elif failure.kind == "hangs":
            yield Finding("hangs", "error", f"nothing comes any more, {failure.phase}", evidence)
        else:
            alone = f", with the {probe.job.start_method} start method alone" if others_succeed else ""
            raised = "cannot be imported" if failure.phase == IMPORT else "or its loader raises an error"
            what = f"the factory {raised}{alone}"
            yield Finding("factory-raises", "warning" if others_succeed else "error", what, evidence)


def endings(probe: ProbeSeen) -> Iterator[Finding]:
    """Epochs without a batch, and without an end."""
    for each in probe.epochs:
        if not any(epoch.steps for epoch in each):
            epoch = each[0].epoch
            again = " though the first had some: it can be read once only" if epoch else ""
            evidence = (f"{probe.job.name}, epoch {epoch}: no rank was given a batch{again}",)
            yield Finding("yields-nothing", "error", "the loader yields no batches", evidence)
            break
        empty = [str(rank) for rank, epoch in enumerate(each) if not epoch.steps]
        if empty:
            evidence = (f"{probe.job.name}, epoch {each[0].epoch}: no batch for rank {listed(empty)}",)
            yield Finding("yields-nothing", "error", "some ranks are given no batches", evidence)
    cut = [rank for rank in probe.ranks if any(epoch.cut for epoch in rank.epochs)]
    for rank in cut[:1]:
        steps = len(rank.epochs[-1].steps)
        length = rank.built.length if rank.built is not None else None
        where = f"{probe.job.name}, rank {rank.rank}: {steps} steps and no end"
        if length is not None and length > steps:
            what = "an epoch is longer than what was read of it: what is missing is not known"
            yield Finding("never-ends", "note", what, (f"{where}, of {length}",))
        else:
            yield Finding("never-ends", "error", "an epoch has no end, as far as it was read", (where,))


def differences(probe: ProbeSeen) -> Iterator[Finding]:
    """Ranks that cut different data sets, or know samples by different ids."""
    kinds = kinds_of_ids(probe)
    if len({*kinds.values()}) > 1:
        told = ", ".join(f"rank {rank}: {kind}" for rank, kind in kinds.items())
        evidence = (f"{probe.job.name}: what samples are known by: {told}",)
        yield Finding("differs-between-ranks", "error", "ranks have batches of different kinds", evidence)
    built = [(rank.rank, rank.built) for rank in probe.ranks if rank.built is not None]
    cutting = [(rank, each) for rank, each in built if each.cuts_one_data_set or each.elastic]
    for name, values in (
        ("samples", {rank: each.samples for rank, each in cutting}),
        ("fingerprint", {rank: each.fingerprint for rank, each in cutting}),
    ):
        if len({*values.values()}) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            evidence = (f"{probe.job.name}: {name} of the data set: {told}",)
            yield Finding("differs-between-ranks", "error", "ranks read different data sets", evidence)
            return


def kinds_of_ids(probe: ProbeSeen) -> dict[int, str]:
    """What the samples of each rank are known by, of ranks that were given any."""
    first = {rank.rank: step for rank in probe.ranks for epoch in rank.epochs[:1] for step in epoch.steps[:1]}
    return {
        rank: "their content" if step.by_content else "numbers" if isinstance(step.keys[0], int) else "names"
        for rank, step in first.items()
        if step.keys
    }


def handles(probe: ProbeSeen) -> Iterator[Finding]:
    """Files that workers read through a handle of before they were forked."""
    for rank in probe.ranks:
        for moved in rank.moved:
            evidence = (
                f"{probe.job.name}, rank {rank.rank}: {moved.path}, from byte {moved.start} to {moved.end}",
            )
            what = "workers share the position in a file that was opened before they were forked"
            yield Finding("handles-before-fork", "error", what, evidence)


def memory(probe: ProbeSeen, without: ProbeSeen | None = None) -> Iterator[Finding]:
    """Memory that grows, and data that each worker has for itself.

    Args:
        probe: whose ranks are looked at.
        without: the same without workers, if there is such a probe.
    """
    loads = 0 if without is None else max((_loaded(rank) for rank in without.ranks), default=0)
    for rank in probe.ranks:
        yield from _grows(probe, rank)
        yield from _copied(probe, rank, loads)


def _loaded(rank: RankSeen) -> int:
    """Bytes by which a rank without workers grew in its first epoch."""
    sizes = [sizes.rank for epoch in rank.epochs[:1] for sizes in epoch.sizes]
    return max(sizes) - sizes[0] if sizes else 0


def _grows(probe: ProbeSeen, rank: RankSeen) -> Iterator[Finding]:
    """At the end of each epoch more than at the end of the one before, from the first on by about as much."""
    rank_bytes = [epoch.sizes[-1].rank for epoch in rank.whole if epoch.sizes]
    each_child = [epoch.sizes[-1].children for epoch in rank.whole if epoch.sizes]
    lasting = set.intersection(*({*children} for children in each_child)) if each_child else set()
    sizes = {"the rank": rank_bytes} | {
        f"worker process {pid}": [children[pid] for children in each_child] for pid in sorted(lasting)
    }
    for who, values in sizes.items():
        steps = [later - earlier for earlier, later in pairwise(values)]
        if len(steps) >= 2 and min(steps) > 0 and sum(steps) > _LARGE and min(steps) > max(steps) / 4:
            told = ", ".join(f"{value // _MIB} MiB" for value in values)
            evidence = (f"{probe.job.name}, rank {rank.rank}, {who}, after each epoch: {told}",)
            yield Finding("memory-grows", "warning", "memory grows from epoch to epoch", evidence)


def _copied(probe: ProbeSeen, rank: RankSeen, loads: int) -> Iterator[Finding]:
    built = rank.built
    if built is None or not probe.job.workers:
        return
    where = f"{probe.job.name}, rank {rank.rank}: "
    what = "each worker has a copy of the data in memory"
    if built.pickled is not None and built.pickled > _LARGE:
        text = f"{built.pickled // _MIB} MiB are sent to each worker that is started"
        yield Finding("memory-copied", "warning", what, (where + text,))
        return
    children = [size for sizes in _all(rank) for size in sizes.children.values()]
    forked = probe.job.start_method == "fork"
    if forked and built.bytes > _LARGE and children and max(children) > max(_LARGE, built.bytes / 2):
        text = (
            f"the data take {built.bytes // _MIB} MiB, and a forked worker has {max(children) // _MIB} for itself"
        )
        yield Finding("memory-copied", "warning", what, (where + text,))
    elif forked and loads > _LOADED:
        full = max(
            (sum(size > loads * 0.8 for size in sizes.children.values()) for sizes in _all(rank)), default=0
        )
        if full > 1:
            text = (
                f"without workers it loads {loads // _MIB} MiB while it is read; {full} workers each have as much"
            )
            yield Finding("memory-copied", "warning", what, (where + text,))


def _all(rank: RankSeen) -> list[Sizes]:
    return [sizes for epoch in rank.epochs for sizes in epoch.sizes]


def times(probe: ProbeSeen) -> Iterator[Finding]:
    """A first batch that takes long, and a consumer that waits."""
    for rank in probe.ranks:
        for epoch in rank.whole[:1]:
            waits = [step.waited for step in epoch.steps]
            if len(waits) > 1 and waits[0] > max(_SLOW, _TIMES * median(waits[1:])):
                text = (
                    f"{probe.job.name}, rank {rank.rank}: {waits[0]:.1f} s, then {median(waits[1:]):.3g} s a batch"
                )
                # New interpreters that import torch again are slow to start; on a busy machine, very.
                begun_anew = probe.job.workers > 0 and probe.job.start_method != "fork"
                severity: Severity = "note" if begun_anew else "warning"
                yield Finding("slow-first-batch", severity, "the first batch takes long", (text,))
        work = probe.job.step_seconds
        waits = [step.waited for epoch in rank.whole for step in epoch.steps[1:]]
        if work and waits:
            share = sum(waits) / (sum(waits) + work * len(waits))
            if share > _WAITS:
                text = (
                    f"{probe.job.name}, rank {rank.rank}: {share:.0%} of the time, with {work:g} s of work a step"
                )
                yield Finding("starved", "warning", "the consumer waits for data", (text,))


def workers(probes: Sequence[ProbeSeen], cpus: int) -> Iterator[Finding]:
    """More workers than CPUs."""
    for probe in probes:
        said = [rank.built.workers or 0 for rank in probe.ranks if rank.built is not None]
        most = max(said, default=0)
        if most > cpus:
            evidence = (f"{most} workers a rank, and {cpus} CPUs by affinity, cgroup and Slurm",)
            yield Finding("too-many-workers", "warning", "a rank has more workers than CPUs", evidence)
            return
        if most * probe.job.ranks > cpus:
            evidence = (f"{probe.job.ranks} ranks with {most} workers each, and {cpus} CPUs",)
            yield Finding(
                "too-many-workers", "note", "on this machine the ranks have more workers than CPUs", evidence
            )
            return
