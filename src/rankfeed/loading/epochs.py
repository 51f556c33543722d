"""How a framework that only knows torch's DataLoader sets the epoch of a loader."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from rankfeed.errors import StateError
from rankfeed.plan import Schedule

#: Loaders whose framework has been made to count their steps again, where an epoch is resumed with other batches.
_counted: WeakSet[Any] = WeakSet()
#: Modules of Lightning's fit loop, and how far above `set_epoch` its frame is.
_FIT_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_CALLERS = 4
_REMEDY = (
    "give callbacks=[rankfeed.integrations.lightning.LoaderCheck()] to the Trainer that saves and to the Trainer "
    "that resumes"
)


def counted_anew(loader: Any) -> None:
    """Record that the framework counts the steps of this loader itself at each epoch, as LoaderCheck makes it."""
    _counted.add(loader)


@dataclass(frozen=True)
class EpochSetter:
    """Stands where frameworks look for samplers, and takes their ``set_epoch``.

    Args:
        loader: whose epoch is set.
        batch_size: of a rank; DeepSpeed's integration reads it here.

    Examples:
        >>> import rankfeed as rf
        >>> loader = rf.Loader(rf.from_dataset([{"x": 1}, {"x": 2}]))
        >>> loader.batch_sampler.sampler.set_epoch(3)
        >>> loader.epoch
        3
    """

    loader: Any
    batch_size: int

    @property
    def sampler(self) -> EpochSetter:
        """Itself."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, but not back from a place that was loaded and has not been read on from.

        The shorter of several loaders, begun again within an epoch of the framework, is ahead of its count.

        Raises:
            StateError: the framework resumes from a checkpoint in a way that would lose or repeat samples.
        """
        loader = self.loader
        if hasattr(loader, "__len__") and len(loader) != self._whole_epoch() and loader not in _counted:
            raise StateError(
                "resuming on other ranks or with another batch size would lose samples: Lightning limits each "
                "epoch to a number of batches that it counted before it resumed",
                expected=f"{self._whole_epoch()} batches in this epoch, as in a whole one",
                found=f"{len(loader)}, of which {loader._begun.steps} were done before",
                where=_rank(loader),
                remedy=_REMEDY,
            )
        begun, loop = loader._begun, _resuming_fit_loop()
        unread = begun.position and loader._cursor == begun
        if epoch >= loader.epoch or not unread:
            loader.set_epoch(epoch)
        if loop is not None:
            _check_batches_done(loader, begun.epoch, epoch, loop)

    def _whole_epoch(self) -> int:
        """Steps of an epoch that is begun at its start."""
        loader = self.loader
        return len(Schedule(loader.plan, batch_size=loader.batch_size, topology=loader.topology, tail=loader.tail))


def _resuming_fit_loop() -> Any:
    """The fit loop of a Lightning Trainer that is resuming and calls `set_epoch`; None for any other caller."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "on_advance_start" and frame.f_globals.get("__name__") in _FIT_LOOPS:
            loop = frame.f_locals["self"]
            return loop if loop.restarting else None
    return None


def _check_batches_done(loader: Any, saved_epoch: int, epoch: int, loop: Any) -> None:
    """Compare the batches of this epoch that the Trainer counts as done with those that the loader delivered.

    They differ after a checkpoint that was saved while a batch was in hand, or ahead of the stream's end, or where
    the Trainer takes the progress in one epoch for progress in the next one.
    """
    inner = loop.epoch_loop
    progress = inner.batch_progress
    done = progress.current.completed + inner.restarted_on_train_batch_end
    if inner.restarted_on_train_batch_end and done >= loop.max_batches:
        done = 0  # the next epoch
    if not hasattr(loader, "__len__"):
        if progress.is_last_batch and not loader._begun.steps:
            return  # both begin an epoch; the Trainer counts no batches of a stream beforehand
    elif len(loader) < max(_lengths(loop)):
        # A shorter one of several is at another place. Under "max_size" it is at its end, until the next epoch.
        if loop._combined_loader._mode == "max_size" and done and saved_epoch > epoch:
            raise _lost(loader, epoch, done, f"it is in epoch {saved_epoch}")
        return
    if loader._begun.steps != done:
        raise _lost(loader, epoch, done, f"it has delivered {loader._begun.steps} of epoch {loader.epoch}")


def _lengths(loop: Any) -> list[float]:
    """Batches of each loader of a fit loop."""
    return [len(each) if hasattr(each, "__len__") else math.inf for each in loop._combined_loader.flattened]


def _lost(loader: Any, epoch: int, done: int, found: str) -> StateError:
    return StateError(
        "resuming from this checkpoint would lose or repeat samples: the Trainer and the loader are at different "
        "batches",
        expected=f"a loader that has delivered the {done} batches of epoch {epoch} that the Trainer has done",
        found=found,
        where=_rank(loader),
        remedy=f"{_REMEDY}; instead of a checkpoint saved without it, of a stream or while a batch was in hand, "
        "take one saved at the end of an epoch",
    )


def _rank(loader: Any) -> str:
    return f"rank {loader.topology.rank} of {loader.topology.world_size}"
