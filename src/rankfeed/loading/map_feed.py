"""The batches of a source that is read by sample id, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankfeed._util.native import native_library
from rankfeed._util.process_info import cpus_per_process
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.loading.engines.copy import copy_ahead
from rankfeed.loading.options import FeedOptions
from rankfeed.loading.state import LoaderState, decode_as, encode_state, resume_cursor
from rankfeed.plan import Cursor, Plan, Schedule

if TYPE_CHECKING:  # imported when they are needed: the first batch does not wait for them
    from rankfeed.loading.audit import EpochAudit
    from rankfeed.loading.engines.process import ProcessEngine
    from rankfeed.loading.engines.thread import ThreadEngine

#: Lanes accepted from a state: a forged one must not request an array of any length.
_MAX_LANES = 2**20


class MapFeed:
    """The batches of a Loader over a source; with ``takes_lanes`` a loaded state decides the number of lanes."""

    def __init__(
        self,
        plan: Plan,
        builder: BatchBuilder,
        options: FeedOptions,
        *,
        takes_lanes: bool,
        audit: bool,
        ledger: Path | None,
    ) -> None:
        self.plan, self.source = plan, builder.source
        self.audit_report: EpochAudit | None = None
        self._builder, self._options = builder, options
        self._engine: ThreadEngine | ProcessEngine | None = None
        if options.num_workers and options.worker_kind == "thread":
            from rankfeed.loading.engines.thread import ThreadEngine

            self._engine = ThreadEngine(builder, options.num_workers, options.prefetch_factor)
        elif options.num_workers:
            from rankfeed.loading.engines.process import ProcessEngine

            self._engine = ProcessEngine(builder, options.num_workers, options.prefetch_factor)
        self._takes_lanes, self._audit, self._ledger = takes_lanes, audit, ledger

    def schedule(self, begun: Cursor) -> Schedule:
        options = self._options
        return begun.schedule(self.plan, options.batch_size, options.topology.resolve(), options.tail)

    def steps_left(self, begun: Cursor) -> int:
        return len(self.schedule(begun))

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        self.source.check_unchanged()
        return encode_state(cursor, self.plan.describe(), self.source.fingerprint)

    def load_state(self, state: Mapping[str, Any]) -> Cursor:
        parsed = decode_as(LoaderState, state)
        plan = self.plan
        lanes = parsed.plan.get("lanes")
        if self._takes_lanes and isinstance(lanes, int) and 1 <= lanes <= _MAX_LANES:
            # Lanes are part of the order: a job continues with those it began with.
            plan = Plan(self.source.blocks, shuffle=plan.shuffle, seed=plan.seed, window=plan.window, lanes=lanes)
        cursor = resume_cursor(parsed, plan.describe(), self.source.fingerprint)
        self.plan = plan
        return cursor

    def _batches(self, schedule: Schedule, ranks_of_node: int) -> Iterator[BatchResult]:
        builder, options = self._builder, self._options
        uses_processes = options.num_workers > 0 and options.worker_kind == "process"
        cpus, library = cpus_per_process(ranks_of_node), native_library()
        if not cpus and library is not None:
            # Ranks that share CPUs: after each switch, a rank loads its batches into the caches again.
            library.rankfeed_use_long_slices()
        # Without workers, on a second CPU: on one that is taken, it slows down this rank or another.
        may_copy = options.num_workers > 0 or cpus > 1
        if may_copy and not uses_processes and builder.copies_in_threads:
            return copy_ahead(builder, schedule, options.num_workers, options.prefetch_factor)
        if self._engine is None:
            return builder.build_steps(schedule, range(len(schedule)))
        return self._engine.run(schedule)

    def run(self, begun: Cursor) -> Iterator[tuple[BatchResult, Cursor]]:
        schedule, plan, topology = self.schedule(begun), self.plan, self._options.topology.resolve()
        ledger = audit = None
        if self._ledger is not None:
            from rankfeed.loading.ledger import EpochLedger

            ledger = EpochLedger(self._ledger, schedule, plan, self.source, topology, owner=self)
        if self._audit:
            from rankfeed.loading.audit import EpochAudit, gather_audits

            audit = EpochAudit.of_rank(schedule, plan.fingerprint)
        self._builder.fix_layout()  # before the first batch, in the process that iterates
        for result in self._batches(schedule, topology.local_world_size):
            if result.step + 1 == len(schedule):
                self.source.check_unchanged()
            cursor = begun.after(schedule, result.step + 1)
            if ledger is not None:
                ledger.record(result.step, cursor.position)
            if audit is not None:
                audit.add(schedule, result.step, result.sample_ids)
            yield result, cursor
        if audit is not None:
            self.audit_report = audit
            all_ranks = gather_audits(audit, launcher=topology.launcher)
            if all_ranks is not None:
                self.audit_report = all_ranks
                all_ranks.check()
