"""The values that samples have in the fields of a batch, and how far other values differ from them.

Random numbers change when a sample is read again. A field belongs to samples if it does not change although they
are read at other positions: random numbers depend on the position, unless they are seeded by the sample. How many
values differ is compared with values in random order, so that labels of few classes are evidence.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, Step
from rankfeed.diagnostics.judge import ENOUGH

#: The share of rows that may be exceptions, as real data have them: samples of equal content, samples that one
#: process does not deliver, values that no sample has.
FEW = 0.1
#: A label has at most this share of different values.
LABELS = 0.25
#: The keys of a step's samples.
KeysOf = Callable[[Step], Sequence[RowKey]]


@dataclass(frozen=True)
class SampleValues:
    """What samples hold whenever one process reads them.

    Attributes:
        fields: the value of each sample, of the fields that all batches have and that do not change.
        positions: where workers read each sample, in their order of an epoch.
        order: epoch, worker and samples of each batch.
    """

    fields: dict[str, dict[RowKey, int]]
    positions: dict[RowKey, set[int]]
    order: list[tuple[int, int | None, Sequence[RowKey]]]

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
                if len(column) != len(keys) or any(
                    values.setdefault(key, value) != value for key, value in zip(keys, column, strict=True)
                ):
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


def share_among(values: Sequence[int], known: Collection[int]) -> float:
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
