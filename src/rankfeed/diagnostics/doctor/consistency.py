"""Whether a dataset index is the same sample in every process."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from rankfeed.diagnostics.doctor.records import RowKey, RunLog, Step
from rankfeed.diagnostics.doctor.sample_values import (
    FEW,
    LABELS,
    KeysOf,
    SampleValues,
    differing,
    is_repetitive,
    sample_values,
    share_among,
)
from rankfeed.diagnostics.keys import hashes

#: Values are the same below the first share of what chance explains, and others above the second one.
_SAME, _OTHER = 0.05, 0.2


def conflicts(logs: Sequence[RunLog]) -> dict[tuple[int, int], str]:
    """Runs between which, or in which, an index is another sample: pairs of their numbers, with an example."""
    readings = _readings(logs)
    names = _common_fields(readings.values()) - index_fields(logs)
    sure = {name for name in names if _belongs_to_samples(name, readings.values())}
    texts: dict[tuple[int, int], str] = {}
    if not sure:
        shuffled = (run for run, log in enumerate(logs) if _shuffles_samples(log))
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
    readings = _readings(logs, (lambda step: step.ids or ()) if has_ids else indices_of)
    for ((run, rank), one), ((other_run, other_rank), other) in combinations(readings.items(), 2):
        for name in one.fields.keys() & other.fields.keys():
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


def indices_of(step: Step) -> list[int]:
    """The keys of a step's samples: their indices in the dataset."""
    return step.indices or []


def _readings(logs: Sequence[RunLog], keys_of: KeysOf = indices_of) -> dict[tuple[int, int], SampleValues]:
    """What the ranks read, by run and rank."""
    ranks = [(run, rank) for run, log in enumerate(logs) for rank in log.ranks]
    return {(run, rank.rank): sample_values(rank.epochs, keys_of) for run, rank in ranks}


def _common_fields(readings: Collection[SampleValues]) -> set[str]:
    """Fields that change at no index in any of the readings."""
    return set.intersection(*({*reading.fields} for reading in readings)) if readings else set()


def _belongs_to_samples(name: str, readings: Collection[SampleValues]) -> bool:
    if any(reading.belongs_to_samples(name) for reading in readings):
        return True
    shares = (_difference(name, *pair, elsewhere=True) for pair in combinations(readings, 2))
    return any(share is not None and share < _SAME for share in shares)


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
