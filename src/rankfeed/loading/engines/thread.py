"""Builds batches ahead in threads: numpy's copies run while Python waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, nullcontext

from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.loading.engines.tuner import EngineTuner
from rankfeed.plan import Schedule

#: A thread builds batches in groups that take about this long, since waking it takes about 50 us.
_GROUP_SECONDS, _MAX_GROUP = 1e-3, 4
#: Steps whose mean is one measurement.
_STEPS_MEASURED = 16


class ThreadEngine:
    """Builds batches in parallel threads, in one thread at a time, or inline: what `EngineTuner` finds fastest."""

    def __init__(self, builder: BatchBuilder, num_workers: int, prefetch_factor: int) -> None:
        self._builder, self._num_workers = builder, num_workers
        self._depth = num_workers * prefetch_factor
        self._tuner = EngineTuner(("parallel", "serial", "inline") if num_workers > 1 else ("parallel", "inline"))
        self._group_size = 1

    def run(self, schedule: Schedule) -> Iterator[BatchResult]:
        with closing(DaemonPool(self._num_workers, "rankfeed")) as pool:
            # One lock per iteration: a process that is forked while another thread holds it could never take it.
            lock = threading.Lock()
            step = 0
            while step < len(schedule):
                mode, count = self._tuner.next()
                steps = range(step, min(step + count, len(schedule)))
                results: Iterator[BatchResult]
                if mode == "inline":
                    results = (self._builder.build_step(schedule, each) for each in steps)
                else:
                    results = self._build_ahead(pool, schedule, steps, lock if mode == "serial" else None)
                yield from self._measure(results)
                step = steps.stop

    def _measure(self, results: Iterator[BatchResult]) -> Iterator[BatchResult]:
        """The batches, while the time that each takes (that of the consumer included) is measured."""
        means: list[float] = []
        started, steps = time.perf_counter(), 0
        for result in results:
            yield result
            steps += 1
            if steps % _STEPS_MEASURED == 0:
                now = time.perf_counter()
                means.append((now - started) / _STEPS_MEASURED)
                started = now
        self._tuner.record(steps, means)

    def _build_ahead(
        self, pool: DaemonPool, schedule: Schedule, steps: range, lock: threading.Lock | None
    ) -> Iterator[BatchResult]:
        def groups() -> Iterator[range]:
            step = steps.start
            while step < steps.stop:
                yield range(step, step := min(step + self._group_size, steps.stop))

        def build(group: range) -> tuple[list[BatchResult], float, Exception | None]:
            results: list[BatchResult] = []
            with lock or nullcontext():
                started = time.perf_counter()
                try:
                    for step in group:
                        if pool.stopped:
                            raise CancelledError
                        results.append(self._builder.build_step(schedule, step))
                except Exception as error:
                    return results, 1.0, error  # the batches before the error are delivered first
                return results, (time.perf_counter() - started) / len(group), None

        for results, seconds, error in run_ahead(groups(), lambda group: pool.submit(build, group), self._depth):
            yield from results
            if error is not None:
                raise error
            self._group_size = max(1, min(_MAX_GROUP, round(_GROUP_SECONDS / max(seconds, 1e-9))))
