"""What the ranks were given in an epoch: the figures of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

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
        in_order: whether keys are ascending, or the loader does not shuffle.
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
    in_order: bool = False
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
        missing: expected samples that were not delivered; None if it is not known which were expected.
        unknown: samples that were not expected; None likewise.
        ranks: by rank.
        between_ranks: deliveries of a sample that another rank was given, too.
        between_workers: deliveries of a sample that another worker of the same rank delivered, too.
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
    interval: Annotated[int, msgspec.Meta(ge=1)] = 1
    repeats: tuple[Repeat, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    digest: int = 0
    missing_digest: int = 0

    @property
    def repeated(self) -> int:
        """Deliveries of samples that had been delivered before."""
        return max(0, self.samples - self.unique)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(each.steps for each in self.ranks)

    @property
    def batch_size(self) -> int:
        """The largest."""
        return max(each.largest_batch for each in self.ranks)

    def __str__(self) -> str:
        missing = "" if self.missing is None else f", {self.missing:,} missing"
        least, most = min(self.steps), max(self.steps)
        steps = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"epoch {self.epoch}: {self.samples:,} samples, {self.unique:,} different{missing}, "
            f"{self.repeated:,} repeated; {steps} step{'s' * (most != 1)} a rank"
        )
