"""Whether the fields of a row belong to one sample: compared with the control, and with samples collated alone."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from operator import ne

from rankfeed.diagnostics.batch_columns import LOCAL
from rankfeed.diagnostics.doctor.consistency import by_chance
from rankfeed.diagnostics.doctor.packing import repeated
from rankfeed.diagnostics.doctor.records import CollatedAlone, EpochLog, Padding, RowKey, RunLog, Step, padding_of
from rankfeed.diagnostics.findings import Finding, finding
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import hashes

#: More than this share of what chance explains must be values of other samples; most of a class may be right.
_OTHER = 0.02
#: Samples may repeat or be unknown, and values be unknown, in this share of the rows.
_INCOMPLETE = 0.1
#: A label has at most this share of different values.
_LABELS = 0.25
#: Fields that samples are identified by, and combinations of fields that are compared.
_ANCHORS, _CHOICES = 4, 64
_WHAT = "fields of a sample arrive with those of other samples"
_Keys = Callable[[Step], Sequence[RowKey]]
_Paddings = Mapping[str, Padding | None]
_Known = Mapping[RowKey, tuple[int, ...]]


@dataclass(frozen=True)
class _Row:
    key: RowKey
    values: tuple[int, ...]
    place: tuple[int, int | None]  # rank and worker


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
    paddings = {name: padding_of(name, steps) for name in names}
    whole = [epoch for log in controls[:2] for epoch in log.ranks[0].whole]
    by_content: list[_Keys] = [partial(Step.combined, paddings={name: paddings[name]}) for name in names]
    by_content = [*islice((keys for keys in by_content if _identifies(whole, keys)), _ANCHORS)]
    anchors: list[_Keys] = [lambda step: step.ids or (), *by_content, lambda step: step.indices or ()]
    remaining = list(runs)
    for keys in anchors:
        control = [_rows(0, epoch, keys, paddings) for epoch in whole]
        moved = len({tuple(row.key for row in rows) for rows in control}) > 1
        if keys is anchors[-1] and not (same_indices and moved):
            continue  # collate may sort its samples
        if not moved and len(control) < 4:
            continue  # random numbers may be the same in two equal epochs
        for run in [*remaining] if _identifies(whole, keys) else ():
            if text := _apart(run, control, keys, paddings, moved=moved):
                remaining.remove(run)
                yield finding("rows-come-apart", "error", _WHAT, f"{run.job.name}: {text}")


def _identifies(epochs: Sequence[EpochLog], keys: _Keys) -> bool:
    """Whether all rows of each epoch have keys of their own."""
    orders = ([key for step in epoch.steps for key in keys(step)] for epoch in epochs)
    return bool(epochs) and all(order and len(order) == len({*order}) for order in orders)


def _rows(rank: int, epoch: EpochLog, keys: _Keys, paddings: _Paddings) -> list[_Row]:
    rows = []
    for step in epoch.steps:
        values = zip(*(step.unpadded(*pair) for pair in paddings.items()), strict=False)
        rows += [_Row(*pair, (rank, step.worker)) for pair in zip(keys(step), values, strict=False)]
    return rows


def _apart(
    run: RunLog, control: Sequence[Sequence[_Row]], keys: _Keys, paddings: _Paddings, *, moved: bool
) -> str | None:
    """The field of the run whose values belong to other samples."""
    known: dict[RowKey, tuple[int, ...]] = {}
    varying: set[int] = set()
    for row in (row for rows in control for row in rows):
        first = known.setdefault(row.key, row.values)
        varying.update(place for place, value in enumerate(first) if value != row.values[place])
    epochs = [
        [row for rank, epoch in enumerate(of_ranks) for row in _rows(rank, epoch, keys, paddings)]
        for of_ranks in run.epochs
    ]
    rows = [row for epoch in epochs for row in epoch if row.key in known]
    if len(rows) < (1 - _INCOMPLETE) * sum(map(len, epochs)) or any(
        repeated(Counter(row.key for row in epoch)) > _INCOMPLETE for epoch in epochs
    ):
        return None
    steps = [step for step in run.steps if step.rows]
    texts = []
    for place, name in enumerate(paddings):
        values = {each[place] for each in known.values()}
        if place in varying or not _is_other(rows, known, place):
            continue
        other = [row.values[place] for row in rows if row.values[place] != known[row.key][place]]
        if sum(value not in values for value in other) > _INCOMPLETE * len(other):
            continue  # augmentation makes new values
        if not moved and len(values) > _LABELS * len(known):
            return None  # a counter of rows, or another dataset that is read beside this one
        if (moved or _is_label(name, steps)) and _is_dealt(epochs, known, place):
            texts.append(f"in {len(other)} of {len(rows)} rows, {name or 'the batch'} is that of another sample")
    return texts[0] if texts else None


def _is_other(rows: Sequence[_Row], known: _Known, place: int, least: int = ENOUGH) -> bool:
    """Whether a field has other values than those of its samples, by more than a share of what chance explains."""
    chance = by_chance([known[row.key][place] for row in rows])
    other = sum(row.values[place] != known[row.key][place] for row in rows)
    return chance >= least and other > _OTHER * chance


def _is_label(name: str, steps: Sequence[Step]) -> bool:
    """Whether a field without padding is neither the same in all rows of a batch nor a place in it."""
    columns = [step.fields[name] for step in steps]
    if any(name in step.ends for step in steps) or all(len({*column}) == 1 for column in columns):
        return False
    return any(sorted(column) != sorted(hashes([*range(len(column))]) or []) for column in columns)


def _is_dealt(epochs: Sequence[Sequence[_Row]], known: _Known, place: int) -> bool:
    """Whether values are those of the samples in another order, or other ones in all workers.

    Random numbers that are seeded by rank and sample are neither: they are as in the control on rank 0.
    """
    expected = [Counter(known[row.key][place] for row in epoch if row.key in known) for epoch in epochs]
    delivered = [Counter(row.values[place] for row in epoch if row.key in known) for epoch in epochs]
    if expected == delivered:
        return True
    by_worker = defaultdict(list)
    for row in (row for epoch in epochs for row in epoch if row.key in known):
        by_worker[row.place].append(row)
    return all(_is_other(rows, known, place, least=1) for rows in by_worker.values())


def collated_apart(controls: Sequence[RunLog]) -> Iterator[Finding]:
    """Collate functions that combine values of different samples.

    Fields are evidence that have the same values whether samples are collated together or one by one, which
    positions in the batch and padding to the longest sample do not have.
    """
    for read in (rank.collated_alone for log in controls for rank in log.ranks):
        if read is None or not read.together:
            continue
        steps = [*read.together, *(step for steps in read.alone for step in steps)]
        names = sorted(set.intersection(*({*step.fields} for step in steps)))
        paddings = {name: padding_of(name, steps) for name in names}
        same: dict[object, list[str]] = {}  # fields of the same values, as of the samples that are negatives
        for name in names:
            of_batches, of_samples = _values(read, {name: paddings[name]})
            if of_batches == of_samples:
                same.setdefault(tuple(map(tuple, of_batches)), []).append(name)
            elif name.endswith(LOCAL):
                same = {name: [name]}
                break
        chosen = islice(product(*same.values()), _CHOICES)
        pairs = [_values(read, {name: paddings[name] for name in fields}) for fields in chosen]
        if all(of_batches != of_samples for of_batches, of_samples in pairs):
            of_batches, of_samples = pairs[0]
            differs = sum(map(ne, of_batches, of_samples))
            fields = ", ".join(name for group in same.values() for name in group)
            text = f"{differs} of {len(of_batches)} batches hold other rows of {fields} than their samples alone"
            yield finding("rows-come-apart", "unproven" if read.drew else "error", _WHAT, text)


def _values(read: CollatedAlone, paddings: _Paddings) -> tuple[list[list[int]], list[list[int]]]:
    """Sorted keys of some fields together, of the rows of each batch, and of its samples alone."""
    batches = [sorted(step.combined(paddings)) for step in read.together]
    return batches, [sorted(key for step in steps for key in step.combined(paddings)) for steps in read.alone]
