"""Findings that need no keys: failures, steps, ends of epochs, differences between ranks."""

import re
from collections.abc import Iterator, Sequence

from rankfeed.diagnostics.doctor.findings import Finding, Severity
from rankfeed.diagnostics.doctor.logs import RankLog, RunLog
from rankfeed.diagnostics.doctor.records import IDS, IMPORT, STATE
from rankfeed.errors import listed


def all_failures(
    runs: Sequence[RunLog], controls: Sequence[RunLog], resumed: Sequence[RunLog]
) -> Iterator[Finding]:
    """Ranks that failed; what the requested configuration does not show is not the loader's disease."""
    working = [run for run in runs if run.ok]
    for run in runs:
        same = [each for each in working if each.job.ranks == run.job.ranks]
        if same and run.job.start_method not in {each.job.start_method for each in same}:
            yield from _failures(run, "warning", f", with the {run.job.start_method} start method only")
        elif runs[0].ok and run.job.ranks != runs[0].job.ranks and _raised(run):
            yield from _failures(run, "unproven", f", with {run.job.ranks} ranks only")
        else:
            yield from _failures(run)
    for run in resumed:
        elsewhere = run.job.ranks != runs[0].job.ranks
        yield from _failures(run, "note" if elsewhere and _raised(run, STATE) else "error")
    if runs[0].ok or not any(run.ranks[0].epochs for run in runs):
        for run in controls[:1] if working else ():
            yield from _failures(run, "unproven", ", with one rank only")


def _raised(run: RunLog, phase: str | None = None) -> bool:
    root = [rank.failure for rank in run.ranks if rank.failure is not None and rank.failure.root]
    return bool(root) and all(each.kind == "raised" and phase in (None, each.phase) for each in root)


def _failures(run: RunLog, severity: Severity = "error", only: str = "") -> Iterator[Finding]:
    for rank in run.ranks:
        failure = rank.failure
        if failure is None or not failure.root:
            continue
        where = f"{run.job.name}, rank {rank.rank}, {failure.phase}: {failure.detail}"
        evidence = (where, *(f"| {line}" for line in failure.output))
        worker_died = re.search(r"DataLoader worker.*(exited unexpectedly|killed by signal)", failure.detail)
        if failure.kind == "died" or worker_died:
            what = "a worker process died" if failure.kind == "raised" else "a rank died"
            yield Finding("process-died", severity, f"{what}{only}", evidence)
        elif failure.phase == IDS:
            unproven = "unproven" if severity == "error" else severity
            yield Finding("no-ids", unproven, "batches do not have the declared ids", evidence)
        elif failure.kind == "hangs":
            yield Finding("hangs", severity, f"the loader hangs, {failure.phase}{only}", evidence)
        else:
            raised = "cannot be imported" if failure.phase == IMPORT else "or its loader raises an error"
            yield Finding("factory-raises", severity, f"the factory {raised}{only}", evidence)


def endings(run: RunLog) -> Iterator[Finding]:
    """Epochs without a batch, unequal steps, and epochs that were cut (rules 1 and 16)."""
    for each in run.epochs:
        where = f"{run.job.name}, epoch {each[0].epoch}"
        steps = [len(epoch.steps) for epoch in each]
        if not any(steps):
            again = ", although the first had some: it can be read only once" if each[0].epoch else ""
            yield Finding(
                "yields-nothing",
                "error",
                "the loader yields no batches",
                (f"{where}: no rank has a batch{again}",),
            )
            break
        if not all(steps):
            empty = listed([str(rank) for rank, count in enumerate(steps) if not count])
            text = f"{where}: no batch for rank {empty}"
            yield Finding("yields-nothing", "error", "some ranks have no batches", (text,))
        elif len({*steps}) > 1:
            least = min(steps)
            first = listed([str(rank) for rank, count in enumerate(steps) if count == least])
            counts = ", ".join(f"rank {rank} takes {count}" for rank, count in enumerate(steps[:16]))
            text = f"{where}: {counts}; a collective in step {least} (from 0) waits forever for rank {first}"
            what = "ranks take different numbers of steps: a collective would hang"
            yield Finding("uneven-steps", "error", what, (text,))
    for rank in run.ranks:
        cut = [epoch for epoch in rank.epochs if epoch.cut]
        if cut:
            length = rank.built.length if rank.built is not None else None
            of = f" of {length}" if length is not None else ""
            text = f"{run.job.name}, rank {rank.rank}: cut after {len(cut[0].steps)} steps{of}"
            yield Finding("never-ends", "unproven", "the epoch was not read to its end", (text,))
            break


def differences(run: RunLog) -> Iterator[Finding]:
    """Ranks that shard different datasets, or identify samples by different kinds of ids."""
    kinds = {rank: kind for rank, each in enumerate(run.ranks) if (kind := _kind_of_ids(each))}
    if len({*kinds.values()}) > 1:
        text = ", ".join(f"rank {rank}: {kind}" for rank, kind in kinds.items())
        evidence = (f"{run.job.name}: ids are {text}",)
        yield Finding("differs-between-ranks", "error", "ranks have batches of different kinds", evidence)
    cutting = [(rank.rank, rank.built) for rank in run.ranks if rank.built is not None]
    cutting = [(rank, each) for rank, each in cutting if each.cuts_one_dataset or each.elastic]
    for name, values in (
        ("samples", {rank: each.samples for rank, each in cutting}),
        ("fingerprint", {rank: each.fingerprint for rank, each in cutting}),
    ):
        if len({*values.values()}) > 1:
            text = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            evidence = (f"{run.job.name}: {name} of the dataset: {text}",)
            yield Finding("differs-between-ranks", "error", "ranks read different datasets", evidence)
            return


def _kind_of_ids(rank: RankLog) -> str | None:
    first = next((step for epoch in rank.epochs for step in epoch.steps if step.rows != 0), None)
    if first is None or first.ids == []:
        return None
    return "missing" if first.ids is None else "numbers" if isinstance(first.ids[0], int) else "text"
