"""Chooses the fastest of several modes to build the same batches, by measurement.

Two threads are faster than one where they wait for disks or run in numpy for long, and slower where they compete
for the GIL; where the consumer only waits, it builds small batches faster itself than it is woken for them. That
depends on the batches, the machine and the consumer, so the modes take turns and the fastest gets most steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Steps of a trial.
TRIAL_STEPS = 64
#: Steps of the fastest mode after the first trials; doubled after each further round of trials, up to a maximum.
FIRST_RUN_STEPS = 512
MAX_RUN_STEPS = 16384
#: Seconds per step above which the first mode is kept without trials: threads do not compete over large batches,
#: nor where the consumer is slower, and trials would cost seconds.
SLOW_STEP = 2e-3


@dataclass
class EngineTuner:
    """Decides which mode is used next, and for how many steps.

    Args:
        modes: names, the one to begin with first.

    Examples:
        >>> tuner = EngineTuner(("threads", "inline"))
        >>> tuner.next()
        ('threads', 64)
        >>> tuner.record(64, [2e-4, 2e-4])
        >>> tuner.next()
        ('inline', 64)
        >>> tuner.record(50, [1e-4, 1e-4])  # the epoch ended
        >>> tuner.next()
        ('inline', 14)
    """

    modes: Sequence[str]
    _seconds: dict[str, float] = field(default_factory=dict)
    _untried: list[str] = field(default_factory=list)
    _run_steps: int = FIRST_RUN_STEPS
    _mode: str = ""
    _steps_left: int = 0
    _means: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._untried = list(self.modes)

    def next(self) -> tuple[str, int]:
        """The mode of the next steps, and their number."""
        if self._steps_left > 0:
            return self._mode, self._steps_left
        self._means = []
        if self._untried:
            self._mode, self._steps_left = self._untried.pop(0), TRIAL_STEPS
        else:
            self._mode = min(self._seconds, key=lambda mode: self._seconds[mode], default=self.modes[0])
            self._steps_left, self._run_steps = self._run_steps, min(2 * self._run_steps, MAX_RUN_STEPS)
            if self._seconds.get(self._mode, 0.0) < SLOW_STEP:
                self._untried = [mode for mode in self.modes if mode != self._mode]
        return self._mode, self._steps_left

    def record(self, steps: int, seconds_per_step: Sequence[float]) -> None:
        """Record how many steps were built, and the mean time of each of some groups of them.

        The mean of the groups counts, since batches that are built ahead come in bursts, but without the slowest
        group, which a pause of the consumer (a checkpoint, for example) falls into.
        """
        self._steps_left -= steps
        self._means += seconds_per_step
        if not self._means:
            return
        mean = statistics.fmean(sorted(self._means)[:-1] or self._means)
        if self._steps_left <= 0:
            # Averaged with the earlier value: one measurement at a bad moment must not decide for long.
            mean = (mean + self._seconds.get(self._mode, mean)) / 2
            self._seconds[self._mode] = mean
            if self._mode == self.modes[0] and mean > SLOW_STEP:
                self._untried = []
