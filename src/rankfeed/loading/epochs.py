"""How a framework that only knows torch's DataLoader tells a loader which epoch it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from rankfeed.plan import Schedule

#: Loaders whose framework has been made to count their steps anew, where an epoch goes on with other batches.
_counted: WeakSet[Any] = WeakSet()


def counted_anew(loader: Any) -> None:
    """Say that the framework takes as many steps of this loader as it has, so that there is nothing to warn of."""
    _counted.add(loader)


@dataclass(frozen=True)
class EpochSetter:
    """Stands where frameworks look for samplers, and takes their ``set_epoch``.

    Args:
        loader: that is told.
        batch_size: a rank's; DeepSpeed's integration reads it here.

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

        The shorter of several loaders, begun anew within an epoch of the framework's, is ahead of its count.
        """
        loader = self.loader
        if hasattr(loader, "__len__") and len(loader) != self._whole_epoch() and loader not in _counted:
            warnings.warn(
                "this epoch was begun on other ranks or with another batch size, and Lightning will hold it and "
                "those after it to a wrong number of batches: give the Trainer "
                "callbacks=[rankfeed.integrations.lightning.LoaderCheck()]",
                stacklevel=2,
            )
        if not hasattr(loader, "__len__") and loader._begun.position and loader not in _counted:
            warnings.warn(
                "this epoch of a stream goes on at a place that was saved, and Lightning reads a batch ahead of "
                "what it has trained on: that one is left out, unless the Trainer that saved has "
                "callbacks=[rankfeed.integrations.lightning.LoaderCheck()]",
                stacklevel=2,
            )
        unread = loader._begun.position and loader._cursor == loader._begun
        if epoch >= loader.epoch or not unread:
            loader.set_epoch(epoch)

    def _whole_epoch(self) -> int:
        """Steps of an epoch that is begun at its start."""
        loader = self.loader
        return len(Schedule(loader.plan, batch_size=loader.batch_size, topology=loader.topology, tail=loader.tail))
