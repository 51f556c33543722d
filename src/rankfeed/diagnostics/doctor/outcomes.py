"""Findings about failures, wrong lengths, dropped or changed samples, and what a resumed run delivers."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, product
from operator import ne

from rankfeed.diagnostics.batch_columns import LOCAL
from rankfeed.diagnostics.doctor.kinds import Kind
from rankfeed.diagnostics.doctor.pairs import ROWS_APART
from rankfeed.diagnostics.doctor.records import CollatedAlone, Phase, RowKey, RunLog, indices_of, remove_padding
from rankfeed.diagnostics.findings import Finding, Severity, finding
from rankfeed.errors import listed

#: Combinations of fields that are compared.
_CHOICES = 64


def failures(runs: Sequence[RunLog], controls: Sequence[RunLog], resumed: Sequence[RunLog]) -> Iterator[Finding]:
    """Ranks that failed; what the requested configuration does not show is not the loader's disease."""
    working = [run for run in runs if run.ok]
    for run in runs:
        same = [other for other in working if other.job.ranks == run.job.ranks]
        if same and run.job.start_method not in {other.job.start_method for other in same}:
            # Workers that raise later on disturb each other; a start method that does not work raises at once.
            later = _raised(run) and any(True for _ in run.steps)
            only = f", with the {run.job.start_method} start method only"
            yield from _failures(run, "unproven" if later else "warning", only)
        elif runs[0].ok and (run.job.ranks, run.job.nodes) != (runs[0].job.ranks, 1) and _raised(run):
            only = f", with {run.job.ranks} ranks on {run.job.nodes} nodes only (see --other-ranks)"
            yield from _failures(run, "unproven", only)
        else:
            yield from _failures(run)
    for run in resumed:
        elsewhere = run.job.ranks != runs[0].job.ranks
        yield from _failures(run, "note" if elsewhere and _raised(run, Phase.STATE) else "error")
    if runs[0].ok or not any(run.ranks[0].epochs for run in runs):
        for run in controls[:1] if working else ():
            yield from _failures(run, "unproven", ", with one rank only")


def _raised(run: RunLog, phase: str | None = None) -> bool:
    root = [rank.failure for rank in run.ranks if rank.failure is not None and rank.failure.root]
    return bool(root) and all(failure.kind == "raised" and phase in (None, failure.phase) for failure in root)


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
            yield finding("process-died", severity, f"{what}{only}", *evidence)
        elif failure.phase == Phase.IDS:
            unproven = "unproven" if severity == "error" else severity
            yield finding("no-ids", unproven, "batches do not have the declared ids", *evidence)
        elif failure.kind == "hangs":
            yield finding("hangs", severity, f"the loader hangs, {failure.phase}{only}", *evidence)
        else:
            what = f"the factory or its loader raises an error{only}"
            yield finding("factory-raises", severity, what, *evidence)


def cut_epochs(run: RunLog) -> Iterator[Finding]:
    """Epochs that were not read to their end."""
    cut = [(rank, epoch) for rank in run.ranks for epoch in rank.epochs if epoch.cut]
    for rank, epoch in cut[:1]:
        length = rank.built.length if rank.built is not None else None
        of = f" of {length}" if length is not None else ""
        text = f"{run.job.name}, rank {rank.rank}: cut after {len(epoch.steps)} steps{of}"
        yield finding("never-ends", "unproven", "the epoch was not read to its end", text)


def differences(run: RunLog) -> Iterator[Finding]:
    """Ranks that shard different datasets."""
    sharding = [rank for rank in run.ranks if rank.built and (rank.built.cuts_one_dataset or rank.built.elastic)]
    for name in ("samples", "fingerprint", "subset"):
        values = [(rank.rank, getattr(rank.built, name)) for rank in sharding]
        if any(value != values[0][1] for _, value in values):
            text = ", ".join(f"rank {rank}: {str(value)[:40]}" for rank, value in values)
            text = f"{run.job.name}: {name} of the dataset: {text}"
            yield finding("differs-between-ranks", "error", "ranks read different datasets", text)
            return


def lengths(run: RunLog) -> Iterator[Finding]:
    """``len(loader)`` against the steps: exactly, of a map-style dataset; of a stream."""
    for epochs in run.epochs[:1]:
        total = sum(len(epoch.steps) for epoch in epochs)
        for rank, epoch in zip(run.ranks, epochs, strict=True):
            built, steps = rank.built, len(epoch.steps)
            if built is None or built.length is None or built.length == steps:
                continue
            spare = max(run.job.workers, 1)  # an incomplete batch of each worker
            is_close = abs(built.length - steps) <= spare
            if is_close and not built.traits.indexed:
                continue
            of_all = not is_close and abs(built.length - total) <= run.job.ranks * spare
            severity: Severity = "note" if of_all and not built.traits.indexed else "error"
            what = f"len(loader) is not the number of steps{', but of all ranks' if of_all else ''}"
            text = f"rank {rank.rank}: len(loader) is {built.length}, the epoch has {steps} steps"
            yield finding("wrong-length", severity, what, f"{run.job.name}, {text}")
            return


def dropped(run: RunLog) -> Iterator[Finding]:
    """Batches of fewer rows than samples given to collate unless collate packs samples into rows."""
    steps = [(rank, step) for rank in run.ranks for epoch in rank.epochs for step in epoch.steps]
    known = [(rank, step) for rank, step in steps if step.indices is not None and step.rows is not None]
    fewer = [(rank, step) for rank, step in known if (step.rows or 0) < len(indices_of(step))]
    surely = [(rank, step) for rank, step in fewer if step.dropped]
    if found := surely or (fewer if 2 * len(fewer) <= len(known) else []):
        rank, step = found[0]
        samples = indices_of(step)
        became = f"{len(samples)} samples (indices {listed([*map(str, samples)])}) became {step.rows} rows"
        text = f"{run.job.name}, rank {rank.rank}: {became}; {len(found)} such batches"
        yield finding("missing-samples", "error", "collate drops samples", text)


def changed_reads(controls: Sequence[RunLog]) -> Iterator[Finding]:
    """Batches that one process reads again from one state of all generators, with different content.

    A generator that is not known explains that, too: an error only if it shows that there is none.
    """
    steps = [[*log.steps] for log in controls[:2]]
    for read in (rank.read_again for log in controls for rank in log.ranks if rank.read_again is not None):
        differs = {
            name: sum(map(ne, one.fields[name], other.fields.get(name, ())))
            for one, other in zip(read.first, read.again, strict=True)
            for name in one.fields
            if one.fields[name] != other.fields.get(name)
        }
        has_no_generator = not read.drew and len(steps) == 2
        if has_no_generator:  # two equal runs would show an unknown one
            differs = {
                name: rows
                for name, rows in differs.items()
                if all(one.fields.get(name) == other.fields.get(name) for one, other in zip(*steps, strict=False))
            }
        if differs:
            severity: Severity = "error" if has_no_generator or read.changes_dataset else "unproven"
            what = "an item that is read again has other content, although all random generators were as before"
            fields = ", ".join(f"{name or 'the batch'} of {rows} rows" for name, rows in differs.items())
            text = f"in {len(read.first)} batches that were read twice: {fields}"
            yield finding("reads-differ", severity, what, text)


def collated_apart(controls: Sequence[RunLog]) -> Iterator[Finding]:
    """Collate functions that combine values of different samples.

    Fields are evidence that have the same values whether samples are collated together or one by one, which
    positions in the batch and padding to the longest sample do not have.
    """
    for read in (rank.collated_alone for log in controls for rank in log.ranks):
        if read is None or not read.together:
            continue
        steps = [*read.together, *(step for steps in read.alone for step in steps)]
        remove_padding(steps)
        same: dict[object, list[str]] = {}  # fields of the same values, as of the samples that are negatives
        for name in sorted(set.intersection(*({*step.fields} for step in steps))):
            of_batches, of_samples = _sorted_keys(read, [name])
            if of_batches == of_samples:
                same.setdefault(tuple(map(tuple, of_batches)), []).append(name)
            elif name.endswith(LOCAL):
                same = {name: [name]}
                break
        pairs = [_sorted_keys(read, names) for names in islice(product(*same.values()), _CHOICES)]
        if all(of_batches != of_samples for of_batches, of_samples in pairs):
            of_batches, of_samples = pairs[0]
            differs = sum(map(ne, of_batches, of_samples))
            fields = ", ".join(name for group in same.values() for name in group)
            text = f"{differs} of {len(of_batches)} batches hold other rows of {fields} than their samples alone"
            yield finding("rows-come-apart", "unproven" if read.drew else "error", ROWS_APART, text)


def _sorted_keys(read: CollatedAlone, names: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Keys of some fields together, of the rows of each batch, and of its samples alone."""
    batches = [sorted(step.row_keys(names)) for step in read.together]
    return batches, [sorted(key for step in steps for key in step.row_keys(names)) for steps in read.alone]


def copied_rows(run: RunLog) -> Iterator[Finding]:
    """Batches whose rows are all the same, though their samples are not: a buffer that all of them use."""
    steps = [step for step in run.steps if (step.rows or 0) > 1 and step.fields]
    are_copies = all(len({*step.content}) == 1 and len({*indices_of(step)}) > 1 for step in steps)
    if len(steps) >= 3 and are_copies and len({step.content[0] for step in steps}) > 1:
        text = f"{run.job.name}: in all {len(steps)} batches of several samples"
        what = "the rows of a batch are copies of one of its samples"
        yield finding("reads-differ", "error", what, text)


#: The rules that look at one run.
OF_A_RUN = (cut_epochs, differences, lengths, dropped, copied_rows)


def resumed(whole: RunLog, after: RunLog, kind: Kind) -> Iterator[Finding]:
    """What a run delivers that resumed from the middle of the first epoch of `whole`, also in later epochs."""
    if not whole.epochs or not after.epochs or any(rank.state_after is None for rank in whole.ranks):
        return
    before: Counter[RowKey] = Counter()
    for rank, epoch in zip(whole.ranks, whole.epochs[0], strict=True):
        before.update(key for step in epoch.steps[: rank.state_after] for key in kind.of(step))
    steps = " or ".join(str(step) for step in sorted({rank.state_after or 0 for rank in whole.ranks}))
    for number, (uninterrupted, epochs) in enumerate(zip(whole.epochs, after.epochs, strict=False)):
        expected, delivered = kind.total(uninterrupted), kind.total(epochs)
        if (whole.job.ranks, whole.job.workers) != (after.job.ranks, after.job.workers):
            expected = Counter({*expected})  # padding differs
        place, spare = f"the state was taken after {steps} steps ({before.total()} samples)", 0
        if number:
            # A whole epoch again, in which other remainders may be padded or dropped.
            place = f"epoch {number} after a state of epoch 0"
            spare = max(whole.remainder, after.remainder)
        else:
            delivered += before
        for code, samples, what in (
            ("resume-repeats", delivered - expected, "a resumed run repeats samples of before the checkpoint"),
            ("resume-skips", expected - delivered, "a resumed run skips samples"),
        ):
            if samples.total() > spare:
                text = f"{place}, {after.job.name}: {samples.total()} samples"
                names = f": {listed([str(key) for key in samples], 8)}" if kind.names_samples else ""
                yield finding(code, "error", what, text + names)
