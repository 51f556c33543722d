"""Which of several ways to make the same batches is the fastest here: tried out, not guessed.

Two threads are faster than one where they wait for disks or run in numpy for long, and slower where they fight
for Python's lock; and where the consumer only waits, it makes small batches faster itself than it is woken for
them. That depends on the batches, the machine and the consumer, so the ways take turns and the fastest gets most.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Steps of a trial, and of the first stretch after all ways were tried; each later stretch is twice as long.
TRIAL = 64
FIRST_STRETCH = 512
LONGEST_STRETCH = 16384
#: Seconds a step from which on the first way is kept untried: threads do not fight over large batches, nor where
#: the consumer is the slower side, and trying another way there would cost seconds.
LARGE = 2e-3


@dataclass
class Pace:
    """Says which way is next, and for how many steps.

    Args:
        ways: names, the one to begin with first.

    Examples:
        >>> pace = Pace(("threads", "inline"))
        >>> pace.next()
        ('threads', 64)
        >>> pace.took(64, [2e-4, 2e-4])
        >>> pace.next()
        ('inline', 64)
        >>> pace.took(50, [1e-4, 1e-4])  # an epoch ended
        >>> pace.next()
        ('inline', 14)
    """

    ways: Sequence[str]
    _seconds: dict[str, float] = field(default_factory=dict)
    _to_try: list[str] = field(default_factory=list)
    _stretch: int = FIRST_STRETCH
    _way: str = ""
    _left: int = 0
    _means: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._to_try = list(self.ways)

    def next(self) -> tuple[str, int]:
        """The way of the next steps, and how many steps they are."""
        if self._left > 0:
            return self._way, self._left
        self._means = []
        if self._to_try:
            self._way, self._left = self._to_try.pop(0), TRIAL
        else:
            self._way = min(self._seconds, key=lambda way: self._seconds[way], default=self.ways[0])
            self._left, self._stretch = self._stretch, min(2 * self._stretch, LONGEST_STRETCH)
            self._to_try = (
                [way for way in self.ways if way != self._way] if self._seconds.get(self._way, 0.0) < LARGE else []
            )
        return self._way, self._left

    def took(self, steps: int, seconds_per_step: Sequence[float]) -> None:
        """What came of it: how many steps were made, and the mean of each of some groups of them.

        Their mean counts, since batches made ahead come in bursts; but without the slowest group, into which a
        pause of the consumer (a checkpoint, say) falls.
        """
        self._left -= steps
        self._means += seconds_per_step
        if not self._means:
            return
        mean = statistics.fmean(sorted(self._means)[:-1] or self._means)
        if self._left <= 0:
            # Half of what is known stays: a measurement in a bad moment must not decide for long.
            mean = (mean + self._seconds.get(self._way, mean)) / 2
            self._seconds[self._way] = mean
            if self._way == self.ways[0] and mean > LARGE:
                self._to_try = []
