"""What frameworks find at a loader that they take for torch's DataLoader, or pass by because they do not."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import WeakSet

from rankfeed.errors import ArgumentError
from rankfeed.loading.epochs import EpochSetter

if TYPE_CHECKING:
    from rankfeed.loading.loader import Loader

#: Loaders that are iterated by one of our integrations, which does for them what their framework would not.
_at_home: WeakSet[Any] = WeakSet()


class NoSampler(ArgumentError, AttributeError):
    """A loader was asked for its sampler. For those who only look whether there is one, there is none."""


class AmongFrameworks:
    """The part of a loader that is there for frameworks alone."""

    batch_size: int

    @property
    def batch_sampler(self) -> EpochSetter:
        """Where frameworks look for ``batch_sampler.sampler`` to call ``set_epoch``: takes that, and no more."""
        return EpochSetter(cast("Loader", self), self.batch_size)

    @property
    def sampler(self) -> NoReturn:
        """There is none, and who asks is about to build a DataLoader around it."""
        raise NoSampler(
            "a rankfeed.Loader has no sampler, and cannot be rebuilt as a DataLoader",
            expected="a loader that is iterated as it is: it reads this rank's share already",
            remedy="leave it out of what prepares DataLoaders, such as Ray Train's prepare_data_loader",
        )


def at_home(loader: Loader) -> None:
    """Say that an integration iterates this loader, so that there is nothing to warn of."""
    _at_home.add(loader)


def warn_if_passed_by(loader: Loader) -> None:
    """Warn of a loader that is iterated as it is on the ranks of an Accelerator.

    ``Accelerator.prepare`` hands back what is no DataLoader, and says nothing.
    """
    accelerate = sys.modules.get("accelerate.state")
    state = getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None)
    if state and loader not in _at_home and loader.topology.world_size > 1:
        warnings.warn(
            "this loader is iterated as it is in a job of Accelerate, whose prepare() does nothing to it: batches "
            "are not placed on the accelerator's device, no checkpoint has its place, and gather_for_metrics may "
            "be given different numbers of rows. Take it there with "
            "rankfeed.integrations.accelerate.accelerated(loader, accelerator)",
            stacklevel=3,
        )
