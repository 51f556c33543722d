"""A pass of a loader over an epoch: what happens at each step between the engine and the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankfeed.loading import audit as proof
from rankfeed.loading.device import to_device
from rankfeed.loading.ledger import LedgerPass
from rankfeed.plan import InvertibleBloomTable, Schedule

if TYPE_CHECKING:
    from rankfeed.loading.loader import Loader


class Iteration:
    """One pass over what is left of an epoch: batches handed over, and counted or written down as they are.

    Args:
        loader: whose; it is moved on by each step while this pass has its turn.
        schedule: the steps, unless the loader stands elsewhere by the time of the first.
        turn: of this pass.
    """

    def __init__(self, loader: Loader, schedule: Schedule, turn: int) -> None:
        self._loader = loader
        self._schedule = schedule
        self._turn = turn
        self._made = loader._run(schedule)
        self._delivered = InvertibleBloomTable() if loader.audit is True else None
        self._ledger: LedgerPass | None = None
        self._begun = self._over = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if not self._begun:
            self._begin()
        self._loader._stats.asked()
        try:
            self._loader._maker.fix_layout()  # before the first batch, in the process that iterates
            made = next(self._made)
            batch = made.batch if self._loader.device is None else to_device(made.batch, self._loader.device)
            if made.step + 1 == len(self._schedule):
                self._loader.source.check_unchanged()
            if self._ledger is not None:
                self._ledger.delivered(made.step)
        except BaseException as error:
            self._over = True
            self._loader._stats.answered()
            if isinstance(error, StopIteration):
                self._loader._exhausted(self._turn)
                self._conclude()
            raise
        if self._delivered is not None:
            self._delivered.add(made.sample_ids)
        self._loader._stats.delivered(made)
        self._loader._moved(self._turn, self._schedule.position_after(made.step))
        if made.step + 1 == len(self._schedule):
            # Who counts steps (Lightning does) never asks for one more: workers are free, and the audit due, now.
            next(self._made, None)
            self._conclude()
        return batch

    def _begin(self) -> None:
        schedule = self._loader._begin(self._turn)
        if schedule is not None:
            self._schedule, self._made = schedule, self._loader._run(schedule)
        if self._loader.ledger is not None:
            self._ledger = LedgerPass(self._loader.ledger, self._loader, self._schedule)
        self._begun = True

    def _conclude(self) -> None:
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            report = proof.EpochAudit.of_rank(self._schedule, delivered)
            self._loader.audit_report = report
            together = proof.gather(report, launcher=self._loader.topology.launcher)
            if together is not None:
                self._loader.audit_report = together
                together.check()
