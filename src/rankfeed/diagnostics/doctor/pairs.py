"""Whether the fields of a row belong to one sample: compared with the control."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from rankfeed.diagnostics.doctor.consistency import (
    FEW,
    LABELS,
    SampleValues,
    differing,
    is_repetitive,
    sample_values,
    share_among,
)
from rankfeed.diagnostics.doctor.records import EpochLog, KeysOf, RunLog, Step, ids_of, indices_of
from rankfeed.diagnostics.findings import Finding, finding
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import hashes

#: More than this share of what chance explains must be values of other samples; most of a class may be right.
_OTHER = 0.02
#: Fields that samples are identified by.
_ANCHORS = 4
ROWS_APART = "fields of a sample arrive with those of other samples"
#: The value of a field in a row of a run: epoch, rank and worker, value of its sample in the control, value.
_Row = tuple[int, tuple[int, int | None], int, int]


def rows_apart(
    controls: Sequence[RunLog], runs: Sequence[RunLog], *, same_indices: bool = True
) -> Iterator[Finding]:
    """Runs in which a field comes with other samples than in all epochs of the control.

    Random numbers may depend on the place where a sample is read: a field is evidence if the control reads samples
    in another order in each epoch, or if it is a label. ``same_indices``: whether indices mean the same samples in
    all runs.
    """
    steps = [step for log in (*controls, *runs) for step in log.steps if step.rows]
    if not steps or len(controls) < 2:
        return
    names = sorted(set.intersection(*({*step.fields} for step in steps)))
    whole = [epoch for log in controls[:2] for epoch in log.ranks[0].whole]
    by_field: list[KeysOf] = [partial(Step.row_keys, names=[name]) for name in names]
    by_content = [keys_of for keys_of in by_field if _identifies(whole, keys_of)]
    remaining = list(runs)
    for keys_of in (ids_of, *by_content[:_ANCHORS], indices_of):
        control = sample_values(whole, keys_of)
        if keys_of is indices_of and not (same_indices and control.is_reordered):
            continue  # collate may sort its samples
        if not control.is_reordered and len(whole) < 4:
            continue  # random numbers may be the same in two equal epochs
        for run in [*remaining] if _identifies(whole, keys_of) else ():
            if text := _apart(run, control, keys_of, names):
                remaining.remove(run)
                yield finding("rows-come-apart", "error", ROWS_APART, f"{run.job.name}: {text}")


def _identifies(epochs: Sequence[EpochLog], keys_of: KeysOf) -> bool:
    """Whether all rows of each epoch have keys of their own."""
    orders = (epoch.order(keys_of) for epoch in epochs)
    return bool(epochs) and all(order and len(order) == len({*order}) for order in orders)


def _apart(run: RunLog, control: SampleValues, keys_of: KeysOf, names: Sequence[str]) -> str | None:
    """The field of the run whose values belong to other samples."""
    orders = [[key for log in of_ranks for key in log.order(keys_of)] for of_ranks in run.epochs]
    keys = [key for order in orders for key in order]
    if share_among(keys, control.positions) < 1 - FEW or any(is_repetitive(Counter(order)) for order in orders):
        return None
    texts = []
    for name in (name for name in names if name in control.fields):
        values = control.fields[name]
        rows = [
            (epoch, (rank, step.worker), values[key], value)
            for epoch, of_ranks in enumerate(run.epochs)
            for rank, log in enumerate(of_ranks)
            for step in log.steps
            for key, value in zip(keys_of(step), step.fields.get(name, ()), strict=False)
            if key in values
        ]
        if not _is_other(rows):
            continue
        different = {*values.values()}
        other = [value for _, _, expected, value in rows if value != expected]
        if share_among(other, different) < 1 - FEW:
            continue  # augmentation makes new values
        if not control.is_reordered and len(different) > LABELS * len(values):
            return None  # a counter of rows, or another dataset that is read beside this one
        if (control.is_reordered or _is_label(name, [*run.steps])) and _is_dealt(rows):
            texts.append(f"in {len(other)} of {len(rows)} rows, {name or 'the batch'} is that of another sample")
    return texts[0] if texts else None


def _is_other(rows: Sequence[_Row], least: int = ENOUGH) -> bool:
    """Whether a field has other values than those of its samples, by more than a share of what chance explains."""
    _, share = differing([(expected, value) for _, _, expected, value in rows], least)
    return share is not None and share > _OTHER


def _is_label(name: str, steps: Sequence[Step]) -> bool:
    """Whether a field without padding is neither the same in all rows of a batch nor a place in it."""
    steps = [step for step in steps if step.rows]
    if any(name in step.ends for step in steps) or all(len({*step.fields[name]}) == 1 for step in steps):
        return False
    return not _are_places(steps, name)


def _are_places(steps: Sequence[Step], name: str) -> bool:
    """Whether a field numbers the rows of each batch, in any order."""
    columns = (step.fields[name] for step in steps)
    return all(sorted(column) == sorted(hashes([*range(len(column))]) or []) for column in columns)


def _is_dealt(rows: Sequence[_Row]) -> bool:
    """Whether values are those of the samples in another order, or other ones in all workers.

    Random numbers that are seeded by rank and sample are neither: they are as in the control on rank 0.
    """
    if Counter((row[0], row[2]) for row in rows) == Counter((row[0], row[3]) for row in rows):
        return True
    by_worker = defaultdict(list)
    for row in rows:
        by_worker[row[1]].append(row)
    return all(_is_other(rows, least=1) for rows in by_worker.values())


def exchanged_by_epoch(controls: Sequence[RunLog]) -> Iterator[Finding]:
    """Fields in which one process delivers, for one id, values of other ids that change by epoch.

    A second stream that is read beside the samples, or a partner that is drawn for each, looks the same. So a
    field is evidence only if no field is random, and if none that stays with its id identifies samples as well as
    this one does, or has the same values.
    """
    epochs = [[step for step in epoch.steps if step.rows] for log in controls[:1] for epoch in log.ranks[0].whole]
    steps = [step for epoch in epochs for step in epoch]
    if len(epochs) < 2 or not all(epochs) or any(step.ids is None for step in steps):
        return
    keys = [key for step in steps for key in ids_of(step)]
    stays: list[list[Counter[int]]] = []
    changes: dict[str, tuple[int, list[Counter[int]]]] = {}
    for name in sorted(set.intersection(*({*step.fields} for step in steps))):
        columns = [[step.fields[name] for step in epoch] for epoch in epochs]
        values = [value for column in columns for batch in column for value in batch]
        if len(values) != len(keys) or all(step.fields[name] == hashes(ids_of(step)) for step in steps):
            continue  # the id itself
        rows = [*zip(keys, values, strict=True)]
        first = dict(reversed(rows))  # the first value of each id
        owners = {value: key for key, value in reversed(rows)}  # the first id of each value
        other, share = differing([(first[key], value) for key, value in rows])
        of_other_ids = sum(owners[value] != key for key, value in rows if value != first[key])
        counts = [Counter(value for batch in column for value in batch) for column in columns]
        changes_counts = is_repetitive(counts[0]) and any(count != counts[0] for count in counts)
        if not other:
            stays.append(counts)
        elif share is None or all(column == columns[0] for column in columns) or _are_places(steps, name):
            continue  # of the place in an epoch or batch
        elif share <= _OTHER or of_other_ids < (1 - FEW) * len(other) or changes_counts:
            return  # random
        else:
            changes[name] = len(other), counts
    groups = (stays, [counts for _, counts in changes.values()])
    if all(any(not is_repetitive(counts[0]) for counts in group) for group in groups):
        return  # both identify samples
    for name, (exchanges, counts) in changes.items():
        if counts not in stays:
            rows_of = f"{name or 'the batch'} of {exchanges} of {len(keys)} rows"
            text = f"{controls[0].job.name}: {rows_of} is that of another id in another epoch"
            yield finding("rows-come-apart", "error", ROWS_APART, text)
