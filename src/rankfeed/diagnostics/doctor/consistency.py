"""Finds datasets that differ between processes, by the values that each sample has in the fields of batches.

Random numbers change when a sample is read again. A field belongs to samples if it does not change although they
are read at other positions: random numbers depend on the position, unless they are seeded by the sample. How many
values differ is compared with values in random order, so that labels of few classes are evidence.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rankfeed.diagnostics.doctor.records import EpochLog, KeysOf, RowKey, RunLog, ids_of, indices_of
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import hashes

#: The share of rows that may be exceptions, as real data have them: samples of equal content, samples that one
#: process does not deliver, values that no sample has.
FEW = 0.1
#: A label has at most this share of different values.
LABELS = 0.25
#: Values are the same below the first share of what chance explains, and others above the second one.
_SAME, _OTHER = 0.05, 0.2


@dataclass(frozen=True)
class SampleValues:
    """What samples hold whenever one process reads them."""

    #: The value of each sample, of the fields that all batches have and that do not change.
    fields: dict[str, dict[RowKey, int]]
    positions: dict[RowKey, set[int]]  # where workers read each sample, in their order of an epoch
    order: list[tuple[int, int | None, Sequence[RowKey]]]  # epoch, worker and samples of each batch

    @property
    def is_reordered(self) -> bool:
        """Whether a sample was read at several positions."""
        return any(len(positions) > 1 for positions in self.positions.values())

    def belongs_to_samples(self, name: str) -> bool:
        """Whether enough samples were read at several positions, always with one value in this field."""
        moved = [key for key, positions in self.positions.items() if len(positions) > 1]
        return by_chance([self.fields[name][key] for key in moved]) >= ENOUGH


def sample_values(epochs: Iterable[EpochLog], keys_of: KeysOf) -> SampleValues:
    """The values of samples in epochs that one process read."""
    fields: dict[str, dict[RowKey, int]] = {}
    positions: dict[RowKey, set[int]] = {}
    order: list[tuple[int, int | None, Sequence[RowKey]]] = []
    changing: set[str] = set()
    for epoch in epochs:
        rows: Counter[int | None] = Counter()  # that a worker read
        for step in epoch.steps:
            keys = keys_of(step)
            order.append((epoch.epoch, step.worker, keys))
            for key in keys:
                positions.setdefault(key, set()).add(rows[step.worker])
                rows[step.worker] += 1
            for name, column in step.fields.items():
                values = fields.setdefault(name, {})
                rows_of = zip(keys, column, strict=True)
                if len(column) != len(keys) or any(values.setdefault(key, new) != new for key, new in rows_of):
                    changing.add(name)
    kept = {name for name, values in fields.items() if values.keys() == positions.keys()} - changing
    return SampleValues({name: fields[name] for name in sorted(kept)}, positions, order)


def differing(pairs: Sequence[tuple[int, int]], least: int = ENOUGH) -> tuple[list[int], float | None]:
    """Of pairs (value of a sample, delivered value): the delivered values that differ, and their share.

    The share is that of what chance explains; None if that is fewer than ``least``.
    """
    chance = by_chance([value for value, _ in pairs])
    values = [delivered for value, delivered in pairs if delivered != value]
    return values, len(values) / chance if chance >= least else None


def share_among(values: Sequence[RowKey], known: Collection[RowKey]) -> float:
    """The share of values that are known."""
    return sum(value in known for value in values) / max(1, len(values))


def repeated(counts: Mapping[Any, int]) -> float:
    """The share of deliveries that repeat another one."""
    return 1 - len(counts) / sum(counts.values()) if counts else 0.0


def is_repetitive(counts: Mapping[Any, int]) -> bool:
    """Whether keys do not identify samples: more than a few deliveries repeat another one."""
    return repeated(counts) > FEW


def by_chance(values: Sequence[int]) -> float:
    """How many of these values differ, on average, from values of the same frequencies in random order."""
    return len(values) - sum(count * count for count in Counter(values).values()) / max(1, len(values))


def conflicts(logs: Sequence[RunLog]) -> dict[tuple[int, int], str]:
    """Runs between which, or in which, an index is another sample: pairs of their numbers, with an example."""
    readings = _readings(logs)
    names = _common_fields(readings.values()) - index_fields(logs)
    sure = {name for name in names if any(reading.belongs_to_samples(name) for reading in readings.values())}
    for name in names - sure:
        differences = (_difference(name, *pair, elsewhere=True) for pair in combinations(readings.values(), 2))
        if any(difference is not None and difference < _SAME for difference in differences):
            sure.add(name)
    shuffled = [run for run, log in enumerate(logs) if not sure and _shuffles_samples(log)]
    texts = {(run, run): f"{logs[run].job.name}: indices change in each epoch" for run in shuffled}
    like: dict[tuple[int, int, int], dict[bool, int]] = {}
    for ((run, rank), one), ((other_run, other_rank), other) in combinations(readings.items(), 2):
        # Without such fields, only processes that read in the same order, and so draw the same, are compared.
        same = {name for name in names if one.order == other.order and _identifies(one.fields[name])}
        shares = {name: _difference(name, one, other) for name in sure or same}
        differ = sorted((share, name) for name, share in shares.items() if share is not None)
        if not differ:
            continue
        share, name = differ[0 if sure else -1]
        if share > _OTHER:
            here, there = one.fields[name], other.fields[name]
            index = next(index for index in here.keys() & there.keys() if here[index] != there[index])
            places = f"ranks {rank} and {other_rank}"
            if run != other_run:
                places = f"{logs[run].job.name} and {logs[other_run].job.name}"
            text = f"{places}: index {index} holds other data in {name or 'the batch'}"
            texts.setdefault((run, other_run), text)
        if sure and (share < _SAME or share > _OTHER):
            like.setdefault((run, rank, other_run), {})[share < _SAME] = other_rank
    for (_, _, run), ranks in like.items():
        if len(ranks) > 1:  # one rank reads what the other run reads, and another does not
            text = f"ranks {ranks[True]} and {ranks[False]}: the same indices hold other data"
            texts.setdefault((run, run), text)
    return texts


def renumbered(logs: Sequence[RunLog]) -> Iterator[str]:
    """Fields whose values are exchanged one for one in another process, as class numbers in the order of a set."""
    has_ids = all(step.ids is not None for log in logs for step in log.steps)
    readings = _readings(logs, ids_of if has_ids else indices_of)
    for ((run, rank), one), ((other_run, other_rank), other) in combinations(readings.items(), 2):
        for name in one.fields.keys() & other.fields.keys():
            if one.order != other.order and not (one.belongs_to_samples(name) and other.belongs_to_samples(name)):
                continue  # the number of a step, say
            here, there = one.fields[name], other.fields[name]
            pairs = [(here[key], there[key]) for key in here if key in there]
            values, share = differing(pairs)
            names = {*pairs}
            is_one_to_one = len(names) == len(dict(names)) == len({new for _, new in names})
            if share is None or share <= _OTHER or not is_one_to_one:
                continue
            if not 2 < len(names) <= LABELS * len(pairs):  # two values may be flags that a simple hash draws
                continue
            if share_among(values, {*here.values()}) >= 1 - FEW:  # not random numbers of groups of samples
                places = f"{logs[run].job.name}, rank {rank}, and {logs[other_run].job.name}, rank {other_rank}"
                yield f"{places}: {len(values)} of {len(pairs)} samples have other values in {name or 'the batch'}"


def sample_fields(controls: Sequence[RunLog]) -> set[str]:
    """Fields that are the same at an index whenever one process reads it, in whatever order."""
    readings = _readings(controls).values()
    names = _common_fields(readings)
    return {name for name in names if all(reading.belongs_to_samples(name) for reading in readings)}


def unknown_content(controls: Sequence[RunLog], runs: Sequence[RunLog]) -> list[str]:
    """Runs in which fields that depend on the index alone in one process have values that it never reads."""

    def values_of(logs: Sequence[RunLog], name: str) -> list[int]:
        return [value for log in logs for step in log.steps for value in step.fields.get(name, ())]

    known = {name: {*values_of(controls, name)} for name in sorted(sample_fields(controls))}
    texts = []
    for run in runs if known else ():
        share = min(1 - share_among(values_of([run], name), values) for name, values in known.items())
        if share > _OTHER:
            fields = f"{share:.0%} of the rows have values of {', '.join(known)}"
            texts.append(f"{run.job.name}: {fields} that one process never reads")
    return texts


def index_fields(logs: Sequence[RunLog]) -> set[str]:
    """Fields that are the index itself, which says nothing about the sample."""
    steps = [step for log in logs for step in log.steps if step.indices]
    names = {*steps[0].fields} if steps else set()
    for step in steps:
        names = {name for name in names if step.fields.get(name) == hashes(step.indices)}
    return names


def _readings(logs: Sequence[RunLog], keys_of: KeysOf = indices_of) -> dict[tuple[int, int], SampleValues]:
    """What the ranks read, by run and rank."""
    ranks = [(run, rank) for run, log in enumerate(logs) for rank in log.ranks]
    return {(run, rank.rank): sample_values(rank.epochs, keys_of) for run, rank in ranks}


def _common_fields(readings: Collection[SampleValues]) -> set[str]:
    """Fields that change at no index in any of the readings."""
    return set.intersection(*({*reading.fields} for reading in readings)) if readings else set()


def _difference(name: str, one: SampleValues, other: SampleValues, *, elsewhere: bool = False) -> float | None:
    """Share of common indices with different values, of what chance explains; None if that says nothing.

    With ``elsewhere``, only indices count that were read at different positions.
    """
    here, there = one.fields[name], other.fields[name]
    pairs = [
        (here[index], there[index])
        for index in here.keys() & there.keys()
        if not elsewhere or one.positions[index].isdisjoint(other.positions[index])
    ]
    values, share = differing(pairs)
    # Augmentation makes values that no other index has.
    return None if values and share_among(values, {*here.values()}) < FEW else share


def _identifies(values: Mapping[RowKey, int]) -> bool:
    return not is_repetitive(Counter(values.values()))


def _shuffles_samples(log: RunLog) -> bool:
    """Whether one process has the same samples in its first epochs, in another order and at other indices."""
    epochs = [sample_values([epoch], indices_of).fields for epoch in log.ranks[0].epochs[:2]]
    if log.job.ranks > 1 or log.job.workers or len(epochs) < 2:
        return False
    pairs = ((values, epochs[1].get(name, {})) for name, values in epochs[0].items())
    return any(
        one != other and [*one.values()] != [*other.values()] and sorted(one.values()) == sorted(other.values())
        for one, other in pairs
        if _identifies(one)
    )
