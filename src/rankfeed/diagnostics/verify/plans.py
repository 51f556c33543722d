"""Verifies that a plan delivers each sample once: counts all if it is small, otherwise checks some positions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rankfeed.diagnostics.deliveries import EpochReport, RankEpoch
from rankfeed.diagnostics.findings import Finding, Judged, merged
from rankfeed.diagnostics.judge import JudgedFacts, judge
from rankfeed.diagnostics.multiset import HashPartitions, distinct, partition_ranges
from rankfeed.plan import Plan, ReadingCost, Schedule, ShuffleQuality, Tail, measure_reading
from rankfeed.plan.quality import remedy_for
from rankfeed.plan.schedule import SampleOrder
from rankfeed.sources.source import Source
from rankfeed.topology import Topology

#: Plans with more samples than this are sampled.
COUNTED = 20_000_000
_SAMPLED_STEPS, _SAMPLED_RANKS, _SAMPLED_IDS = 64, 64, 1_000_000
_MEMORY = 256 << 20
_COUNT_RUN = (
    'count what the job delivers, for any number of samples: train with rf.Loader(..., audit="run/ledger"), then '
    "call `rankfeed verify run/ledger`"
)


@dataclass(frozen=True)
class PlanVerdict(Judged):
    """What the ranks would be given in an epoch."""

    counted: bool  # False if steps and positions were sampled
    deliveries: int  # samples that were counted, without padding
    steps: tuple[int, int]  # the least and the most that a rank takes
    missing: int  # samples that are not delivered, without those left out
    repeated: int  # deliveries of samples that were delivered before
    left_out: int  # samples that tail="drop" leaves out
    uneven: int  # the largest difference between the batch sizes of two ranks in one step
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        least, most = self.steps
        steps = f"each rank takes {least:,}" if least == most else f"ranks take {least:,} to {most:,}"
        sizes = "equal" if not self.uneven else f"equal up to {self.uneven:,} sample{'s' * (self.uneven > 1)}"
        left_out = f"; {self.left_out:,} left out by tail=drop" if self.left_out else ""
        counted = f"{self.deliveries:,} deliveries {'counted' if self.counted else 'sampled'}"
        return (
            f"{counted}: {self.missing:,} missing, {self.repeated:,} repeated; {steps} steps; "
            f"batch sizes of the ranks in a step are {sizes}{left_out}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), **self.verdict_as_dict()}


def poor_mixture(plan: Plan, quality: ShuffleQuality) -> tuple[Finding, ...]:
    """A warning if a shuffle with windows mixes the batches of a rank less well than a global one."""
    if plan.shuffle != "window" or quality.is_mixed:
        return ()
    summary = f"the batches of a rank are poorly mixed: {quality}"
    return (Finding("poorly-mixed", "warning", summary, (), remedy_for(plan)),)


def reading_of(plan: Plan, source: Source | None, **options: int) -> ReadingCost:
    """What a rank reads of a source in an epoch, with the cache that it has; None for a cache of any size."""
    cached_blocks = None if source is None else source.cached_blocks
    reading = measure_reading(plan, cached_blocks=cached_blocks, **options)
    if source is None or cached_blocks is None or plan.shuffle == "none" or not source.cache_bytes:
        return reading
    # A block that is larger than the cache is decoded from its start several times.
    passes = -(-source.decoded_bytes // (len(source.blocks) * source.cache_bytes))
    return replace(reading, decoded=reading.decoded * passes)


def verify_plan(
    plan: SampleOrder,
    *,
    ranks: int,
    batch_size: int,
    epoch: int = 0,
    start: int = 0,
    tail: Tail = "even",
    count: bool = True,
    progress: Callable[[float], None] = lambda share: None,
) -> PlanVerdict:
    """Check what all ranks would be given in an epoch from sample ``start`` on.

    With ``count``, every delivery of a small plan is counted; otherwise steps and positions are sampled.
    """
    topologies = (Topology(rank=rank, world_size=ranks) for rank in range(ranks))
    schedules = [
        Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)
        for topology in topologies
    ]
    first, lengths = schedules[0], [len(schedule) for schedule in schedules]
    counted = count and plan.num_samples <= COUNTED
    steps: Sequence[int] = range(max(lengths))
    if counted:
        others, expected = np.arange(first.start), first.end
    else:
        chance = Random(0)
        # Of many ranks the global batch is large: some represent all.
        steps = sorted({*steps[:1], *steps[-2:], *chance.sample(steps, min(len(steps), _SAMPLED_STEPS))})
        schedules = chance.sample(schedules, min(ranks, _SAMPLED_RANKS))
        others = np.unique(np.random.default_rng(0).integers(0, plan.num_samples, _SAMPLED_IDS))
        expected = 0
        for step in steps:
            low, high = first.position_after(step - 1) if step else first.start, first.position_after(step)
            others, expected = others[(others < low) | (others >= high)], expected + high - low
        expected += len(others)
    uneven = 0
    batch_sizes = [Counter[int]() for _ in range(ranks)]
    with TemporaryDirectory() as folder:
        ids = HashPartitions(Path(folder, "ids"))
        ids.add(plan.sample_ids(epoch, others))
        for done, step in enumerate(steps):
            batches = [schedule.batch(step)[schedule.valid(step)] for schedule in schedules]
            sizes = [len(batch) for batch in batches]
            for schedule, size in zip(schedules, sizes, strict=True):
                batch_sizes[schedule.rank][size] += 1
            uneven = max(uneven, max(sizes) - min(sizes))
            ids.add(np.concatenate(batches))
            progress((done + 1) / len(steps))
        parts = partition_ranges(ids.size, _MEMORY)
        unique = sum(len(distinct(ids.read(*part).keys)) for part in parts)
    progress(1.0)
    deliveries, repeated = len(ids) - (first.start if counted else 0), len(ids) - unique
    missing = expected - unique if len(schedules) == ranks else 0
    figures = (
        RankEpoch(rank, lengths[rank], sum(size * count for size, count in sizes.items()), sizes, {})
        for rank, sizes in enumerate(batch_sizes)
    )
    report = EpochReport(epoch, deliveries, deliveries - repeated, missing, 0, tuple(figures))
    findings = [*judge([report], JudgedFacts("ids", "plan"))]
    if uneven > 1:
        findings.append(Finding("uneven-batches", "error", f"batch sizes in a step differ by {uneven:,}"))
    if not counted:
        what = f"{deliveries:,} deliveries were sampled, not all counted"
        limit = f"plans of up to {COUNTED:,} samples are counted"
        findings.append(Finding("sampled", "unproven", what, (limit,), _COUNT_RUN))
    return PlanVerdict(
        counted,
        deliveries,
        (min(lengths), max(lengths)),
        missing,
        repeated,
        left_out=plan.num_samples - first.end,
        uneven=uneven,
        findings=merged(findings),
    )
