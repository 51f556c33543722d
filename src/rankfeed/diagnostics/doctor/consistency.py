"""Whether a dataset index is the same sample in every process (rule 2).

Random numbers differ between processes, too, so only some fields are evidence. A field belongs to samples if no
process sees it change at an index, and if an index has the same value at different positions in the order of a
worker: random numbers depend on the position, unless they are seeded by the index. Shares of different values are
compared with those of values that are dealt at random, so that labels of few classes are evidence as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rankfeed.diagnostics.doctor.records import Padding, RankLog, RunLog, padding_of
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import hashes

#: Values are the same below the first share of what chance explains, and others above the second one.
_SAME, _OTHER = 0.05, 0.2
#: Of the different values, this share must be known from other indices: augmentation makes new values.
_MOVED = 0.1
_Values = dict[int, int]


@dataclass
class _Reading:
    """What a rank of a run read."""

    run: int
    rank: int
    #: The value of each index, of fields that do not change; where workers read it; and the order of all.
    values: dict[str, _Values] = field(default_factory=dict)
    positions: dict[int, set[int]] = field(default_factory=dict)
    order: list[tuple[int, int | None, list[int]]] = field(default_factory=list)


def conflicts(logs: Sequence[RunLog]) -> dict[tuple[int, int], str]:
    """Runs between which, or in which, an index is another sample: pairs of their numbers, with an example."""
    readings, names = _readings(logs)
    names -= index_fields(logs)
    sure = {name for name in names if _belongs_to_samples(name, readings)}
    found: dict[tuple[int, int], str] = {}
    if not sure:
        shuffled = (number for number, log in enumerate(logs) if _shuffles_samples(log))
        found = {(number, number): f"{logs[number].job.name}: indices change in each epoch" for number in shuffled}
    like: dict[tuple[int, int, int], dict[bool, int]] = {}
    for one, other in combinations(readings, 2):
        # Without such fields, only processes that read in the same order, and so draw the same, are compared.
        same = [name for name in names if one.order == other.order and _identifies(one.values[name])]
        shares = {name: _difference(name, one, other) for name in sure or same}
        differ = sorted((share, name) for name, share in shares.items() if share is not None)
        if not differ:
            continue
        share, name = differ[0 if sure else -1]
        if share > _OTHER:
            here, there = one.values[name], other.values[name]
            index = next(each for each in here.keys() & there.keys() if here[each] != there[each])
            places = f"ranks {one.rank} and {other.rank}"
            if one.run != other.run:
                places = f"{logs[one.run].job.name} and {logs[other.run].job.name}"
            text = f"{places}: index {index} holds other data in {name or 'the batch'}"
            found.setdefault((one.run, other.run), text)
        if sure and (share < _SAME or share > _OTHER):
            like.setdefault((one.run, one.rank, other.run), {})[share < _SAME] = other.rank
    for (_, _, run), ranks in like.items():
        if len(ranks) > 1:  # one rank reads what the other run reads, and another does not
            text = f"ranks {ranks[True]} and {ranks[False]}: the same indices hold other data"
            found.setdefault((run, run), text)
    return found


def sample_fields(controls: Sequence[RunLog]) -> set[str]:
    """Fields that are the same at an index whenever one process reads it, in whatever order."""
    readings, names = _readings(controls)
    return {name for name in names if all(_is_seen_moved(name, each) for each in readings)}


def unknown_content(controls: Sequence[RunLog], runs: Sequence[RunLog]) -> list[str]:
    """Runs in which fields that depend on the index alone in one process have values that it never reads."""
    fields, texts = sorted(sample_fields(controls)), []
    if not fields:
        return []
    steps = [step for log in (*controls, *runs) for step in log.steps]
    paddings = {name: padding_of(name, steps) for name in fields}
    known = {name: {*_values(controls, name, padding)} for name, padding in paddings.items()}
    for run in runs:
        rows = [(known[name], _values([run], name, padding)) for name, padding in paddings.items()]
        share = min(sum(key not in read for key in keys) / max(1, len(keys)) for read, keys in rows)
        if share > _OTHER:
            found = f"{share:.0%} of the rows have values of {', '.join(fields)}"
            texts.append(f"{run.job.name}: {found} that one process never reads")
    return texts


def _values(logs: Sequence[RunLog], name: str, padding: Padding | None) -> list[int]:
    return [key for log in logs for step in log.steps for key in step.unpadded(name, padding)]


def index_fields(logs: Sequence[RunLog]) -> set[str]:
    """Fields that are the index itself, which says nothing about the sample."""
    steps = [step for log in logs for step in log.steps if step.indices]
    names = {*steps[0].fields} if steps else set()
    for step in steps:
        names = {name for name in names if step.fields.get(name) == hashes(step.indices)}
    return names


def _readings(logs: Sequence[RunLog]) -> tuple[list[_Reading], set[str]]:
    """What each rank of each run read, and the fields that change at no index in any of them."""
    steps = [step for log in logs for step in log.steps]
    paddings = {name: padding_of(name, steps) for name in {name for step in steps for name in step.fields}}
    readings = [_reading(number, rank, paddings) for number, log in enumerate(logs) for rank in log.ranks]
    return readings, set.intersection(*({*each.values} for each in readings)) if readings else set()


def _reading(run: int, rank: RankLog, paddings: Mapping[str, Padding | None]) -> _Reading:
    found = _Reading(run, rank.rank)
    changing: set[str] = set()
    for epoch in rank.epochs:
        read: Counter[int | None] = Counter()
        for step in epoch.steps:
            indices = step.indices or []
            found.order.append((epoch.epoch, step.worker, indices))
            for index in indices:
                found.positions.setdefault(index, set()).add(read[step.worker])
                read[step.worker] += 1
            for name in step.fields:
                column = step.unpadded(name, paddings[name])
                values = found.values.setdefault(name, {})
                if len(column) != len(indices) or any(
                    values.setdefault(index, value) != value for index, value in zip(indices, column, strict=True)
                ):
                    changing.add(name)
    read_indices = found.positions.keys()  # batches of some shapes do not have all fields
    found.values = {
        name: values
        for name, values in found.values.items()
        if name not in changing and values.keys() == read_indices
    }
    return found


def _belongs_to_samples(name: str, readings: Sequence[_Reading]) -> bool:
    if any(_is_seen_moved(name, each) for each in readings):
        return True
    shares = (_difference(name, *pair, elsewhere=True) for pair in combinations(readings, 2))
    return any(share is not None and share < _SAME for share in shares)


def _is_seen_moved(name: str, reading: _Reading) -> bool:
    """Whether enough indices were read at several positions, always with one value."""
    several = [reading.values[name][index] for index, places in reading.positions.items() if len(places) > 1]
    return by_chance(several) >= ENOUGH


def _difference(name: str, one: _Reading, other: _Reading, *, elsewhere: bool = False) -> float | None:
    """Share of common indices with different values, of what chance explains; None if that says nothing.

    With ``elsewhere``, only indices count that were read at different positions.
    """
    here, there = one.values[name], other.values[name]
    common = [
        index
        for index in here.keys() & there.keys()
        if not elsewhere or one.positions[index].isdisjoint(other.positions[index])
    ]
    expected = by_chance([there[index] for index in common])
    differ = [there[index] for index in common if here[index] != there[index]]
    known = {*here.values()}
    if expected < ENOUGH or sum(value in known for value in differ) < _MOVED * len(differ):
        return None
    return len(differ) / expected


def by_chance(values: Sequence[int]) -> float:
    """How many of these values differ, on average, from values of the same frequencies in random order."""
    return len(values) - sum(count * count for count in Counter(values).values()) / max(1, len(values))


def _identifies(values: _Values) -> bool:
    return len({*values.values()}) >= 0.9 * len(values)


def _shuffles_samples(log: RunLog) -> bool:
    """Whether one process has the same samples in its first epochs, in another order and at other indices."""
    epochs = log.ranks[0].epochs[:2]
    if log.job.ranks > 1 or log.job.workers or len(epochs) < 2:
        return False
    for name in next((step.fields for step in epochs[0].steps), {}):
        one, other = (
            [
                pair
                for step in epoch.steps
                for pair in zip(step.indices or [], step.fields.get(name, []), strict=False)
            ]
            for epoch in epochs
        )
        orders = [[value for _, value in each] for each in (one, other)]
        if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) and dict(one) != dict(other):
            return _identifies(dict(one))
    return False
