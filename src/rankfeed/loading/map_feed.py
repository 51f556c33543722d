"""The batches of one rank from a source that is read by sample id, and the state to resume them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankfeed._util.native import native_library
from rankfeed._util.process_info import cpus_per_process
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.loading.engines.copy import copy_ahead
from rankfeed.loading.options import FeedOptions, check_added_columns
from rankfeed.loading.state import check_content, encode_state, is_end, resume
from rankfeed.plan import Cursor, Plan, Schedule
from rankfeed.plan.quality import measure_quality, remedy_for
from rankfeed.sources.source import probe_ids
from rankfeed.topology import Topology

if TYPE_CHECKING:  # imported when they are needed: the first batch does not wait for them
    from rankfeed.loading.audit import EpochAudit
    from rankfeed.loading.engines.process import ProcessEngine
    from rankfeed.loading.engines.thread import ThreadEngine


class MapFeed:
    """The batches of a Loader over a source; a loaded state decides the ``open_properties`` of the plan."""

    def __init__(
        self,
        plan: Plan,
        builder: BatchBuilder,
        options: FeedOptions,
        *,
        open_properties: Sequence[str],
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
        self._measured_plan: Plan | None = None
        self._has_checked_rngs = False
        self._open_properties, self._audit, self._ledger = open_properties, audit, ledger
        #: Digest of samples in a loaded state, "" if none is to be compared; and whether a run has begun since.
        self._loaded_content, self._has_begun = "", False

    @cached_property
    def _content(self) -> str:
        """Digest of the samples that fields are inferred from, if that is the only identity; "" if unknown."""
        if self.source.tells_content or not self._builder.infers_fields:
            return ""
        from rankfeed.sources.dataset_identity import digest_of_content

        source = self.source
        return digest_of_content(lambda: source.samples(probe_ids(len(source))))

    def schedule(self, begun: Cursor) -> Schedule:
        options = self._options
        return begun.schedule(self.plan, options.batch_size, options.topology.resolve(), options.tail)

    def steps_left(self, begun: Cursor) -> int:
        return len(self.schedule(begun))

    def is_end(self, cursor: Cursor) -> bool:
        """Whether nothing is left of the epoch."""
        return is_end(cursor, self.plan.num_samples, self._options.tail, self.schedule)

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        self.source.check_unchanged()
        # Before the first step, no samples are read: the content is that of the state which was loaded.
        content = self._content if self._has_begun else self._loaded_content
        data = self.source.fingerprint
        return encode_state(cursor, self.plan.describe(), f"{data}-{content}" if content else data)

    def load_state(self, state: Mapping[str, Any]) -> Cursor:
        parsed, self.plan, cursor = resume(state, self.plan, self.source, self._open_properties)
        self._loaded_content = "" if self.source.tells_content else parsed.source.partition("-")[2]
        self._has_begun = False
        return cursor

    def _warn_if_poorly_mixed(self, topology: Topology) -> None:
        """Warn once for each plan, on one rank."""
        plan, batch_size, ranks = self.plan, self._options.batch_size, topology.world_size
        if plan.shuffle != "window" or topology.rank or self._measured_plan is plan:
            return
        self._measured_plan = plan
        if (quality := measure_quality(plan, batch_size=batch_size, world_size=ranks)).is_mixed:
            return
        warnings.warn(
            f"the batches of a rank are poorly mixed: {quality} ({ranks} ranks, batch_size={batch_size}, "
            f"window={plan.window}, lanes={plan.lanes}); {remedy_for(plan)}",
            stacklevel=5,
        )

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
        self._warn_if_poorly_mixed(topology)
        ledger = audit = None
        if self._ledger is not None:
            from rankfeed.loading.ledger import EpochLedger

            ledger = EpochLedger(self._ledger, schedule, plan, self.source, topology, owner=self)
        if self._audit:
            from rankfeed.loading.audit import EpochAudit, gather_audits, not_proven

            audit = EpochAudit.of_rank(schedule, plan.fingerprint)
        self._builder.fix_layout()  # before the first batch, in the process that iterates
        check_added_columns(self._builder.layout, self._builder.id_column, self._options.tail)
        if self._loaded_content and not self._has_begun:
            check_content(self._loaded_content, self._content, self.source)
        self._has_begun = True
        if not self._has_checked_rngs:
            self._has_checked_rngs = True
            if self._builder.warn_of_shared_rngs():
                _ = self._content  # cached: it watches the generators from which the threads will draw
        for result in self._batches(schedule, topology.local_world_size):
            if result.step + 1 == len(schedule):
                self.source.check_unchanged()
            cursor = begun.after(schedule, result.step + 1)
            if ledger is not None:
                ledger.record(result.step, cursor.position, result.unproven)
            if audit is not None:
                audit.add(schedule, result.step, result.sample_ids, result.unproven)
            yield result, cursor
        if audit is not None:
            self.audit_report = audit
            all_ranks = gather_audits(audit, launcher=topology.launcher)
            if all_ranks is not None:
                self.audit_report = all_ranks
                all_ranks.check()
            if audit.unproven:
                warnings.warn(f"the audit of epoch {audit.epoch}: {not_proven(audit.unproven)}", stacklevel=2)
