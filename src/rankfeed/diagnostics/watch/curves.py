"""The figures of a loader as curves in TensorBoard, or as calls of any function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankfeed.diagnostics.watch.figures import Figures, Outlet
from rankfeed.sources.extras import need


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
