"""Which kind of key identifies rows (ids, indices, content, stable fields), and the counts of a run by it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from rankfeed.diagnostics.deliveries import EpochReport, RankRecord, report_of
from rankfeed.diagnostics.doctor.consistency import index_fields, is_repetitive, repeated
from rankfeed.diagnostics.doctor.records import EpochLog, KeysOf, RowKey, RunLog, Step, ids_of, indices_of
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import KeyArray
from rankfeed.diagnostics.multiset import Keys, count, joined

#: Ids and indices of which more than this share repeats were drawn with replacement.
_DRAWN = 0.05
#: Number of ordered streams that may be interleaved.
_LANES = 16


@dataclass(frozen=True)
class Kind:
    """A kind of key."""

    name: str
    #: The keys of a step on a rank.
    of: KeysOf = field(repr=False)
    #: How often each key must arrive, by epoch; None: the control runs disagree.
    control: list[Counter[RowKey]] | None
    #: Whether equal keys mean equal samples, and whether the control draws with replacement.
    exact: bool = True
    drawn: bool = False
    #: Whether the control was declared as a universe.
    declared: bool = False
    #: The fields of the batch that a key is made of, if it is.
    fields: frozenset[str] = frozenset()

    @property
    def names_samples(self) -> bool:
        """Whether keys are ids or indices, which mean something to people."""
        return self.name in ("ids", "indices")

    def total(self, epochs: Sequence[EpochLog]) -> Counter[RowKey]:
        """Counts of an epoch of all ranks."""
        return Counter(key for epoch in epochs for key in epoch.order(self.of))


#: The keys that orders are compared by.
IDENTITY = Kind("keys", lambda step: step.keys, None)


def choose(
    controls: Sequence[RunLog], runs: Sequence[RunLog], universe: int | None = None, *, same_indices: bool = True
) -> list[Kind]:
    """The kinds that every row has a key of, the strongest first; the options are those of `diagnose`."""
    logs = [*controls, *runs]
    kinds = []
    if _all(logs, lambda step: step.ids is not None):
        declared = None if universe is None else Counter[RowKey](range(universe))
        kinds.append(_kind("ids", ids_of, controls, declared))
    if _all(logs, lambda step: step.indices is not None):
        kinds.extend(_indices(controls, logs, same=same_indices))
    by_content = _content(controls, runs, set() if same_indices else index_fields(logs))
    return kinds if by_content is None else [*kinds, by_content]


def _all(logs: Sequence[RunLog], holds: Callable[[Step], bool]) -> bool:
    steps = [step for log in logs for step in log.steps]
    return bool(steps) and all(holds(step) for step in steps if step.rows != 0)


def _kind(name: str, of: KeysOf, controls: Sequence[RunLog], declared: Counter[RowKey] | None = None) -> Kind:
    """Declared keys, or those that both control runs deliver."""
    pairs = _epochs(Kind(name, of, None), controls)
    counts = [one for pair in pairs for one in pair]
    changes = len(pairs) < 2 or any(one != counts[0] for one in counts)  # draws do, other repeats do not
    drawn = changes and any(repeated(one) > _DRAWN for one in counts)
    if declared is not None:
        epochs = max([1, *(len(rank.epochs) for log in controls for rank in log.ranks)])
        return Kind(name, of, [declared] * epochs, drawn=drawn, declared=True)
    stable = bool(pairs) and all(one == other for one, other in pairs)
    return Kind(name, of, [one for one, _ in pairs] if stable else None, drawn=drawn)


def _epochs(kind: Kind, controls: Sequence[RunLog]) -> list[tuple[Counter[RowKey], Counter[RowKey]]]:
    """The counts of each epoch in both control runs."""
    if len(controls) < 2:
        return []
    return list(zip(*(map(kind.total, log.epochs) for log in controls[:2]), strict=False))


def _indices(controls: Sequence[RunLog], logs: Sequence[RunLog], *, same: bool) -> list[Kind]:
    """Indices of the dataset, if it is the same on all ranks; else those of what all ranks take a subset of."""
    sizes = {built.samples for log in logs for built in log.built}
    if not same or len(sizes) != 1:
        of_subsets = _all(logs, lambda step: step.base is not None)
        return [_kind("indices", lambda step: step.base or [], controls)] if of_subsets else []
    (size,) = sizes
    kind = _kind("indices", indices_of, controls)
    if size is None:
        return [kind]
    whole, pairs = Counter[RowKey](range(size)), _epochs(kind, controls)
    largest = max((len(indices_of(step)) for log in controls for step in log.steps), default=0)
    complete = all(not one - whole and (whole - one).total() <= largest for pair in pairs for one in pair)
    if complete or (kind.control is None and kind.drawn):
        return [replace(kind, control=[whole] * max(1, len(pairs)))]
    return [kind]


def _content(controls: Sequence[RunLog], runs: Sequence[RunLog], ignored: Collection[str]) -> Kind | None:
    """Content without padding, of the fields that both controls deliver alike and no run changes."""
    steps = [step for log in (*controls, *runs) for step in log.steps if step.rows]
    known = {name for step in steps for name in step.fields}.difference(ignored)
    names = sorted(known.intersection(*(step.fields for step in steps)))
    if not controls or not names:
        return None

    def kind_of(fields: Sequence[str], name: str = "") -> Kind:
        return _kind(name, lambda step: step.row_keys(fields), controls)

    stable = [name for name in names if _is_stable(kind_of([name]), controls, runs)]
    fields = [name for name in stable if _identifies(kind_of([name]), controls)] or stable
    if len(fields) > 1 and not _is_stable(kind_of(fields), controls, runs):
        # A counter of steps or positions changes with the configuration without new values.
        fields = [min(fields, key=lambda name: _mismatch(kind_of([name]), runs))]
    every = len(stable) == len(known)
    kind = kind_of(fields or names, "content" if every else f"the fields {', '.join(fields or names)}")
    identifies = _identifies(kind, controls)
    control = kind.control if fields else None
    drawn = every and not identifies
    return replace(kind, control=control, exact=every or identifies, drawn=drawn, fields=frozenset(fields))


def _identifies(kind: Kind, controls: Sequence[RunLog]) -> bool:
    return not any(is_repetitive(one) for pair in _epochs(kind, controls) for one in pair)


def _mismatch(kind: Kind, runs: Sequence[RunLog]) -> int:
    """Rows that arrive too often or too rarely in all runs."""
    pairs = [pair for run in runs for pair in zip(kind.control or (), map(kind.total, run.epochs), strict=False)]
    return sum((one - other).total() + (other - one).total() for one, other in pairs)


def _is_stable(kind: Kind, controls: Sequence[RunLog], runs: Sequence[RunLog]) -> bool:
    """Whether both controls deliver the same values, and no run others, but for those of a dropped batch."""
    if kind.control is None and _epochs(kind, controls):
        return False
    known = {key for one in kind.control or () for key in one}
    for run in runs:
        orders = (epoch.order(kind.of) for rank in run.ranks for epoch in rank.epochs)
        if any(sum(key not in known for key in order) >= max(run.largest_batch, 1) for order in orders):
            return False
    return True


class RunCounter:
    """Counts the epochs of a run by a kind of key, as numbers in the order in which a control delivers them."""

    def __init__(self, kind: Kind, run: RunLog, controls: Sequence[RunLog] = ()) -> None:
        self._kind, self._run = kind, run
        self._numbers: dict[RowKey, int] = {}
        self._names: list[str] = []
        for log in controls[:1]:
            for epoch in (epoch for rank in log.ranks for epoch in rank.epochs):
                for number, step in enumerate(epoch.steps):
                    self._encode(kind.of(step), f"of step {number} of one process, row")

    def _encode(self, keys: Iterable[RowKey], place: str) -> KeyArray:
        """Numbers of keys; names of those that are content tell the first place where it was delivered."""
        numbers = []
        for row, key in enumerate(keys):
            number = self._numbers.setdefault(key, len(self._names))
            if number == len(self._names):
                self._names.append(str(key) if self._kind.names_samples else f"{place} {row}")
            numbers.append(number)
        return np.array(numbers, np.int64)

    def _names_of(self, numbers: Sequence[Any]) -> list[str]:
        return [self._names[number] for number in numbers]

    def peers(
        self, epochs: Sequence[Sequence[EpochLog]], expected: Sequence[Counter[RowKey]] | None
    ) -> list[list[list[EpochLog]]]:
        """Groups of ranks that may share samples: peers count once, and ranks that read everything alone."""
        orders = [[epoch.order(self._kind.of) for epoch in of_rank] for of_rank in zip(*epochs, strict=True)]
        kept = [rank for rank, order in enumerate(orders) if order not in orders[:rank]]
        due: Counter[RowKey] = expected[0] if expected else Counter()
        whole = all(2 * (due - Counter(orders[rank][0])).total() < due.total() for rank in kept)
        groups = [[rank] for rank in kept] if whole else [kept]
        return [[[of_epoch[rank] for rank in group] for of_epoch in epochs] for group in groups]

    def report(self, epochs: Sequence[EpochLog], expected: Counter[RowKey] | None = None) -> EpochReport:
        """The figures of an epoch of some ranks; ``expected``: how often each key is due in it."""
        figures, deliveries, logs = [], [], []
        persistent = any(built.persistent for built in self._run.built)
        indexed = all(step.indices is not None for step in self._run.steps)
        for rank, epoch in enumerate(epochs):
            record = RankRecord(indexed=indexed)
            batches = []
            for number, step in enumerate(epoch.steps):
                batches.append(self._encode(self._kind.of(step), f"of rank {rank}, step {number}, row"))
                # Of workers that persist only the beginning is known.
                record.add(batches[-1], step.worker, {} if persistent and epoch.epoch else step.streams)
            keys = joined(batches)
            deliveries.append(Keys(keys, np.arange(len(keys))))
            figures.append(record.figures(rank, self._is_in_order(rank, epoch)))
            logs.append(record.steps)
        due = self._encode(expected or (), "of the universe")
        order = np.argsort(due)
        times = np.fromiter(expected.values(), np.int64)[order] if expected else None
        counts = count(deliveries, logs, due[order], times)
        return report_of(epochs[0].epoch, counts, figures, logs, keyed=expected is not None, names=self._names_of)

    def _is_in_order(self, rank: int, epoch: EpochLog) -> bool | None:
        """Whether a rank does not shuffle; None if its keys are names that may be in any order."""
        built = self._run.ranks[rank].built
        shuffles = None if built is None else built.traits.shuffles
        keys = epoch.order(IDENTITY.of)
        distinct = len({*keys})
        if shuffles is False or distinct < ENOUGH or (shuffles is None and _in_order(epoch.steps)):
            return True
        numbers = [key for key in keys if isinstance(key, int)]
        most = 2 * self._run.job.ranks * distinct
        is_dense = len(numbers) == len(keys) and max(numbers) - min(numbers) < most
        return False if shuffles or is_dense else None


def _in_order(steps: Sequence[Step]) -> bool:
    """Whether batches come in the order of their keys, or are interleaved from a few streams that do."""
    batches = [step.keys for step in steps if step.keys]
    if len({type(key) for batch in batches for key in batch}) > 1:
        return False
    inside = [_precedes(earlier, later) for batch in batches for earlier, later in pairwise(batch)]
    if sum(inside) < 0.95 * len(inside):
        return False
    first = [batch[0] for batch in batches]
    for lanes in range(1, min(_LANES, max(1, len(first) // 2)) + 1):
        pairs = list(zip(first, first[lanes:], strict=False))
        if sum(_precedes(*pair) for pair in pairs) >= 0.95 * len(pairs):
            return True
    return False


def _precedes(one: RowKey, other: RowKey) -> bool:
    return one <= other if isinstance(one, int) and isinstance(other, int) else str(one) <= str(other)
