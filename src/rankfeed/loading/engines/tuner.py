"""Chooses the fastest of several modes to build the same batches, by measurement.

Two threads are faster than one where they wait for disks or run in numpy for long, and slower where they compete
for the GIL; where the consumer only waits, it builds small batches faster itself than it is woken for them. That
depends on the batches, the machine and the consumer, so the modes take turns and the fastest gets most steps.
"""

import statistics
from collections import deque
from collections.abc import Sequence

#: Steps of a trial.
TRIAL_STEPS = 64
#: Steps of the fastest mode after the first trials; doubled after each further round of trials, up to a maximum.
FIRST_RUN_STEPS, MAX_RUN_STEPS = 512, 16384
#: Seconds per step above which the first mode is kept without trials: threads do not compete over large batches,
#: nor where the consumer is slower, and trials would cost seconds.
SLOW_STEP = 2e-3


class EngineTuner:
    """Decides which mode is used next, and for how many steps; the first mode is tried first.

    Examples:
        >>> tuner = EngineTuner(("threads", "inline"))
        >>> tuner.next()
        ('threads', 64)
        >>> tuner.record(64, [2e-4, 2e-4])
        >>> tuner.record(50, [1e-4, 1e-4])  # the epoch ended
        >>> tuner.next()
        ('inline', 14)
    """

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
        """Record how many steps were built, and the mean time of each of some groups of them.

        The mean of the groups counts, since batches that are built ahead come in bursts, but without the slowest
        group, which a pause of the consumer (a checkpoint, for example) falls into.
        """
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
        mean = statistics.fmean(means[:-1] or means)
        # Averaged with the earlier value: one measurement at a bad moment must not decide for long.
        self._seconds[mode] = mean = (mean + self._seconds.get(mode, mean)) / 2
        if mode == self._modes[0] and mean > SLOW_STEP:
            self._turns.clear()
