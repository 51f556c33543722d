"""The proof that an epoch was delivered: what each rank counted, compared with what the plan promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed.errors import AuditError
from rankfeed.plan import InvertibleBloomTable, MultisetDifference, Schedule

_CHUNK = 1 << 16


@dataclass(frozen=True)
class EpochAudit:
    """What one rank, or several together, delivered of a stretch of an epoch. About 36 KiB; pickles.

    Attributes:
        ranks: which ranks it tells of.
        world_size: of how many.
        epoch: of which epoch.
        start: the stretch's first position.
        end: and the one after its last.
        steps: of each rank.
        delivered: the samples delivered.
        promised: the same ranks' shares of counting what the plan promised.
    """

    ranks: tuple[int, ...]
    world_size: int
    epoch: int
    start: int
    end: int
    steps: tuple[int, ...]
    delivered: InvertibleBloomTable
    promised: InvertibleBloomTable

    @classmethod
    def of_rank(cls, schedule: Schedule, delivered: InvertibleBloomTable) -> EpochAudit:
        """The report of a rank at the end of its schedule.

        Counting the promised samples costs what planning them did: each rank counts an equal stretch of
        positions, cut in another way than the batches were.
        """
        end = schedule.end
        span = end - schedule.start
        low = schedule.start + schedule.rank * span // schedule.world_size
        high = schedule.start + (schedule.rank + 1) * span // schedule.world_size
        promised = InvertibleBloomTable()
        for first in range(low, high, _CHUNK):
            positions = np.arange(first, min(first + _CHUNK, high))
            promised.add(schedule.plan.sample_ids(schedule.epoch, positions))
        return cls(
            (schedule.rank,),
            schedule.world_size,
            schedule.epoch,
            schedule.start,
            end,
            (len(schedule),),
            delivered,
            promised,
        )

    @classmethod
    def merge(cls, reports: Sequence[EpochAudit]) -> EpochAudit:
        """The reports of several ranks as one.

        A rank that reports more than once (tensor-parallel peers read the same samples) counts once, if its
        reports agree.

        Raises:
            AuditError: there are none, they tell of different epochs, stretches or world sizes, or peers of one
                rank disagree.
        """
        if not reports:
            raise AuditError("there are no reports to merge", expected="one of each rank")
        first = reports[0]
        by_rank: dict[int, EpochAudit] = {}
        delivered, promised = InvertibleBloomTable(), InvertibleBloomTable()
        for report in sorted(reports, key=lambda report: report.ranks):
            if report._stretch() != first._stretch():
                raise AuditError(
                    "ranks report different stretches of data",
                    expected=f"rank {first.ranks[0]}: {first._stretch()}",
                    found=f"rank {report.ranks[0]}: {report._stretch()}",
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
            promised.merge(report.promised)
        steps = {rank: report.steps[report.ranks.index(rank)] for rank, report in by_rank.items()}
        ranks = tuple(sorted(steps))
        return cls(
            ranks,
            first.world_size,
            first.epoch,
            first.start,
            first.end,
            tuple(steps[rank] for rank in ranks),
            delivered,
            promised,
        )

    @property
    def complete(self) -> bool:
        """Whether all ranks are in it."""
        return self.ranks == tuple(range(self.world_size))

    def difference(self) -> MultisetDifference:
        """Samples missing and repeated. Holds once all ranks are in the report."""
        return self.delivered.difference(self.promised)

    def check(self) -> None:
        """Raise AuditError unless every sample was delivered once, in the same number of steps on every rank."""
        where = f"epoch {self.epoch}, positions {self.start} to {self.end}"
        if not self.complete:
            absent = sorted({*range(self.world_size)} - {*self.ranks})
            missing = self.end - self.start - self.delivered.count
            raise AuditError(
                f"{missing} samples missing: some ranks delivered nothing, or under another rank's number",
                expected=f"{self.end - self.start} samples from {self.world_size} ranks",
                found=f"{self.delivered.count} samples from ranks {list(self.ranks)}, none from {absent[:8]}",
                where=where,
                remedy="give every process its own rank, or leave topology out so that it is found",
            )
        difference = self.difference()
        if difference:
            least = "" if difference.exact else "at least "
            raise AuditError(
                f"{least}{difference.missing} samples missing, {least}{difference.repeated} repeated",
                expected=f"{self.promised.count} samples, each once",
                found=f"{self.delivered.count} delivered" + _named(difference),
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

    def _stretch(self) -> str:
        return f"epoch {self.epoch}, positions {self.start} to {self.end}, {self.world_size} ranks"


def gather(report: EpochAudit, *, launcher: str) -> EpochAudit | None:
    """The reports of all processes as one, if torch.distributed can bring them together; else None.

    A collective: every process must call it.

    Args:
        report: of this rank.
        launcher: who says that it is this rank. Alone in a data-parallel dimension of a mesh is no contradiction.

    Raises:
        AuditError: this process takes itself for the only rank, and is one of several.
    """
    import torch.distributed as dist

    together = dist.is_available() and dist.is_initialized()
    if report.world_size == 1:
        if together and dist.get_world_size() > 1 and launcher != "mesh":
            raise AuditError(
                "each process takes itself for the only rank: all of them were given every sample",
                expected=f"{dist.get_world_size()} ranks, as torch.distributed says",
                found="1 rank",
                remedy="leave topology out so that it is found, or take Topology.from_mesh for parallel peers",
            )
        return report
    if not together:
        return None
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    # Gloo's thread needs Python's lock once more, to let go of the tensors; a process that ended right here would
    # take the interpreter from under it and abort. Waiting for the others leaves the lock free meanwhile.
    dist.barrier()
    return EpochAudit.merge(reports)


def _named(difference: MultisetDifference) -> str:
    some = list(difference.ids.items())[:8]
    return "; ".join(["", *(f"sample {each} {count:+d}" for each, count in some)])
