"""Raises where a framework would lose or repeat samples of a loader or sampler; torch DataLoader attributes.

It would happen without a message, where the framework has no hook that could prevent it: most entries look at the
framework's state or at the callers. Each names the version it was written for and the upstream thread. What needs
a call of the user's is in ``rankfeed.integrations``.

The entry for the Trainer of Transformers, which sources need too, is ``rankfeed._util.trainer``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NoReturn, TypeVar

from rankfeed.errors import ArgumentError, StateError
from rankfeed.plan import Cursor
from rankfeed.topology import Topology

_T = TypeVar("_T")


# Attributes that frameworks read of torch's DataLoader.
# Lightning 2.6 calls ``set_epoch`` on ``loader.sampler`` and ``loader.batch_sampler.sampler`` alone
# (Lightning-AI/pytorch-lightning#13316); DeepSpeed 0.17 reads ``batch_sampler.batch_size``; Accelerate 1.15 and
# Ray Train 2.60 rebuild a DataLoader from ``dataset`` and ``sampler``.


class DataLoaderAttributeError(ArgumentError, AttributeError):
    """A loader lacks an attribute of torch's DataLoader: hasattr() is False."""


class DataLoaderCompat:
    """The attributes of a loader that exist for frameworks alone."""

    batch_size: int
    #: Whether one of our integrations iterates the loader, which then does what its framework lacks.
    is_integrated = False
    #: Whether the framework recounts the steps of each epoch, as LoaderCheck makes Lightning do.
    is_recounted = False

    @property
    def batch_sampler(self) -> SamplerShim:
        """Where frameworks look for ``batch_sampler.sampler`` in order to call ``set_epoch``."""
        return SamplerShim(self, self.batch_size)

    @property
    def dataset(self) -> NoReturn:
        """Not available: only code that rebuilds the loader as a DataLoader, to skip batches, reads it."""
        raise DataLoaderAttributeError(
            "a rankfeed.Loader has no dataset and no sampler, and cannot be rebuilt as a DataLoader",
            expected="a loader that is iterated as it is, and resumes from its own state",
            remedy="leave it out of what prepares DataLoaders (Ray Train's prepare_data_loader); to skip batches, "
            "load_state_dict() of a saved loader.state_dict(), under Accelerate accelerator.skip_first_batches of "
            "rankfeed.integrations.accelerate.accelerated, in a Trainer of Transformers FeedMixin",
        )

    sampler = dataset


# Lightning 2.6: a Trainer that resumes in mid-epoch limits this epoch to the number of batches that it counted
# before the loaders resumed, and counts the batches done by itself (Lightning-AI/pytorch-lightning#19764). It
# loads the states of loaders only when it sets them up, which `estimated_stepping_batches` does before it reads a
# checkpoint (#20550), and reads its first epoch with the iterators that it created then.

_FIT_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_USE_LOADER_CHECK = (
    "give callbacks=[rankfeed.integrations.lightning.LoaderCheck()] to the Trainer that saves and to the Trainer "
    "that resumes"
)


@dataclass(frozen=True)
class SamplerShim:
    """Takes the ``set_epoch`` that frameworks call on samplers."""

    loader: Any
    batch_size: int

    @property
    def sampler(self) -> SamplerShim:
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, but not back from a loaded position that has not been read on from."""
        loader, progress, fit_loop = self.loader, self.loader.progress, _calling_fit_loop()
        if fit_loop is not None:
            restore_positions(fit_loop)
        if not loader.is_stream and not loader.is_recounted:
            begun, steps, topology = progress.begun, len(loader), loader.topology
            epoch_steps = len(loader.schedule_at(Cursor()))
            if steps != epoch_steps:
                raise StateError(
                    "resuming on other ranks or with another batch size would lose samples: Lightning limits each "
                    "epoch to the number of batches that it counted before it resumed",
                    expected=f"{epoch_steps} batches in this epoch, as in a whole one",
                    found=f"{steps}, of which {begun.steps} were done before",
                    where=_rank(topology),
                    remedy=_USE_LOADER_CHECK,
                )
        begun = progress.begun
        is_unread = begun.position and progress.cursor == begun
        if epoch >= begun.epoch or not is_unread:
            loader.set_epoch(epoch)
        progress.is_loaded = False  # Lightning expects the rest of the epoch that it saved, even if it is empty
        if fit_loop is None:
            return
        if fit_loop.restarting:
            _check_batches_done(loader, begun.epoch, epoch, fit_loop)
        elif (state := _ignored_state(loader, fit_loop)).get("epoch") == epoch and state.get("steps"):
            # The Trainer took this epoch for finished: it was begun after a checkpoint of a last batch.
            raise _different_batches(loader, epoch, state["steps"], "a Trainer that begins the epoch again")


def _calling_fit_loop() -> Any:
    """The fit loop of a Lightning Trainer that calls `set_epoch`; None for any other caller."""
    for frame in _callers():
        if frame.f_code.co_name == "on_advance_start" and frame.f_globals.get("__name__") in _FIT_LOOPS:
            return frame.f_locals["self"]
    return None


def rankfeed_loaders(loop: Any) -> list[Any]:
    """The rankfeed loaders that a loop of Lightning reads."""
    combined = loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader for loader in loaders if isinstance(loader, DataLoaderCompat)]


def restore_positions(loop: Any) -> None:
    """Let the first epoch of a fit begin at its checkpoint or start, whatever used its loaders before."""
    fetcher, is_early = loop._data_fetcher, bool(loop.restarting and loop._combined_loader_states_to_load)
    if is_early:
        loop._load_combined_loader_states()
    # The first epoch has fetched no batch yet, or one if the number of batches is unknown.
    loaders = [] if fetcher.fetched else rankfeed_loaders(loop)
    read = [loader.progress for loader in loaders if loader.progress.started]
    for progress in read:
        progress.go_to(progress.begun)
    if is_early or read:
        iter(fetcher)  # its iterators are not the latest ones, or have read a batch of a stream


def _check_batches_done(loader: Any, saved_epoch: int, epoch: int, loop: Any) -> None:
    """Compare the batches of this epoch that the Trainer counts as done with those that the loader delivered."""
    # They differ after a checkpoint that was saved during a batch, or one batch ahead of a stream's end, or where
    # the Trainer takes the progress in one epoch for progress in the next one.
    inner, begun = loop.epoch_loop, loader.progress.begun
    progress = inner.batch_progress
    completed = progress.current.completed + inner.restarted_on_train_batch_end
    if inner.restarted_on_train_batch_end and completed >= loop.max_batches:
        completed = 0  # the next epoch
    position = f"it has delivered {begun.steps} of epoch {loader.epoch}"
    differs = begun.steps != completed
    if loader.is_stream:
        # Both may begin an epoch; the Trainer does not count the batches of a stream beforehand.
        differs = differs and not (progress.is_last_batch and not begun.steps)
    elif len(loader) < max(map(length_or_inf, loop._combined_loader.flattened)):
        # The shorter of several loaders is elsewhere. Under "max_size" it stays at its end until the next epoch.
        differs = bool(loop._combined_loader._mode == "max_size" and completed and saved_epoch > epoch)
        position = f"it is in epoch {saved_epoch}"
    if differs:
        raise _different_batches(loader, epoch, completed, position)


def _different_batches(loader: Any, epoch: int, done: int, position: str) -> StateError:
    return StateError(
        "resuming from this checkpoint would lose or repeat samples: the Trainer and the loader are at "
        "different batches",
        expected=f"a loader that has delivered the {done} batches of epoch {epoch} that the Trainer has done",
        found=position,
        where=_rank(loader.topology),
        remedy=f"{_USE_LOADER_CHECK}; instead of a checkpoint saved without it, of a stream or during a "
        "batch, use one saved at the end of an epoch; hooks that read batches need another Loader",
    )


def _ignored_state(loader: Any, loop: Any) -> Mapping[str, Any]:
    """The state of a loader in a checkpoint that Lightning has not loaded; empty if there is none."""
    loaders = [member for member in loop._combined_loader.flattened if hasattr(member, "load_state_dict")]
    states: dict[Any, Mapping[str, Any]] = dict(zip(loaders, loop._combined_loader_states_to_load, strict=False))
    return states.get(loader, {})


def length_or_inf(loader: Any) -> float:
    """Number of batches of any loader; infinity where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf


# Ray Train 2.60: the training function gets the checkpoint, and nothing shows whether it loads it into the loader.


def refuse_ignored_checkpoint(loader: Any) -> None:
    """Refuse to begin a shuffled epoch again in a Ray Train run that continues from a checkpoint."""
    if "ray.train" not in sys.modules or loader.is_integrated or loader.plan.shuffle == "none":
        return
    import ray.train

    try:
        checkpoint = ray.train.get_checkpoint()
    except RuntimeError:  # this process is not a worker of Ray Train
        return
    if checkpoint is not None:
        raise StateError(
            "the training continues from a checkpoint, but this loader starts over and would repeat samples",
            expected="loader.load_state_dict() or loader.set_epoch() before the first iteration",
            found=f"the checkpoint {checkpoint.path}",
            remedy="save and load loader.state_dict() with the checkpoint; loader.set_epoch(0) starts over",
        )


# Accelerate 1.15: ``Accelerator.prepare`` returns anything but a DataLoader unchanged, without a message.


def refuse_unprepared(loader: Any) -> None:
    """Refuse to be iterated on the ranks of an Accelerator that does not know the loader."""
    accelerate = sys.modules.get("accelerate.state")
    state = getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None) or {}
    if state.get("num_processes", 1) > 1 and not loader.is_integrated and loader.topology.world_size > 1:
        raise ArgumentError(
            "Accelerate does not know this loader: checkpoints of save_state would not have its position, "
            "gather_for_metrics would lose rows of the last steps, and batches would stay on the CPU "
            "(accelerator.prepare only acts on a DataLoader)",
            expected="a loader that was passed to rankfeed.integrations.accelerate.accelerated",
            found="a rankfeed.Loader iterated directly",
            where=_rank(loader.topology),
            remedy="iterate accelerated(loader, accelerator), with checkpoint=False if its position need not be "
            "saved; for a Trainer of Transformers use rankfeed.integrations.transformers.FeedMixin",
        )


# A torch DataLoader copies its dataset into each worker, and with it a rankfeed loader that the dataset iterates.


def refuse_copies_in_workers(loader: Any) -> None:
    """Refuse to be iterated by several workers of a torch DataLoader, of which each would deliver all samples."""
    worker, workers = Topology.worker()
    if workers > 1:
        raise ArgumentError(
            "this rankfeed.Loader is iterated in a worker of a torch DataLoader, and each of the workers would "
            "deliver all samples of the rank",
            expected="a Loader that is iterated by the training loop, or by a DataLoader with at most one worker",
            found=f"worker {worker} of {workers}",
            where=_rank(loader.topology),
            remedy="iterate the Loader itself, which has num_workers=; for a stock DataLoader use rankfeed.split "
            "in its IterableDataset, or a rankfeed.DistributedSampler",
        )


# Accelerate 1.15: ``prepare`` shards every DataLoader, whether its sampler or dataset is sharded already or not
# (huggingface/accelerate#3520, #4199). WebDataset 1.0: ``split_by_node`` and ``split_by_worker`` take every n-th
# item of any input (webdataset/webdataset#441). The wrapper that shards is among the callers of the iteration.

_ACCELERATE, _WEBDATASET = "accelerate.data_loader", "webdataset.shardlists"
_ACCELERATE_SHARDING = ("BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher")


def refuse_double_sharding(topology: Topology) -> None:
    """Called where iteration of a rank's share begins."""
    ranks, workers = topology.world_size, topology.worker()[1]
    if ranks == workers == 1 or (_ACCELERATE not in sys.modules and _WEBDATASET not in sys.modules):
        return
    for frame in _callers():
        module, owner = frame.f_globals.get("__name__"), frame.f_locals.get("self")
        # type(), since __class__ of Accelerate's loaders is that of the wrapped DataLoader
        name = frame.f_code.co_name if owner is None else type(owner).__name__
        if module == _ACCELERATE and ranks > 1 and name in _ACCELERATE_SHARDING:
            framework, share = "Accelerate", "rank"
            expected = "a DataLoader that is not passed to accelerator.prepare"
            remedy = (
                "pass rankfeed.Loader(rankfeed.from_dataset(dataset), ...) to "
                "rankfeed.integrations.accelerate.accelerated, or leave this DataLoader out of prepare"
            )
        elif module == _WEBDATASET and (
            (name == "split_by_node" and ranks > 1) or (name == "split_by_worker" and workers > 1)
        ):
            framework, share = "WebDataset", "rank" if name == "split_by_node" else "worker"
            expected, remedy = f"a pipeline without {name}: its input is sharded already", "leave it out"
        else:
            continue
        raise ArgumentError(
            f"{framework} is about to shard data again that are one {share}'s share already",
            expected=expected,
            found=f"{framework}'s {name}",
            where=_rank(topology),
            remedy=remedy,
        )


# torchdata 0.11: with workers, StatefulDataLoader goes back to the last of its snapshots, and skips as many of its
# own steps as the job had taken since: on other ranks those are other samples (meta-pytorch/data#1283).


class SamplerIterator(Iterator[_T]):
    """The iterator of a sampler; its state is the number of samples in a full step, over all ranks."""

    def __init__(self, items: Iterator[_T], samples_in_step: int) -> None:
        self._items = items
        self._samples_in_step = samples_in_step

    def __next__(self) -> _T:
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """The state of this iterator; the position in the data is in the sampler's."""
        return {"samples_in_step": self._samples_in_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called by a StatefulDataLoader, after the sampler's own."""
        saved, skipped = state.get("samples_in_step"), 0
        for frame in _callers():
            if frame.f_globals.get("__name__") == "torchdata.stateful_dataloader.stateful_dataloader":
                resuming = frame.f_locals.get("next_iter_state") or {}
                skipped = skipped or int(resuming.get("_steps_since_snapshot", 0))
        if skipped and saved != self._samples_in_step:
            raise StateError(
                "the DataLoader resumes from an older snapshot by skipping steps, which have another size now",
                expected=f"steps of {saved} samples over all ranks",
                found=f"steps of {self._samples_in_step}, of which {skipped} would be skipped",
                remedy="resume with the number of ranks and the batch size of the job that saved; to change them,"
                " save with StatefulDataLoader(snapshot_every_n_steps=1), or at a multiple of its value",
            )


# datasets 5.2 (Hugging Face): the state of an IterableDataset leaves out the rows in its shuffle buffers, so a job
# that resumes from it loses them and repeats others (huggingface/datasets#7901).

_BUFFER = "BufferShuffledExamplesIterable"
#: Objects that are searched for a shuffle buffer, and entries of a list that are.
_MAX_OBJECTS, _MAX_ENTRIES = 4096, 1024


def has_shuffle_buffer(stream: object) -> bool:
    """Whether a stream has a shuffle buffer of Hugging Face, also inside other objects."""
    if "datasets.iterable_dataset" not in sys.modules:
        return False
    parts, seen = [stream], {id(stream)}
    for part in parts:  # which grows
        if type(part).__module__ == "datasets.iterable_dataset" and type(part).__name__ == _BUFFER:
            return True
        for child in part if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values():
            is_list = isinstance(child, list | tuple) and len(child) <= _MAX_ENTRIES
            is_part = is_list or (hasattr(child, "__dict__") and not isinstance(child, type | ModuleType))
            if is_part and id(child) not in seen and len(parts) < _MAX_OBJECTS:
                seen.add(id(child))
                parts.append(child)
    return False


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _rank(topology: Topology) -> str:
    return f"rank {topology.rank} of {topology.world_size}"
