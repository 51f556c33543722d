"""Whether a plan delivers each sample once: counted if it is small enough, otherwise sampled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed.diagnostics.findings import Finding, Judged
from rankfeed.plan import Schedule, Tail
from rankfeed.plan.schedule import SampleOrder
from rankfeed.topology import Topology

#: Plans with more samples than this are sampled.
COUNTED = 20_000_000
_SAMPLED_STEPS, _SAMPLED_RANKS, _SAMPLED_IDS = 64, 64, 1_000_000


@dataclass(frozen=True)
class PlanVerdict(Judged):
    """What the ranks would be given in an epoch.

    Attributes:
        counted: True if every delivery was counted; False if steps and positions were sampled.
        deliveries: samples that were counted, without padding.
        steps: the least and the most that a rank takes.
        missing: samples that are not delivered, without those that ``tail="drop"`` leaves out.
        repeated: deliveries of samples that were delivered before.
        left_out: samples that ``tail="drop"`` leaves out.
        uneven: the largest difference between the batch sizes of two ranks in one step.
    """

    counted: bool
    deliveries: int
    steps: tuple[int, int]
    missing: int
    repeated: int
    left_out: int
    uneven: int

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, or could not be shown."""
        least, most = self.steps
        wrong = {
            "uneven-steps": (least < most, f"ranks take {least:,} to {most:,} steps"),
            "missing-samples": (self.missing > 0, f"{self.missing:,} samples are not delivered"),
            "repeated-samples": (self.repeated > 0, f"{self.repeated:,} deliveries repeat a sample"),
            "uneven-batches": (self.uneven > 1, f"batch sizes in a step differ by {self.uneven:,}"),
        }
        found = [Finding(code, "error", what) for code, (is_so, what) in wrong.items() if is_so]
        if not self.counted:
            what = f"{self.deliveries:,} deliveries were sampled, not all counted"
            found.append(Finding("sampled", "unproven", what, (), f"at most {COUNTED:,} samples are counted"))
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.verdict_as_dict(), **vars(self)}

    def __str__(self) -> str:
        least, most = self.steps
        steps = f"each rank takes {least:,}" if least == most else f"ranks take {least:,} to {most:,}"
        sizes = "equal" if not self.uneven else f"equal up to {self.uneven:,} sample{'s' * (self.uneven > 1)}"
        counted = f"{self.deliveries:,} deliveries {'counted' if self.counted else 'sampled'}"
        return (
            f"{counted}: {self.missing:,} missing, {self.repeated:,} repeated; {steps} steps; batch sizes of the "
            f"ranks in a step are {sizes}" + (f"; {self.left_out:,} left out by tail=drop" * bool(self.left_out))
        )


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
    """Check what all ranks would be given in an epoch.

    Args:
        plan: the order.
        ranks: world size.
        batch_size: rows of a rank's batch.
        epoch: which epoch.
        start: samples consumed already.
        tail: how the epoch ends.
        count: count every delivery if the plan is small enough; otherwise only sample.
        progress: called with the share that is done.

    Raises:
        PlanError: there is no such schedule.

    Examples:
        >>> from rankfeed.plan import Plan
        >>> verdict = verify_plan(Plan(100), ranks=3, batch_size=8)
        >>> verdict.sound, verdict.steps
        (True, (5, 5))
    """
    schedules = []
    for rank in range(ranks):
        topology = Topology(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
        schedules.append(
            Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)
        )
    counted = count and plan.num_samples <= COUNTED
    missing, repeated, deliveries, uneven = (_count if counted else _sample)(plan, schedules, progress)
    lengths = [len(schedule) for schedule in schedules]
    left_out = plan.num_samples - schedules[0].end
    return PlanVerdict(counted, deliveries, (min(lengths), max(lengths)), missing, repeated, left_out, uneven)


_Figures = tuple[int, int, int, int]  # missing, repeated, deliveries, uneven


def _count(plan: SampleOrder, schedules: list[Schedule], progress: Callable[[float], None]) -> _Figures:
    first, steps = schedules[0], max(map(len, schedules))
    counts = np.zeros(plan.num_samples, np.int32)
    if first.start:
        counts[plan.sample_ids(first.epoch, np.arange(first.start))] += 1
    deliveries = uneven = 0
    for step in range(steps):
        batches = [each.batch(step)[each.valid(step)] for each in schedules if step < len(each)]
        for batch in batches:
            np.add.at(counts, batch, 1)
        sizes = [len(batch) for batch in batches]
        deliveries += sum(sizes)
        uneven = max(uneven, max(sizes) - min(sizes))
        progress((step + 1) / steps)
    missing = int((counts == 0).sum()) - (plan.num_samples - first.end)
    return missing, int(np.maximum(counts - 1, 0).sum()), deliveries, uneven


def _sample(plan: SampleOrder, schedules: list[Schedule], progress: Callable[[float], None]) -> _Figures:
    """Some steps: do the shares of the ranks make up the global batch? Some positions: is no id there twice?"""
    chance = np.random.default_rng(0)
    first, total = schedules[0], len(schedules[0])
    steps = {0, max(0, total - 2), total - 1, *chance.integers(0, total, _SAMPLED_STEPS).tolist()} if total else []
    # The global batch of many ranks is large: some ranks represent all.
    some = [schedules[rank] for rank in np.unique(chance.integers(0, len(schedules), _SAMPLED_RANKS))]
    deliveries = missing = repeated = uneven = 0
    for done, step in enumerate(sorted(steps)):
        batches = [schedule.batch(step)[schedule.valid(step)] for schedule in some]
        together, sizes = np.concatenate(batches), [len(batch) for batch in batches]
        uneven = max(uneven, max(sizes) - min(sizes))
        deliveries += len(together)
        repeated += len(together) - len(np.unique(together))
        if len(some) == len(schedules):
            low = first.position_after(step - 1) if step else first.start
            expected = plan.sample_ids(first.epoch, np.arange(low, first.position_after(step)))
            missing += len(np.setdiff1d(expected, together))
        progress((done + 1) / (len(steps) + 1))
    ids = plan.sample_ids(first.epoch, np.unique(chance.integers(0, plan.num_samples, _SAMPLED_IDS)))
    progress(1.0)
    return missing, repeated + len(ids) - len(np.unique(ids)), deliveries + len(ids), uneven
