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
TRIAL = 16
FIRST_STRETCH = 512
LONGEST_STRETCH = 16384


@dataclass
class Pace:
    """Says which way is next, and for how many steps.

    Args:
        ways: names, the one to begin with first.

    Example:
        >>> pace = Pace(("threads", "inline"))
        >>> pace.next()
        ('threads', 16)
        >>> pace.took([2.0, 2.0])
        >>> pace.next()
        ('inline', 16)
        >>> pace.took([1.0, 1.1])
        >>> pace.next()
        ('inline', 512)
    """

    ways: Sequence[str]
    _seconds: dict[str, float] = field(default_factory=dict)
    _to_try: list[str] = field(default_factory=list)
    _stretch: int = FIRST_STRETCH
    _way: str = ""

    def __post_init__(self) -> None:
        self._to_try = list(self.ways)

    def next(self) -> tuple[str, int]:
        """The way of the next steps, and how many steps they are."""
        if self._to_try:
            self._way = self._to_try.pop(0)
            return self._way, TRIAL
        self._way = min(self.ways, key=lambda way: self._seconds.get(way, 0.0))
        stretch, self._stretch = self._stretch, min(2 * self._stretch, LONGEST_STRETCH)
        self._to_try = [way for way in self.ways if way != self._way]
        return self._way, stretch

    def took(self, seconds_per_step: Sequence[float]) -> None:
        """What came of it: the mean of each of some groups of steps.

        The median counts: a pause of the consumer (a checkpoint, say) falls into one group.
        """
        if seconds_per_step:
            self._seconds[self._way] = statistics.median(seconds_per_step)
