"""Records what the ranks received in an epoch, batch by batch, and counts it; `judge` judges these counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from rankfeed.diagnostics.keys import KeyArray
from rankfeed.diagnostics.multiset import EXAMPLES, KeyCounts, StepLog, repeated_batches

#: Checked when a report is read from a file.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
#: Key of `RankEpoch.orders` for the whole rank; other keys are workers.
WHOLE_RANK = -1
#: An epoch is divided into at most this many intervals of steps (`EpochReport.interval`).
INTERVALS = 256


@dataclass(frozen=True)
class LoaderTraits:
    """What a loader declares about itself."""

    workers: Count = 0  # of a torch DataLoader
    drops: bool = False  # whether it leaves out the remainder of an epoch
    replaces: bool = False  # whether its sampler draws with replacement
    shuffles: bool | None = None  # None: it does not say
    indexed: bool = False  # whether its dataset is map-style, so that workers draw for samples only


@dataclass(frozen=True)
class Place:
    """A delivery: the rank, its worker (None: unknown), the step and the row, from 0."""

    rank: Count
    worker: int | None
    step: Count
    row: Count

    def __str__(self) -> str:
        worker = "" if self.worker is None else f", worker {self.worker}"
        return f"rank {self.rank}{worker}, step {self.step}, row {self.row}"


@dataclass(frozen=True)
class Repeat:
    """A sample that was delivered more than once in an epoch: its key, how often, and the first places."""

    key: str
    times: Count
    places: tuple[Place, ...]

    def __str__(self) -> str:
        more = self.times - len(self.places)
        return f"sample {self.key} at {'; '.join(map(str, self.places))}" + (f"; and {more} more" if more else "")


@dataclass(frozen=True)
class RankEpoch:
    """What one rank was given in an epoch.

    Attributes:
        rank: the rank.
        steps: number of batches.
        samples: number of samples in them.
        batch_sizes: number of batches of each size.
        orders: digests of the order of keys: of the rank (-1), and of each worker that is known.
        in_order: whether keys are ascending, or the loader does not shuffle; None if names may have any order.
        streams: digests of the random streams that its workers drew from: (worker, generator, digest).
        repeated: in each interval of `EpochReport.interval` steps, deliveries of samples that had been delivered
            before, on this or another rank. It has no trailing zeros.
        repeated_at_end: how many of them are in the last step.
        unproven: samples of batches that may lack some of them, by the user's function that returned the batch.
    """

    rank: Count
    steps: Count
    samples: Count
    batch_sizes: Mapping[Count, Count]
    orders: Mapping[int, str]
    in_order: bool | None = False
    streams: tuple[tuple[int, str, str], ...] = ()
    repeated: tuple[Count, ...] = ()
    repeated_at_end: Count = 0
    unproven: Mapping[str, Count] = field(default_factory=dict)

    @property
    def largest_batch(self) -> int:
        return max(self.batch_sizes, default=0)

    @property
    def order(self) -> str:
        """Digest of the order of the whole rank."""
        return self.orders.get(WHOLE_RANK, "")


@dataclass(frozen=True)
class EpochReport:
    """What all ranks were given in an epoch.

    Attributes:
        epoch: counted from 0, the first that was audited.
        samples: deliveries, over all ranks.
        unique: different samples among them.
        duplicates: deliveries beyond the first of samples that are expected several times.
        missing: expected samples that were not delivered; None if it is not known which were expected.
        unknown: samples that were not expected; None likewise.
        ranks: by rank.
        between_ranks: deliveries of a sample that another rank was given, too.
        between_workers: deliveries of a sample that another worker of the same rank delivered, too.
        batches_again: deliveries in batches that had been delivered before as they are.
        interval: steps of an interval of `RankEpoch.repeated`.
        repeats: the first samples that were delivered more than once.
        missing_keys: the first that were not delivered.
        unknown_keys: the first that were not expected.
        digest, missing_digest: equal for equal sets of delivered and of missing samples.
    """

    epoch: Count
    samples: Count
    unique: Count
    missing: Count | None
    unknown: Count | None
    ranks: Annotated[tuple[RankEpoch, ...], msgspec.Meta(min_length=1)]
    between_ranks: Count = 0
    between_workers: Count = 0
    batches_again: Count = 0
    duplicates: Count = 0
    interval: Annotated[int, msgspec.Meta(ge=1)] = 1
    repeats: tuple[Repeat, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    digest: int = 0
    missing_digest: int = 0

    @property
    def repeated(self) -> int:
        """Deliveries of samples that had been delivered before, as often as they are expected."""
        return max(0, self.samples - self.unique - self.duplicates)

    @property
    def expected(self) -> int:
        """Deliveries that are due: those that are not repeated, and those that are missing."""
        return self.samples - self.repeated + (self.missing or 0)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(rank.steps for rank in self.ranks)

    @property
    def batch_size(self) -> int:
        """The largest."""
        return max(rank.largest_batch for rank in self.ranks)

    def __str__(self) -> str:
        missing = "" if self.missing is None else f", {self.missing:,} missing"
        least, most = min(self.steps), max(self.steps)
        steps = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"epoch {self.epoch}: {self.samples:,} samples, {self.unique:,} different{missing}, "
            f"{self.repeated:,} repeated; {steps} step{'s' * (most != 1)} a rank"
        )


class RankRecord:
    """The deliveries of a rank in an epoch, while it is read.

    ``indexed``: whether workers draw random numbers for samples only, as of a map-style dataset; those of a
    stream draw some before their first batch to shuffle, the same in all of them.
    """

    def __init__(self, *, indexed: bool = False) -> None:
        self._indexed, self.ascending = indexed, True
        self._sizes, self._workers, self._digests = array("q"), array("h"), array("Q")
        self._last = -(1 << 63)
        self._orders: dict[int, xxh3_128] = {WHOLE_RANK: xxh3_128()}
        self._streams: dict[tuple[int, str], str] = {}
        self._draws: Counter[tuple[int, str]] = Counter()
        self._begun: set[int | None] = set()

    @property
    def steps(self) -> StepLog:
        """Where each delivery is."""
        return StepLog.of(self._sizes, self._workers, self._digests)

    def add(self, keys: KeyArray, worker: int | None = None, streams: Mapping[str, str] | None = None) -> None:
        """Record a batch: its keys, the worker that built it, and the random streams that this drew from."""
        content = keys.tobytes()
        is_first = worker not in self._begun
        self._begun.add(worker)
        for order in {WHOLE_RANK, WHOLE_RANK if worker is None or not len(keys) else worker}:
            self._orders.setdefault(order, xxh3_128()).update(content)
        if keys.dtype.kind != "i":
            self.ascending = False
        elif len(keys):
            self.ascending &= bool(self._last <= keys[0] and (keys[1:] >= keys[:-1]).all())
            self._last = int(keys[-1])
        self._sizes.append(len(keys))
        self._workers.append(-1 if worker is None else worker)
        self._digests.append(xxh3_64_intdigest(content))
        for name, digest in (streams or {}).items():
            self._streams[worker or 0, name] = digest
            self._draws[worker or 0, name] += self._indexed or not is_first

    def figures(self, rank: int, in_order: bool | None) -> RankEpoch:
        """What is known of this rank alone."""
        return RankEpoch(
            rank,
            steps=len(self._sizes),
            samples=sum(self._sizes),
            batch_sizes=dict(sorted(Counter(self._sizes).items())),
            orders={worker: order.hexdigest() for worker, order in self._orders.items()},
            in_order=in_order,
            streams=tuple(
                (worker, name, digest)
                for (worker, name), digest in sorted(self._streams.items())
                if self._draws[worker, name] >= (1 if self._indexed else 2)
            ),
        )


def report_of(
    epoch: int,
    counts: KeyCounts,
    ranks: Sequence[RankEpoch],
    logs: Sequence[StepLog],
    *,
    interval: int = 1,
    keyed: bool = True,
    names: Callable[[Sequence[Any]], Sequence[str]] = lambda keys: [*map(str, keys)],
) -> EpochReport:
    """The figures of all ranks.

    ``keyed``: whether the expected samples were counted by their keys. ``names``: of keys, for people.
    """
    examples = counts.repeated_keys[:EXAMPLES]
    repeats = []
    for name, (_, times, places) in zip(names([key for key, *_ in examples]), examples, strict=True):
        at = (Place(rank, None if worker < 0 else worker, step, row) for rank, worker, step, row in places)
        repeats.append(Repeat(name, times, tuple(at)))
    return EpochReport(
        epoch,
        samples=counts.deliveries,
        unique=counts.unique,
        missing=counts.missing if keyed else None,
        unknown=counts.unknown if keyed else None,
        ranks=tuple(
            replace(
                figures,
                repeated=tuple(np.trim_zeros([counts.repeated[figures.rank, at] for at in range(INTERVALS)], "b")),
                repeated_at_end=counts.repeated_at_end[figures.rank],
            )
            for figures in ranks
        ),
        between_ranks=counts.between_ranks,
        between_workers=counts.between_workers,
        batches_again=repeated_batches(logs),
        duplicates=counts.duplicates,
        interval=interval,
        repeats=tuple(repeats),
        missing_keys=tuple(names(counts.missing_keys[:EXAMPLES])) if keyed else (),
        unknown_keys=tuple(names(counts.unknown_keys[:EXAMPLES])) if keyed else (),
        digest=counts.digest % (1 << 64),
        missing_digest=counts.missing_digest % (1 << 64),
    )
