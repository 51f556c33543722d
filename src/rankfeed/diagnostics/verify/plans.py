"""Does a plan keep its promises? Counted where it is small enough to count, sampled where it is not."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankfeed.plan import Schedule, Tail
from rankfeed.plan.schedule import SampleOrder
from rankfeed.topology import Topology

#: Up to this many samples every delivery is counted: a byte each, and some seconds.
COUNTED = 20_000_000
_SAMPLED_STEPS = 64
_SAMPLED_IDS = 1_000_000


@dataclass(frozen=True)
class PlanVerdict:
    """What counting (or sampling) the deliveries of an epoch found.

    Attributes:
        counted: True where every delivery was counted; False where steps and positions were sampled.
        deliveries: samples looked at (rows that only fill are not among them).
        steps: of each rank, least and most.
        missing: samples never delivered, apart from those that ``tail="drop"`` leaves out.
        repeated: deliveries too many.
        left_out: samples that ``tail="drop"`` leaves out.
        uneven: most by which two ranks' rows differ at a step.
    """

    counted: bool
    deliveries: int
    steps: tuple[int, int]
    missing: int
    repeated: int
    left_out: int
    uneven: int

    @property
    def ok(self) -> bool:
        """Whether every sample comes once, in equal steps."""
        return self.missing == self.repeated == 0 and self.steps[0] == self.steps[1] and self.uneven <= 1


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
    """Look at what all ranks would be given in an epoch.

    Args:
        plan: the order.
        ranks: world size.
        batch_size: rows of a rank's batch.
        epoch: which epoch.
        start: samples consumed already.
        tail: how the epoch ends.
        count: count every delivery where the plan is small enough for that; else only sample.
        progress: called with the share done.

    Raises:
        PlanError: there is no such schedule.

    Examples:
        >>> from rankfeed.plan import Plan
        >>> verify_plan(Plan(100), ranks=3, batch_size=8).ok
        True
    """
    schedules = [
        Schedule(
            plan,
            batch_size=batch_size,
            topology=Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks),
            epoch=epoch,
            start=start,
            tail=tail,
        )
        for rank in range(ranks)
    ]
    lengths = [len(schedule) for schedule in schedules]
    left_out = plan.num_samples - schedules[0].end
    if count and plan.num_samples <= COUNTED:
        return _count(plan, schedules, lengths, left_out, progress)
    return _sample(plan, schedules, lengths, left_out, progress)


def _count(
    plan: SampleOrder,
    schedules: list[Schedule],
    lengths: list[int],
    left_out: int,
    progress: Callable[[float], None],
) -> PlanVerdict:
    counts = np.zeros(plan.num_samples, np.int32)
    start = schedules[0].start
    if start:
        counts[plan.sample_ids(schedules[0].epoch, np.arange(start))] += 1
    deliveries = uneven = 0
    for step in range(max(lengths)):
        sizes = []
        for schedule in schedules:
            valid = schedule.valid(step)
            np.add.at(counts, schedule.batch(step)[valid], 1)
            sizes.append(int(valid.sum()))
        deliveries += sum(sizes)
        uneven = max(uneven, max(sizes) - min(sizes))
        progress((step + 1) / max(lengths))
    return PlanVerdict(
        counted=True,
        deliveries=deliveries,
        steps=(min(lengths), max(lengths)),
        missing=int((counts == 0).sum()) - left_out,
        repeated=int(np.maximum(counts - 1, 0).sum()),
        left_out=left_out,
        uneven=uneven,
    )


def _sample(
    plan: SampleOrder,
    schedules: list[Schedule],
    lengths: list[int],
    left_out: int,
    progress: Callable[[float], None],
) -> PlanVerdict:
    """Look at some steps (do the ranks' shares make up the global batch?) and some positions (no id twice?)."""
    some = np.random.default_rng(0)
    first = schedules[0]
    steps = {0, max(0, len(first) - 2), len(first) - 1} if len(first) else set()
    steps |= {int(step) for step in some.integers(0, len(first), _SAMPLED_STEPS if len(first) else 0)}
    # A batch of all ranks may be larger than what is worth looking at: a few ranks stand for the others then.
    looked_at = [int(rank) for rank in np.unique(some.integers(0, len(schedules), 64))]
    deliveries = missing = repeated = uneven = 0
    for done, step in enumerate(sorted(steps)):
        batches = [schedules[rank].batch(step)[schedules[rank].valid(step)] for rank in looked_at]
        together = np.concatenate(batches)
        sizes = [len(batch) for batch in batches]
        uneven = max(uneven, max(sizes) - min(sizes))
        deliveries += len(together)
        repeated += len(together) - len(np.unique(together))
        if len(looked_at) == len(schedules):
            low = first.position_after(step - 1) if step else first.start
            promised = plan.sample_ids(first.epoch, np.arange(low, first.position_after(step)))
            missing += len(np.setdiff1d(promised, together))
        progress((done + 1) / (len(steps) + 1))
    positions = np.unique(some.integers(0, plan.num_samples, _SAMPLED_IDS))
    ids = plan.sample_ids(first.epoch, positions)
    repeated += len(ids) - len(np.unique(ids))
    progress(1.0)
    return PlanVerdict(
        counted=False,
        deliveries=deliveries + len(ids),
        steps=(min(lengths), max(lengths)),
        missing=missing,
        repeated=repeated,
        left_out=left_out,
        uneven=uneven,
    )
