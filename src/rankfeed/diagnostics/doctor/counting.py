"""The steps of a run as the figures that `rankfeed.diagnostics.judge` judges."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from rankfeed.diagnostics.deliveries import EpochReport, RankRecord, report_of
from rankfeed.diagnostics.doctor.kinds import Kind
from rankfeed.diagnostics.doctor.outcomes import in_order
from rankfeed.diagnostics.doctor.records import EpochLog, RowKey, RunLog
from rankfeed.diagnostics.judge import ENOUGH
from rankfeed.diagnostics.keys import KeyArray
from rankfeed.diagnostics.multiset import Keys, count, joined

#: The keys that orders are compared by.
IDENTITY = Kind("keys", lambda step: step.keys, None)


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

    def names(self, numbers: Sequence[Any]) -> list[str]:
        """Keys for people."""
        return [self._names[number] for number in numbers]

    def peers(
        self, epochs: Sequence[Sequence[EpochLog]], expected: Sequence[Counter[RowKey]] | None
    ) -> list[list[list[EpochLog]]]:
        """Groups of ranks that may share samples: peers count once, and ranks that read everything alone."""
        orders = [[self._kind.order(epoch) for epoch in of_rank] for of_rank in zip(*epochs, strict=True)]
        kept = [rank for rank, order in enumerate(orders) if order not in orders[:rank]]
        totals = [self._kind.total([epochs[0][rank]]) for rank in kept]
        whole = expected is not None and all(
            2 * (expected[0] - total).total() < expected[0].total() for total in totals
        )
        groups = [[rank] for rank in kept] if whole else [kept]
        return [[[of_epoch[rank] for rank in group] for of_epoch in epochs] for group in groups]

    def reports(
        self, epochs: Sequence[Sequence[EpochLog]], expected: Sequence[Counter[RowKey]] | None = None
    ) -> list[EpochReport]:
        """The figures of some epochs of the run; ``expected``: how often each key is due in each of them."""
        return [self._report(*pair) for pair in zip(epochs, expected or repeat(None), strict=False)]

    def _report(self, epochs: Sequence[EpochLog], expected: Counter[RowKey] | None) -> EpochReport:
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
        due, times = self._encode(expected or (), "of the universe"), None
        if expected:
            order = np.argsort(due)
            due, times = due[order], np.fromiter(expected.values(), np.int64)[order]
        counts = count(deliveries, logs, due, times)
        keyed = expected is not None
        return report_of(epochs[0].epoch, counts, figures, logs, keyed=keyed, names=self.names)

    def _is_in_order(self, rank: int, epoch: EpochLog) -> bool | None:
        """Whether a rank does not shuffle; None if its keys are names that may be in any order."""
        built = next((log.built for log in self._run.ranks if log.rank == rank), None)
        shuffles = None if built is None else built.traits.shuffles
        keys = epoch.keys
        if shuffles is False or len({*keys}) < ENOUGH or (shuffles is None and in_order(epoch.steps)):
            return True
        numbers = [key for key in keys if isinstance(key, int)]
        is_dense = len(numbers) == len(keys) and max(numbers) - min(numbers) < 2 * self._run.job.ranks * len(
            {*keys}
        )
        return False if shuffles or is_dense else None
