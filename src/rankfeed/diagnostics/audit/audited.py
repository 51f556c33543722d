"""What an audit found: figures of each epoch, and sentences about what is wrong with them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankfeed.diagnostics.audit.trace import NOBODY, Place
from rankfeed.errors import AuditError, listed


@dataclass(frozen=True)
class Repeat:
    """A sample that came more than once in an epoch: its key, how often, and the first places."""

    key: str
    times: int
    places: tuple[Place, ...]

    def __str__(self) -> str:
        more = self.times - len(self.places)
        return f"{self.key} at {'; '.join(map(str, self.places))}" + (f"; and {more} more" if more else "")


@dataclass(frozen=True)
class RankEpoch:
    """What one rank was given in an epoch.

    Attributes:
        rank: which.
        steps: batches.
        samples: in them.
        batch_sizes: how many batches there were of each size.
        orders: digests of the order of keys: of the rank (-1), and of each worker that is known.
        in_order: whether the keys came in their own order, or the loader is one that does not shuffle.
        streams: digests of the random streams that its workers drew from: (worker, generator, digest).
    """

    rank: int
    steps: int
    samples: int
    batch_sizes: Mapping[int, int]
    orders: Mapping[int, str]
    in_order: bool = False
    streams: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class EpochReport:
    """What all ranks were given in an epoch.

    Attributes:
        epoch: counted from 0, the first that was audited.
        samples: deliveries, over all ranks.
        unique: different samples among them.
        missing: samples that did not come; None where it is not known which should.
        unknown: samples that came and should not; None likewise.
        ranks: by rank.
        repeats: the first samples that came more than once.
        missing_keys: the first that did not come.
        unknown_keys: the first that should not have come.
    """

    epoch: int
    samples: int
    unique: int
    missing: int | None
    unknown: int | None
    ranks: tuple[RankEpoch, ...]
    repeats: tuple[Repeat, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def repeated(self) -> int:
        """Deliveries too many."""
        return self.samples - self.unique

    @property
    def steps(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(each.steps for each in self.ranks)

    def __str__(self) -> str:
        missing = "" if self.missing is None else f", {self.missing} missing"
        steps = sorted({*self.steps})
        return (
            f"epoch {self.epoch}: {self.samples} samples, {self.unique} different{missing}, "
            f"{self.repeated} repeated; {' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps a rank"
        )


@dataclass(frozen=True)
class AuditReport:
    """What a loader delivered, over all ranks; the same on each of them. Prints as text.

    Attributes:
        by_content: whether samples are known by their content, since batches have no ids.
        cut: whether epochs were ended before their end (``max_steps``).
        epochs: one for each epoch.
    """

    by_content: bool
    cut: bool
    epochs: tuple[EpochReport, ...]

    @property
    def world_size(self) -> int:
        """Ranks that were audited."""
        return len(self.epochs[0].ranks)

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, a sentence each; empty where every sample came once an epoch, in equal steps."""
        return tuple(_findings(self))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def check(self) -> None:
        """Raise AuditError unless nothing is wrong."""
        findings = self.findings
        if findings:
            raise AuditError(findings[0], expected="each sample once an epoch, in equal steps", found=str(self))

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {**asdict(self), "findings": list(self.findings)}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it as JSON, for `load` and for ``rankfeed report --audit``; returns where.

        Raises:
            ArgumentError: it cannot be written there.
        """
        from rankfeed.diagnostics.audit.saved import save

        return save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> AuditReport:
        """Read what `save` wrote.

        Raises:
            SourceError: there is no such file.
            CorruptError: it is not a report.
        """
        from rankfeed.diagnostics.audit.saved import load

        return load(path)

    def html(self, path: str | os.PathLike[str], *, title: str = "An audit") -> Path:
        """Write it as one HTML page with charts, or these as a PNG where the name ends so; returns where.

        Raises:
            ArgumentError: it cannot be written there.
            MissingExtraError: the extra ``report`` is not installed.
        """
        from rankfeed.diagnostics.report.audit import audit_page
        from rankfeed.diagnostics.report.render import write

        return write(audit_page(self, title=title), path)

    def __str__(self) -> str:
        known = "known by their content" if self.by_content else "known by their ids"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}, samples {known}"
        lines = [ranks, *map(str, self.epochs), *(f"- {each}" for each in self.findings)]
        return "\n".join(lines if self.findings else [*lines, "nothing is wrong"])


def _findings(report: AuditReport) -> Iterator[str]:
    for epoch in report.epochs:
        yield from _of_epoch(epoch, report)
    yield from _same_orders(report.epochs)
    yield from _same_streams(report.epochs)


def _of_epoch(epoch: EpochReport, report: AuditReport) -> Iterator[str]:
    where = f"epoch {epoch.epoch}: "
    if epoch.repeated:
        what = "deliveries repeat a sample's content" if report.by_content else "deliveries repeat a sample"
        yield f"{where}{epoch.repeated} of {epoch.samples} {what}{_by_whom(epoch.repeats)}: {epoch.repeats[0]}"
    if epoch.missing and not report.cut:
        yield f"{where}{epoch.missing} samples did not come: {listed(epoch.missing_keys)}"
    if epoch.unknown:
        yield f"{where}{epoch.unknown} samples are not among those declared: {listed(epoch.unknown_keys)}"
    least, most = min(epoch.ranks, key=lambda each: each.steps), max(epoch.ranks, key=lambda each: each.steps)
    if least.steps < most.steps:
        yield (
            f"{where}rank {least.rank} ends after {least.steps} steps and rank {most.rank} goes on to "
            f"{most.steps}: a collective in step {least.steps} (from 0) would wait for ever"
        )


def _by_whom(repeats: Sequence[Repeat]) -> str:
    """Between whom samples are delivered twice, as far as the examples show."""
    across_ranks = any(len({place.rank for place in each.places}) > 1 for each in repeats)
    across_workers = any(
        len({place.worker for place in each.places if place.rank == rank}) > 1
        for each in repeats
        for rank in {place.rank for place in each.places}
    )
    who = [name for name, holds in (("ranks", across_ranks), ("workers", across_workers)) if holds]
    return f" (between {' and between '.join(who)})" if who else ""


def _same_orders(epochs: Sequence[EpochReport]) -> Iterator[str]:
    first = epochs[0]
    again = _alike({epoch.epoch: ",".join(each.orders[NOBODY] for each in epoch.ranks) for epoch in epochs})
    if again and any(each.samples > 1 and not each.in_order for each in first.ranks):
        yield f"epochs {_named(again)} have the same order: is there a set_epoch that nobody calls?"
    ranks = _alike({each.rank: each.orders[NOBODY] for each in first.ranks if each.samples})
    if ranks:
        yield (
            f"ranks {_named(ranks)} read the same samples in the same order: the data are not shared out over "
            "ranks"
        )
    for each in first.ranks:
        workers = _alike({worker: order for worker, order in each.orders.items() if worker != NOBODY})
        if workers:
            yield (
                f"workers {_named(workers)} of rank {each.rank} read the same samples in the same order: the data "
                "are not shared out over workers"
            )
            return


def _same_streams(epochs: Sequence[EpochReport]) -> Iterator[str]:
    for generator in ("torch", "numpy", "random"):
        drawn = [
            {
                (rank.rank, worker): stream
                for rank in epoch.ranks
                for worker, name, stream in rank.streams
                if name == generator
            }
            for epoch in epochs
        ]
        alike = _alike(drawn[0])
        if alike:
            who = listed([f"rank {rank} worker {worker}" for rank, worker in alike])
            yield f"{who} draw the same random numbers from {generator}: what they augment is augmented alike"
        if any(each and each == drawn[0] for each in drawn[1:]):
            yield f"workers draw the same random numbers from {generator} in each epoch"


def _alike(digests: Mapping[Any, str]) -> list[Any]:
    """Those that have one digest, the first such group."""
    for digest, times in Counter(digests.values()).items():
        if times > 1:
            return [name for name, each in digests.items() if each == digest]
    return []


def _named(numbers: Sequence[int]) -> str:
    return listed([str(number) for number in numbers])
