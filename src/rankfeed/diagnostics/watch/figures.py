"""What a watch reads of a loader, how fast the loader is now, and where that is shown."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankfeed.errors import TopologyError
from rankfeed.sources.extras import need

Figures = Mapping[str, int | float]

#: Rates are over at least ten seconds, and over eight steps if those take longer.
_SECONDS, _STEPS = 10.0, 8
_MOST_READINGS = 1024


class Outlet:
    """Where figures are shown; ``every``: seconds between two readings, unless the user says so."""

    every = 10.0

    def show(self, figures: Figures, rank: int | None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to do for most."""


class FunctionOutlet(Outlet):
    """Calls a function with a dict of numbers, named ``rankfeed/<loader>/<figure>``."""

    def __init__(self, name: str, function: Callable[[dict[str, int | float]], object]) -> None:
        self._prefix = _prefix(name)
        self._function = function

    def show(self, figures: Figures, rank: int | None) -> None:
        self._function({self._prefix + name: value for name, value in figures.items()})


class Curves(Outlet):
    """Writes figures to a ``SummaryWriter`` at the step of training: the user's own, or one of its own."""

    def __init__(
        self, name: str, *, writer: Any = None, log_dir: str | Path | None = None, by_rank: bool = False
    ) -> None:
        self._prefix = _prefix(name)
        self._writer, self._ours = writer, writer is None
        self._log_dir, self._by_rank = log_dir, by_rank
        if self._ours:
            need("tensorboard", extra="tensorboard")
            self._kind = need("torch.utils.tensorboard", extra="tensorboard").SummaryWriter

    def show(self, figures: Figures, rank: int | None) -> None:
        if self._writer is None:
            folder = Path(self._log_dir or "runs") / f"rank-{rank}" if self._by_rank else self._log_dir
            self._writer = self._kind(folder, flush_secs=int(self.every))
        steps = figures["epoch_steps"]  # 0 for a stream
        step = int(figures["epoch"] * steps + figures["epoch_step"] if steps else figures["steps"])
        for name, value in figures.items():
            self._writer.add_scalar(self._prefix + name, value, step)

    def close(self) -> None:
        if self._ours and self._writer is not None:
            self._writer.close()


def _prefix(name: str) -> str:
    return f"rankfeed/{name}/" if name else "rankfeed/"


class WatchedLoader:
    """A loader that other threads read and do not keep alive."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader = weakref.ref(loader)
        self.name = name

    def stats(self) -> Figures | None:
        """Its figures; None if it is gone."""
        loader = self._loader()
        return None if loader is None else loader.stats()

    def rank(self) -> int | None:
        """Its rank, if that is known by now."""
        loader = self._loader()
        try:
            return None if loader is None else int(loader.topology.rank)
        except TopologyError:  # raised to the code that iterates
            return None


class RecentRates:
    """Figures with the rates of the last seconds (or of the last steps if steps are slow), not since the start."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Figures]] = deque(maxlen=_MOST_READINGS)

    def of(self, figures: Figures, now: float) -> Figures:
        """The figures at a time of a monotonic clock."""
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
