"""Measures how well an order mixes the data, and how many blocks a rank reads for it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import exp

import numpy as np

from rankfeed.plan.plan import Int64, Plan
from rankfeed.plan.schedule import Schedule, Tail
from rankfeed.topology import Topology

#: Share of the classes of a global shuffle that a well mixed batch has, on data sorted by label.
ENOUGH_CLASSES = 0.9

#: Classes of the data that the measurement assumes, all of the same number of samples.
_CLASSES = 10
#: Batches that are examined, the rows of all of them, and the rows of a global batch.
_BATCHES, _ROWS, _GLOBAL_ROWS = 96, 2**14, 256
#: Steps of a rank whose reading is counted, and their rows; of a longer epoch it is estimated from as many.
_COUNTED_STEPS, _COUNTED_ROWS = 2**11, 2**19


@dataclass(frozen=True)
class ShuffleQuality:
    """How well batches are mixed: on data with ten classes of equal size, sorted as a whole or in each block."""

    classes: float  # in a rank's batch, relative to a global shuffle, of the data that are mixed less well
    global_classes: float  # in a global batch, likewise
    blocks: float  # that the rows of a rank's batch are from, on average

    @property
    def is_mixed(self) -> bool:
        """Whether the batches of a rank are mixed nearly as well as by a global shuffle."""
        return self.classes >= ENOUGH_CLASSES

    def __str__(self) -> str:
        return (
            f"on data sorted by label, as a whole or in each block, they have {self.classes:.0%} of the classes "
            f"that a global shuffle gives, from {self.blocks:.1f} blocks on average"
        )


@dataclass(frozen=True)
class ReadingCost:
    """What a rank reads in an epoch."""

    share: float | None  # of the blocks; None if too few rows could be examined
    decoded: int  # blocks that it decodes, a block again if it left the cache in between


def remedy_for(plan: Plan) -> str:
    """What improves the mixture of an order with windows."""
    remedy = (
        "write the data with smaller row groups, or with rankfeed.write, whose rows are read singly; use a larger "
        'window; or use shuffle="global", which decodes blocks repeatedly if they do not fit into the cache'
    )
    return f"{remedy}; a checkpoint of an earlier version continues in its order" if plan.order == 1 else remedy


def _schedule(plan: Plan, batch_size: int, topology: Topology, epoch: int) -> Schedule:
    tail: Tail = "even" if plan.num_samples >= topology.world_size else "pad"
    return Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, tail=tail)


def measure_quality(plan: Plan, *, batch_size: int, world_size: int, epoch: int = 0) -> ShuffleQuality:
    """Measure how well batches are mixed: of the first, middle and last rank, at steps all over the epoch.

    If the epoch has few steps, later epochs are examined too.

    Examples:
        >>> quality = measure_quality(Plan([1000] * 100), batch_size=16, world_size=4)
        >>> quality.is_mixed, round(quality.blocks)
        (True, 15)
    """
    batches = max(12, min(_BATCHES, _ROWS // batch_size))
    ranks, draw = sorted({0, world_size // 2, world_size - 1}), np.random.default_rng(0)
    rank_batches: list[Int64] = []
    global_batches: list[Int64] = []
    while len(rank_batches) < batches:
        for index, rank in enumerate(ranks):
            schedule = _schedule(plan, batch_size, Topology(rank, world_size), epoch)
            last = max(0, len(schedule) - 3)  # the last two may be smaller
            steps = np.unique(np.linspace(0, last, batches, dtype=np.int64))
            # Other steps of each rank, since ranks have the same global batch in one step.
            for step in steps[index % len(steps) :: len(ranks)].tolist():
                ids, _ = schedule.batches(range(step, step + 1))
                rank_batches.append(ids[schedule.valid(step)])
                low, high = step * schedule.global_batch_size, schedule.position_after(step)
                drawn = draw.choice(high - low, min(high - low, _GLOBAL_ROWS), replace=False)
                global_batches.append(plan.sample_ids(epoch, low + drawn))
        epoch += 1
    return ShuffleQuality(
        classes=_relative_classes(rank_batches, plan),
        global_classes=_relative_classes(global_batches, plan),
        blocks=float(np.mean([len(np.unique(plan.block_of(ids))) for ids in rank_batches])),
    )


def _relative_classes(batches: list[Int64], plan: Plan) -> float:
    """Classes in batches, relative to batches drawn from all samples without replacement."""
    total, starts = plan.num_samples, plan.block_starts
    sizes, parts = np.diff(starts), np.arange(_CLASSES + 1)
    edges = total * parts // _CLASSES
    of_classes = [(sizes * (part + 1) // _CLASSES - sizes * part // _CLASSES).sum() for part in parts[:-1]]

    sorted_as_a_whole = [edges.searchsorted(ids, side="right") for ids in batches]
    sorted_in_blocks = []
    for ids in batches:
        block = plan.block_of(ids)
        sorted_in_blocks.append(((ids - starts[block] + 1) * _CLASSES - 1) // sizes[block])
    return min(
        sum(len(np.unique(labels)) for labels in by_batch) / _expected_classes(batches, counts)
        for by_batch, counts in ((sorted_as_a_whole, np.diff(edges)), (sorted_in_blocks, np.array(of_classes)))
    )


def _expected_classes(batches: list[Int64], sizes: Int64) -> float:
    """Classes that batches of a global shuffle have, of classes of these sizes."""
    total, expected = int(sizes.sum()), 0.0
    for rows, count in Counter(map(len, batches)).items():
        draws = np.arange(rows)
        for size in sizes.tolist():
            expected += count * (1 - np.prod(np.maximum(0, total - size - draws) / (total - draws)))
    return float(expected)


def measure_reading(
    plan: Plan, *, batch_size: int, world_size: int, cached_blocks: int | None = None, epoch: int = 0
) -> ReadingCost:
    """Measure which blocks the middle rank reads in an epoch, and how many it decodes.

    A rank's cache holds the ``cached_blocks`` that were used last; None if it holds all that are used again.

    Examples:
        >>> measure_reading(Plan([10] * 100, shuffle="none"), batch_size=10, world_size=2)
        ReadingCost(share=0.5, decoded=50)
    """
    schedule = _schedule(plan, batch_size, Topology(world_size // 2, world_size), epoch)
    steps = len(schedule)
    counted = min(steps, _COUNTED_STEPS, max(2, _COUNTED_ROWS // batch_size))
    spread = np.unique(np.linspace(0, steps - 1, counted, dtype=np.int64)).tolist()
    rows = np.concatenate([schedule.batches(range(step, step + 1))[0] for step in spread])
    distinct, blocks_with_samples = len(np.unique(plan.block_of(rows))), plan.num_nonempty_blocks
    read = distinct if counted == steps else _estimate_distinct(distinct, len(rows), blocks_with_samples)
    share = None if read is None else read / blocks_with_samples
    if cached_blocks is None and read is not None:
        return ReadingCost(share, read)
    cache: OrderedDict[int, None] = OrderedDict()
    decoded = np.zeros(counted, np.int64)
    for step in range(counted):
        blocks = np.unique(plan.block_of(schedule.batch(step))).tolist()
        decoded[step] = sum(block not in cache for block in blocks)
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while cached_blocks is not None and len(cache) > cached_blocks:
            cache.popitem(last=False)
    if counted < steps:  # by half of them the cache is full
        return ReadingCost(share, round(max(read or 0, decoded[counted // 2 :].mean() * steps)))
    return ReadingCost(share, int(decoded.sum()))


def _estimate_distinct(distinct: int, draws: int, most: int) -> int | None:
    """Number of blocks of which ``draws`` had ``distinct`` different ones; None if that is too uncertain."""
    if distinct > 0.9 * draws:
        return None
    low, high = distinct, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle * (1 - exp(-draws / middle)) >= distinct else (middle + 1, high)
    return low
