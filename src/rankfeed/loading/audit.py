"""Compares what the ranks delivered in an epoch with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankfeed.errors import AuditError
from rankfeed.loading.rank_group import TorchRankGroup, is_distributed, process_count
from rankfeed.plan import InvertibleBloomTable, MultisetDifference, Schedule

_CHUNK = 1 << 16


@dataclass(frozen=True)
class EpochAudit:
    """What one or several ranks delivered of an epoch, or of what was left of it. About 36 KiB; pickles.

    Attributes:
        ranks: the ranks included.
        world_size: number of ranks of the job.
        epoch: the epoch.
        start: the first position.
        end: the position after the last one.
        steps: of each rank included.
        delivered: counts of the samples delivered.
        planned: counts of the samples of the plan; each rank counts an equal part.
    """

    ranks: tuple[int, ...]
    world_size: int
    epoch: int
    start: int
    end: int
    steps: tuple[int, ...]
    delivered: InvertibleBloomTable
    planned: InvertibleBloomTable

    @classmethod
    def of_rank(cls, schedule: Schedule, delivered: InvertibleBloomTable) -> EpochAudit:
        """The report of a rank at the end of its schedule.

        Counting the planned samples costs as much as planning them, so each rank counts an equal range of
        positions (contiguous, unlike its batches).
        """
        end = schedule.end
        span = end - schedule.start
        low = schedule.start + schedule.rank * span // schedule.world_size
        high = schedule.start + (schedule.rank + 1) * span // schedule.world_size
        planned = InvertibleBloomTable()
        for first in range(low, high, _CHUNK):
            positions = np.arange(first, min(first + _CHUNK, high))
            planned.add(schedule.plan.sample_ids(schedule.epoch, positions))
        ranks, steps = (schedule.rank,), (len(schedule),)
        bounds = schedule.epoch, schedule.start, end
        return cls(ranks, schedule.world_size, *bounds, steps, delivered, planned)

    @classmethod
    def merge(cls, reports: Sequence[EpochAudit]) -> EpochAudit:
        """The reports of several ranks as one.

        A rank that reports more than once (tensor-parallel peers read the same samples) counts once, if its
        reports agree.

        Raises:
            AuditError: there are none, they are of different epochs, positions or world sizes, or peers of one
                rank disagree.
        """
        if not reports:
            raise AuditError("there are no reports to merge", expected="one report of each rank")
        first = reports[0]
        by_rank: dict[int, EpochAudit] = {}
        delivered, planned = InvertibleBloomTable(), InvertibleBloomTable()
        for report in sorted(reports, key=lambda report: report.ranks):
            if report._range() != first._range():
                raise AuditError(
                    "ranks report different parts of the data",
                    expected=f"rank {first.ranks[0]}: {first._range()}",
                    found=f"rank {report.ranks[0]}: {report._range()}",
                )
            known = [by_rank[rank] for rank in report.ranks if rank in by_rank]
            if known:
                if known[0].delivered.difference(report.delivered):
                    raise AuditError(
                        "processes of one rank delivered different samples", where=f"rank {report.ranks[0]}"
                    )
                continue
            by_rank |= dict.fromkeys(report.ranks, report)
            delivered.merge(report.delivered)
            planned.merge(report.planned)
        ranks = tuple(sorted(by_rank))
        steps = tuple(by_rank[rank].steps[by_rank[rank].ranks.index(rank)] for rank in ranks)
        bounds = first.epoch, first.start, first.end
        return cls(ranks, first.world_size, *bounds, steps, delivered, planned)

    @property
    def complete(self) -> bool:
        """Whether all ranks are included."""
        return self.ranks == tuple(range(self.world_size))

    def difference(self) -> MultisetDifference:
        """Samples missing and repeated; final once all ranks are included."""
        return self.delivered.difference(self.planned)

    def check(self) -> None:
        """Raise AuditError unless every sample was delivered once, in the same number of steps on every rank."""
        where = f"epoch {self.epoch}, positions {self.start} to {self.end}"
        if not self.complete:
            absent = sorted({*range(self.world_size)} - {*self.ranks})
            missing = self.end - self.start - self.delivered.count
            raise AuditError(
                f"{missing} samples missing: some ranks delivered nothing, or with the number of another rank",
                expected=f"{self.end - self.start} samples from {self.world_size} ranks",
                found=f"{self.delivered.count} samples from ranks {list(self.ranks)}, none from {absent[:8]}",
                where=where,
                remedy="give every process its own rank, or leave topology out so that it is detected",
            )
        difference = self.difference()
        if difference:
            least = "" if difference.exact else "at least "
            raise AuditError(
                f"{least}{difference.missing} samples missing, {least}{difference.repeated} repeated",
                expected=f"{self.planned.count} samples, each once",
                found=f"{self.delivered.count} delivered" + _describe_ids(difference),
                where=where,
            )
        if len({*self.steps}) > 1:
            raise AuditError("ranks took different numbers of steps", found=list(self.steps), where=where)

    def __str__(self) -> str:
        difference = self.difference()
        return (
            f"epoch {self.epoch}: {self.delivered.count} samples, ranks {list(self.ranks)} of {self.world_size}, "
            f"steps {list(self.steps)}, {difference.missing} missing, {difference.repeated} repeated"
        )

    def _range(self) -> str:
        return f"epoch {self.epoch}, positions {self.start} to {self.end}, {self.world_size} ranks"


def gather_audits(report: EpochAudit, *, launcher: str) -> EpochAudit | None:
    """The reports of all processes as one; None without torch.distributed. A collective."""
    processes = process_count()
    if report.world_size == 1:
        if processes > 1 and launcher != "mesh":
            raise AuditError(
                "each process is the only rank by its topology: all of them were given every sample",
                expected=f"{processes} ranks, as in torch.distributed",
                found="1 rank",
                remedy="leave topology out so that it is detected, or use Topology.from_mesh for parallel peers",
            )
        return report
    if not is_distributed():
        return None
    group = TorchRankGroup(f"rank {report.ranks[0]} of {report.world_size}")
    reports = group.gather(report)
    # Gloo's thread needs the GIL once more to release the tensors: a process that ends right here aborts.
    group.barrier()
    return EpochAudit.merge(reports)


def _describe_ids(difference: MultisetDifference) -> str:
    some = list(difference.ids.items())[:8]
    return "; ".join(["", *(f"sample {each} {count:+d}" for each, count in some)])
