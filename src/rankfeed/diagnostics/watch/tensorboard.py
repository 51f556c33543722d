"""How a loader is doing, as curves in TensorBoard, or wherever a function takes them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankfeed.diagnostics.watch.watched import Figures, Recent
from rankfeed.errors import MissingExtraError


class Curves:
    """Writes figures to a ``SummaryWriter``, under the step of training that they belong to.

    Args:
        name: of the loader: ``rankfeed/<name>/<figure>`` is the name of a curve.
        writer: the user's own, which is not closed here.
        log_dir: of one that is made at the first batch, when it is not given; None for TensorBoard's own choice.
        by_rank: whether each rank has a folder of its own in it.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    every = 10.0

    def __init__(
        self, name: str, *, writer: Any = None, log_dir: str | Path | None = None, by_rank: bool = False
    ) -> None:
        self._prefix = f"rankfeed/{name}/" if name else "rankfeed/"
        self._writer, self._ours = writer, writer is None
        self._log_dir, self._by_rank = log_dir, by_rank
        self._recent = Recent()
        if self._ours:
            _summary_writer()  # that it is missing is known now

    def show(self, figures: Figures, rank: int | None) -> None:
        if self._writer is None:
            folder = Path(self._log_dir or "runs") / f"rank-{rank}" if self._by_rank else self._log_dir
            self._writer = _summary_writer()(folder, flush_secs=int(self.every))
        steps = figures["epoch_steps"]  # of a stream nobody knows
        step = int(figures["epoch"] * steps + figures["epoch_step"] if steps else figures["steps"])
        for name, value in _recent_figures(figures, self._recent).items():
            self._writer.add_scalar(self._prefix + name, value, step)

    def close(self) -> None:
        if self._ours and self._writer is not None:
            self._writer.close()


class Told:
    """Hands figures to a function, whatever it does with them.

    Args:
        function: called with a dict of numbers by name.
        name: of the loader: keys are ``rankfeed/<name>/<figure>``.
    """

    every = 10.0

    def __init__(self, name: str, function: Callable[[dict[str, int | float]], object]) -> None:
        self._prefix = f"rankfeed/{name}/" if name else "rankfeed/"
        self._function = function
        self._recent = Recent()

    def show(self, figures: Figures, rank: int | None) -> None:
        shown = _recent_figures(figures, self._recent)
        self._function({self._prefix + name: value for name, value in shown.items()})

    def close(self) -> None:
        pass


def _recent_figures(figures: Figures, recent: Recent) -> dict[str, int | float]:
    """The figures, with the rates of the last seconds: a curve of means since the start hides what happens."""
    speed, waited = recent.rates(figures, time.monotonic())
    return {**figures, "samples_per_second": speed, "waited_share": waited}


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "tensorboard is not installed",
            expected="the extra 'tensorboard'",
            found=error,
            remedy="pip install 'rankfeed[tensorboard]'",
        ) from error
    return SummaryWriter
