"""What frameworks find at a loader that they take for torch's DataLoader, or pass by because they do not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import WeakSet

from rankfeed.errors import ArgumentError, StateError
from rankfeed.loading.epochs import EpochSetter

if TYPE_CHECKING:
    from rankfeed.loading.loader import Loader

#: Loaders that are iterated by one of our integrations, which does for them what their framework would not.
_at_home: WeakSet[Any] = WeakSet()


class NoSampler(ArgumentError, AttributeError):
    """A loader was asked for a part of a DataLoader that it lacks: hasattr() is False."""


class AmongFrameworks:
    """The part of a loader that is there for frameworks alone."""

    batch_size: int

    @property
    def batch_sampler(self) -> EpochSetter:
        """Where frameworks look for ``batch_sampler.sampler`` to call ``set_epoch``: takes that, and no more."""
        return EpochSetter(cast("Loader", self), self.batch_size)

    @property
    def dataset(self) -> NoReturn:
        """There is none: only what rebuilds a DataLoader, in order to skip batches, needs it."""
        raise NoSampler(
            "a rankfeed.Loader has no dataset, and batches cannot be skipped by rebuilding it as a DataLoader",
            expected="a loader that resumes from its own state",
            remedy="save loader.state_dict() in the checkpoint and call load_state_dict(); under Accelerate use "
            "rankfeed.integrations.accelerate.accelerated, in a Trainer of Transformers FeedMixin",
        )

    @property
    def sampler(self) -> NoReturn:
        """There is none, and who asks is about to build a DataLoader around it."""
        raise NoSampler(
            "a rankfeed.Loader has no sampler, and cannot be rebuilt as a DataLoader",
            expected="a loader that is iterated as it is: it reads this rank's share already",
            remedy="leave it out of what prepares DataLoaders, such as Ray Train's prepare_data_loader",
        )


def at_home(loader: Loader) -> None:
    """Say that an integration iterates this loader, so that it is not refused."""
    _at_home.add(loader)


def refuse_if_checkpoint_ignored(loader: Loader) -> None:
    """Refuse to start over with a shuffled epoch in a Ray Train run that continues from a checkpoint.

    Ray Train hands the checkpoint to the training function, and nothing tells whether that loads it.

    Raises:
        StateError: nothing was loaded into the loader, nor was it told an epoch.
    """
    if "ray.train" not in sys.modules or loader in _at_home or loader.plan.shuffle == "none":
        return
    import ray.train

    try:
        checkpoint = ray.train.get_checkpoint()
    except RuntimeError:  # this process is no worker of Ray Train
        return
    if checkpoint is not None:
        raise StateError(
            "the training continues from a checkpoint, but this loader starts over and would repeat samples",
            expected="loader.load_state_dict() or loader.set_epoch() before the first iteration",
            found=f"the checkpoint {checkpoint.path}",
            remedy="save and load loader.state_dict() with the checkpoint; loader.set_epoch(0) starts over",
        )


def refuse_if_passed_by(loader: Loader) -> None:
    """Refuse to be iterated on the ranks of an Accelerator that has not been given the loader.

    ``Accelerator.prepare`` returns what is no DataLoader unchanged, without a message.

    Raises:
        ArgumentError: the job has an Accelerator of several ranks, and no integration iterates the loader.
    """
    accelerate = sys.modules.get("accelerate.state")
    state = getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None) or {}
    if state.get("num_processes", 1) > 1 and loader not in _at_home and loader.topology.world_size > 1:
        topology = loader.topology
        raise ArgumentError(
            "Accelerate does not know this loader: checkpoints of save_state would not have its place, "
            "gather_for_metrics would lose rows of the last steps, and batches would stay on the CPU "
            "(accelerator.prepare only acts on a DataLoader)",
            expected="a loader that was passed to rankfeed.integrations.accelerate.accelerated",
            found="a rankfeed.Loader iterated directly",
            where=f"rank {topology.rank} of {topology.world_size}",
            remedy="iterate accelerated(loader, accelerator), with checkpoint=False if its place need not be "
            "saved; for a Trainer of Transformers use rankfeed.integrations.transformers.FeedMixin",
        )
