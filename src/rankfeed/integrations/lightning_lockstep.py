"""Lightning: the ranks of a Trainer watched by :class:`rankfeed.Lockstep`."""

from __future__ import annotations

from typing import Any

from rankfeed.integrations.lightning import _callback
from rankfeed.proof.lockstep import Lockstep


class LockstepCheck(_callback()):  # type: ignore[misc]
    """A Callback that turns a training that hangs into an error which says which rank stopped, where and why.

    It watches the steps of training. What fails in an evaluation or a checkpoint in between is told as well; these
    may be as long as they like, as long as no rank waits in a collective for more than the limit.

    Args:
        **choices: those of :class:`rankfeed.Lockstep`, such as ``limit``.

    Raises:
        LockstepError: another rank failed, ended, was killed or is waited for in vain.

    Examples:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[LockstepCheck(limit=600)], accelerator="cpu", logger=False)
    """

    def __init__(self, **choices: Any) -> None:
        self._choices = {"name": "lightning", **choices}
        self._lockstep: Lockstep[Any] = Lockstep(**self._choices)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep = Lockstep(**self._choices).__enter__()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep.wait()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._lockstep.step()

    def on_train_batch_end(self, *_: Any) -> None:
        self._lockstep.wait()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep.work()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep.end_pass()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._lockstep.__exit__(type(exception), exception, exception.__traceback__)
