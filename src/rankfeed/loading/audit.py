"""``EpochAudit``: compares the positions that all ranks delivered in an epoch with the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankfeed.errors import AuditError
from rankfeed.loading.rank_group import TorchRankGroup, process_count
from rankfeed.plan import Coverage, PositionOrder, Schedule
from rankfeed.plan.plan import Int64
from rankfeed.topology import process_group


@dataclass(frozen=True)
class EpochAudit:
    """What one or several ranks delivered of an epoch, or of what was left of it: a few integers per rank.

    Attributes:
        plan: fingerprint of the plan.
        delivered: the positions of the samples delivered, and the steps of each rank.
        unproven: samples of batches that may lack some of them, by the user's function that returned the batch.
    """

    plan: str
    delivered: Coverage
    unproven: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_rank(cls, schedule: Schedule, plan: str) -> EpochAudit:
        """The report of a rank at the start of its schedule, to be completed by `add`."""
        order = PositionOrder(schedule.plan.num_samples)  # lanes change no count at whole steps
        bounds = schedule.epoch, schedule.start, schedule.batch_size, schedule.world_size, schedule.tail
        return cls(plan, Coverage(order, *bounds, {schedule.rank: 0}))

    def add(self, schedule: Schedule, step: int, sample_ids: Int64, unproven: str = "") -> None:
        """Count the batch of the next step; ``unproven`` is the function that may have left samples out.

        Raises:
            AuditError: it is another step, or has other samples than the schedule.
        """
        next_step = self.delivered.steps[schedule.rank]
        expected = schedule.batch(step)[schedule.valid(step)]
        if step != next_step or not np.array_equal(sample_ids, expected):
            raise AuditError(
                "a batch has other samples than the plan",
                expected=f"step {next_step}" if step != next_step else f"samples {expected[:8].tolist()}",
                found=f"samples {sample_ids[:8].tolist()}",
                where=f"rank {schedule.rank}, epoch {schedule.epoch}, step {step}",
            )
        self.delivered.steps[schedule.rank] += 1
        if unproven:
            self.unproven[unproven] += len(sample_ids)

    @classmethod
    def merge(cls, reports: Sequence[EpochAudit]) -> EpochAudit:
        """The reports of several ranks as one.

        A rank that reports more than once (tensor-parallel peers read the same samples) counts once, if its
        reports agree.

        Raises:
            AuditError: there are none, they are of different plans, epochs, positions, batch sizes or world sizes,
                or peers of one rank disagree.
        """
        if not reports:
            raise AuditError("there are no reports to merge", expected="one report of each rank")
        first = reports[0]
        by_ranks: dict[tuple[int, ...], EpochAudit] = {}
        for report in reports:
            rank = f"rank {report.ranks[0]}"
            if by_ranks.setdefault(report.ranks, report).delivered != report.delivered:
                raise AuditError("processes of one rank delivered different samples", where=rank)
            if report._range() != first._range():
                raise AuditError(
                    "ranks report different parts of the data",
                    expected=f"rank {first.ranks[0]}: {first._range()}",
                    found=f"{rank}: {report._range()}",
                )
        counted = by_ranks.values()
        steps = {rank: count for report in counted for rank, count in report.delivered.steps.items()}
        unproven = sum((report.unproven for report in counted), Counter())
        return cls(first.plan, replace(first.delivered, steps=steps), unproven)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks included."""
        return tuple(sorted(self.delivered.steps))

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.delivered.world_size

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self.delivered.epoch

    @property
    def start(self) -> int:
        """The first position."""
        return self.delivered.start

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.delivered.schedule().end

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps delivered by each rank included."""
        return tuple(self.delivered.steps[rank] for rank in self.ranks)

    @property
    def complete(self) -> bool:
        """Whether all ranks are included."""
        return self.ranks == tuple(range(self.world_size))

    @property
    def missing(self) -> int:
        """Samples of the plan that were not delivered; final once all ranks are included."""
        return self.end - self.start - len(self.delivered)

    @property
    def repeated(self) -> int:
        """How often a sample was delivered that had been delivered before: 0, as `add` refuses a step again."""
        return 0

    @property
    def sound(self) -> bool | None:
        """Whether `check` passes; None (not proven) if it does, but batches may lack samples."""
        try:
            self.check()
        except AuditError:
            return False
        return None if self.unproven else True

    def check(self) -> None:
        """Raise AuditError unless every sample was delivered once, in the same number of steps on every rank.

        Samples of ``unproven`` batches count as delivered.
        """
        where = f"epoch {self.epoch}, positions {self.start} to {self.end}"
        planned = self.end - self.start
        if not self.complete:
            absent = sorted({*range(self.world_size)} - {*self.ranks})
            raise AuditError(
                f"{self.missing} samples missing: some ranks delivered nothing, or used the number of "
                "another rank",
                expected=f"{planned} samples from {self.world_size} ranks",
                found=f"{len(self.delivered)} samples from ranks {list(self.ranks)}, none from {absent[:8]}",
                where=where,
                remedy="give every process its own rank, or leave topology out so that it is detected",
            )
        if len({*self.steps}) > 1:
            raise AuditError("ranks took different numbers of steps", found=list(self.steps), where=where)
        if self.missing:
            gaps = [f"positions {gap.low} to {gap.high} missing" for gap in self.delivered.gaps(self.end)]
            raise AuditError(
                f"{self.missing} samples missing, {self.repeated} repeated",
                expected=f"{planned} samples, each once",
                found="; ".join([f"{len(self.delivered)} delivered", *gaps]),
                where=where,
            )

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {len(self.delivered)} samples, ranks {list(self.ranks)} of {self.world_size}, "
            f"steps {list(self.steps)}, {self.missing} missing, {self.repeated} repeated"
            + (f"; {not_proven(self.unproven)}" if self.unproven else "")
        )

    def _range(self) -> str:
        part = f"plan {self.plan}, epoch {self.epoch}, positions {self.start} to {self.end}"
        return f"{part}, {self.world_size} ranks, batches of {self.delivered.batch_size}"


def not_proven(unproven: Mapping[str, int]) -> str:
    """What is not proven about the batches of some functions, and the remedy."""
    counts = " and ".join(f"{count:,} samples of batches of {name}" for name, count in unproven.items())
    return (
        f"not proven: whether {counts} arrived, since the arrays of these batches do not have one row for each "
        "sample; set id_column= and return that column with the ids of all samples"
    )


def gather_audits(report: EpochAudit, *, launcher: str) -> EpochAudit | None:
    """The reports of all processes as one; None without torch.distributed. A collective."""
    processes = process_count()
    if report.world_size == 1:
        if processes > 1 and launcher != "mesh":
            raise AuditError(
                "each process has world size 1, so each of them received every sample",
                expected=f"{processes} ranks, as in torch.distributed",
                found="1 rank",
                remedy="leave topology out so that it is detected, or use Topology.from_mesh for parallel peers",
            )
        return report
    if process_group() is None:
        return None
    group = TorchRankGroup(f"rank {report.ranks[0]} of {report.world_size}")
    return EpochAudit.merge(group.gather_last(report))
