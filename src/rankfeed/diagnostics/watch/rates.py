"""Rates of the last seconds, computed from readings of counters."""

from collections import deque
from collections.abc import Mapping

Figures = Mapping[str, int | float]

#: Rates are over at least ten seconds, and over eight steps if those take longer.
_SECONDS, _STEPS = 10.0, 8
_MAX_READINGS = 1024


class RecentRates:
    """Replaces rates since the start by those of the last seconds, or of the last steps if steps are slow."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Figures]] = deque(maxlen=_MAX_READINGS)

    def update(self, figures: Figures, now: float) -> Figures:
        """Add a reading at a time of a monotonic clock; returns the figures with recent rates."""
        self._readings.append((now, figures))
        while len(self._readings) > 2:
            then, before = self._readings[1]
            if now - then < _SECONDS or figures["steps"] - before["steps"] < _STEPS:
                break
            self._readings.popleft()
        then, before = self._readings[0]
        if now <= then:
            return figures
        speed = (figures["samples"] - before["samples"]) / (now - then)
        waited = (figures["waited_seconds"] - before["waited_seconds"]) / (now - then)
        return {**figures, "samples_per_second": speed, "waited_share": min(1.0, max(0.0, waited))}
