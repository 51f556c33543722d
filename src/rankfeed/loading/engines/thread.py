"""Builds batches ahead in threads or inline, whichever is measured to be faster."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, nullcontext

from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.plan import Schedule

#: A thread builds batches in groups that take about this long, since waking it takes about 50 us.
_GROUP_SECONDS, _MAX_GROUP = 1e-3, 4
#: Steps whose mean is one measurement.
_STEPS_MEASURED = 16
#: Steps of a trial.
TRIAL_STEPS = 64
#: Steps of the fastest mode after the first trials; doubled after each further round of trials, up to a maximum.
FIRST_RUN_STEPS, MAX_RUN_STEPS = 512, 16384
#: Seconds per step above which the first mode is kept without trials: threads do not compete over large batches,
#: nor where the consumer is slower, and trials would cost seconds.
SLOW_STEP = 2e-3


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
                    results = self._builder.build_steps(schedule, steps)
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
                    for result in self._builder.build_steps(schedule, group):
                        if pool.stopped:
                            raise CancelledError
                        results.append(result)
                except Exception as error:
                    return results, 1.0, error  # the batches before the error are delivered first
                return results, (time.perf_counter() - started) / len(group), None

        for results, seconds, error in run_ahead(groups(), lambda group: pool.submit(build, group), self._depth):
            yield from results
            if error is not None:
                raise error
            self._group_size = max(1, min(_MAX_GROUP, round(_GROUP_SECONDS / max(seconds, 1e-9))))


class EngineTuner:
    """Decides which of several modes is used next, and for how many steps; the first mode is tried first."""

    # Two threads are faster than one where they wait for disks or run in numpy for long, and slower where they
    # compete for the GIL; where the consumer only waits, it builds small batches faster itself than it is woken.
    # That depends on the batches, the machine and the consumer: the modes take turns, the fastest most often.

    def __init__(self, modes: Sequence[str]) -> None:
        self._modes, self._run_steps = modes, FIRST_RUN_STEPS
        self._turns = deque((mode, TRIAL_STEPS) for mode in modes)
        self._seconds: dict[str, float] = {}
        self._means: list[float] = []

    def next(self) -> tuple[str, int]:
        if not self._turns:
            best = min(self._seconds, key=lambda mode: self._seconds[mode], default=self._modes[0])
            self._turns.append((best, self._run_steps))
            self._run_steps = min(2 * self._run_steps, MAX_RUN_STEPS)
            if self._seconds.get(best, 0.0) < SLOW_STEP:
                self._turns += [(mode, TRIAL_STEPS) for mode in self._modes if mode != best]
        return self._turns[0]

    def record(self, steps: int, seconds_per_step: Sequence[float]) -> None:
        """Record how many steps were built, and the mean time of each of some groups of them."""
        if not self._turns:  # of two iterations at once, the other one has ended the last turn
            return
        self._means += seconds_per_step
        mode, left = self._turns[0]
        if steps < left:
            self._turns[0] = mode, left - steps
            return
        self._turns.popleft()
        means, self._means = sorted(self._means), []
        if not means:
            return
        # Batches that are built ahead come in bursts; a pause of the consumer falls into the slowest group.
        means = means[:-1] or means
        mean = sum(means) / len(means)
        # Averaged with the earlier value: one measurement at a bad moment must not decide for long.
        self._seconds[mode] = mean = (mean + self._seconds.get(mode, mean)) / 2
        if mode == self._modes[0] and mean > SLOW_STEP:
            self._turns.clear()
