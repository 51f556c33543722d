"""A mixin for the Trainer of Transformers that reads its data through rankfeed loaders.

Written for Transformers 5, whose Trainer saves the number of updates and skips batches of the present number of
processes when it resumes (huggingface/transformers#34365 on its sharding).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rankfeed.errors import ArgumentError, StateError, safe_str
from rankfeed.integrations.transformers.evaluation import ExactEvaluation
from rankfeed.integrations.transformers.feed import TrainerFeed, is_fed
from rankfeed.integrations.transformers.tokens import PadTokens, PlainDictCollator
from rankfeed.loading import Loader
from rankfeed.sources import Source
from rankfeed.sources.extras import need

#: Key of the loader's state among the "stateful_callbacks" of a checkpoint's trainer_state.json.
_STATE_KEY = "rankfeed"
#: Undocumented methods that the mixin overrides; Trainers before version 5 have others.
_OVERRIDDEN = ("_run_epoch", "_init_training_state", "_save_checkpoint", "set_initial_training_values")


@dataclass(frozen=True)
class _TrainerCheckpoint:
    """Updates of the model, and the state of the loader."""

    global_step: int
    state: Mapping[str, Any]


class FeedMixin(ExactEvaluation):
    """Lets a Trainer read rankfeed sources and loaders: ``class Trainer(FeedMixin, transformers.Trainer): ...``.

    ``train_dataset``, ``eval_dataset`` (or a dict of them) and the dataset of ``predict`` may be a source or a
    :class:`rankfeed.Loader`; anything else is left to the Trainer. For a source the loader is created from the
    arguments: batch size, ``data_seed`` (or ``seed``), number of workers (threads), ``dataloader_drop_last``,
    ``train_sampling_strategy`` ("random" or "sequential"), ``remove_unused_columns``, and the ``data_collator``.

    A checkpoint holds the loader's state in its ``trainer_state.json``. Resuming seeks: it takes the same time
    anywhere in an epoch, for any number of ranks, batch size and ``gradient_accumulation_steps``. With
    ``ignore_data_skip=True`` the epoch begins again, as in a plain Trainer.

    Evaluation and ``predict`` deliver every sample once, in the order of the source; ``compute_metrics`` sees
    exactly these rows. The loss is the mean over all labels that are not -100 or, for other labels, over rows.

    Needs Transformers 5 (``_run_epoch`` and ``_init_training_state`` of its Trainer are overridden).

    Raises:
        ArgumentError: a loader, a stream or an argument that the Trainer cannot use.
        StateError: a checkpoint without a loader's state, or one of other data or another plan.
    """

    _feed: TrainerFeed | None = None
    _checkpoint: _TrainerCheckpoint | None = None
    _first_epoch: int | None = None
    #: The loader's state at the last update; the Trainer reads the batches of the next update before it.
    _state_at_update: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trainer = super()
        missing = [name for name in _OVERRIDDEN if not hasattr(trainer, name)]
        if missing:
            raise ArgumentError(
                "the mixin needs the Trainer of Transformers 5 as its next base class",
                expected="class Trainer(FeedMixin, transformers.Trainer), transformers>=5",
                found=f"no {', '.join(missing)} in {[each.__name__ for each in type(self).__mro__[1:3]]}",
            )
        for each in (*args, *kwargs.values()):
            is_fed(each)  # before the Trainer reports that a stream has no length
        super().__init__(*args, **kwargs)
        # First, so that the other callbacks see the right epoch.
        self.callback_handler.callbacks.insert(0, _epoch_keeper(self))

    def get_train_dataloader(self) -> Any:
        """The feed of ``train_dataset``, at the start of the first epoch."""
        if not is_fed(self.train_dataset):
            self._feed = None
            return super().get_train_dataloader()
        args = self.args
        strategy = getattr(args, "train_sampling_strategy", "random")
        if strategy not in ("random", "sequential") or getattr(args, "group_by_length", False):
            raise ArgumentError(
                "a source cannot be read in batches of similar length",
                expected='train_sampling_strategy="random" or "sequential"',
                found=repr(strategy),
                remedy="pack the tokens into rows of one length",
            )
        loader = self._make_loader(
            self.train_dataset,
            self._train_batch_size,
            shuffle=strategy == "random",
            tail="drop" if args.dataloader_drop_last else "even",
        )
        masks_loss = bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        self._feed = TrainerFeed(loader, self._model_columns(), masks_loss=masks_loss)
        self._feed.rewind()
        return self._feed

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The feed of ``eval_dataset``, one of them by its name, or the Trainer's own."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if not is_fed(dataset):
            return super().get_eval_dataloader(eval_dataset)
        return self._eval_feed(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The feed of the dataset of ``predict``."""
        if not is_fed(test_dataset):
            return super().get_test_dataloader(test_dataset)
        return self._eval_feed(test_dataset)

    def _eval_feed(self, dataset: Source | Loader) -> TrainerFeed:
        if self.args.eval_use_gather_object:
            raise ArgumentError("predictions are gathered as tensors", remedy="leave out eval_use_gather_object")
        if self._feed is not None and dataset is self._feed.loader:
            raise ArgumentError("one loader cannot train and evaluate", remedy="give two loaders, or the source")
        loader = self._make_loader(dataset, self.args.eval_batch_size, shuffle=False, tail="pad")
        if loader.tail != "pad":
            raise ArgumentError(
                "evaluation gathers equally many rows of each rank", expected='tail="pad"', found=repr(loader.tail)
            )
        if loader.topology.world_size != self.args.world_size:
            raise ArgumentError(
                "evaluation gathers the rows of each process, and tensor- or context-parallel ranks share them",
                expected=f"{self.args.world_size} ranks with their own rows",
                found=loader.topology.world_size,
                remedy="evaluate on a Dataset that is no source, which the Trainer reads without rankfeed",
            )
        return TrainerFeed(loader, self._model_columns(), self.accelerator.gradient_state)

    def _model_columns(self) -> set[str] | None:
        """The columns that the model uses; None if others are not removed."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return set(self._signature_columns)

    def _make_loader(self, dataset: Source | Loader, batch_size: int, *, shuffle: bool, tail: Any) -> Loader:
        args = self.args
        loader = (
            dataset if isinstance(dataset, Loader) else self._loader_of_source(dataset, batch_size, shuffle, tail)
        )
        if loader.batch_size != batch_size:
            raise ArgumentError(
                "the loader has another batch size than the Trainer's arguments",
                expected=batch_size,
                found=loader.batch_size,
                remedy="pass a source, or set per_device_..._batch_size to that of the loader",
            )
        if self.get_sp_size() > 1:
            raise ArgumentError(
                "sequence parallelism divides a DataLoader's batches, and cannot be used here", found="sp_size > 1"
            )
        ranks = args.world_size // (self.get_tp_size() * self.get_cp_size())
        topology = loader.topology
        if topology.world_size != ranks or (ranks == args.world_size and topology.rank != args.process_index):
            raise ArgumentError(
                "the loader's ranks are not the data-parallel ranks of the Trainer",
                expected=f"{ranks} ranks",
                found=f"rank {topology.rank} of {topology.world_size}",
                remedy="give a Loader with topology=rankfeed.Topology.from_mesh(mesh, dims)",
            )
        return loader

    def _loader_of_source(self, source: Source, batch_size: int, shuffle: bool, tail: Any) -> Loader:
        args = self.args
        used, fields = self._model_columns(), source.fields
        columns = [name for name in fields if used is None or name in used]
        if not columns:
            raise ArgumentError(
                "the model uses none of the source's columns",
                expected=", ".join(sorted(used or ())),
                found=", ".join(fields),
                remedy="rename them, or remove_unused_columns=False",
            )
        collator = self.data_collator
        if collator is need("transformers", extra="transformers").default_data_collator:
            collator = PadTokens(pad_token_id=getattr(self.processing_class, "pad_token_id", None) or 0)
        pads = isinstance(collator, PadTokens)
        return Loader(
            source,
            batch_size,
            shuffle=shuffle,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            tail=tail,
            columns=columns,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor or 2,
            batch_transform=collator if pads else None,
            collate_fn=None if pads else PlainDictCollator(collator),
        )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the loader continues where the checkpoint was taken."""
        self._checkpoint = self._first_epoch = None
        if resume_from_checkpoint is True:
            utils = need("transformers.trainer_utils", extra="transformers")
            resume_from_checkpoint = utils.get_last_checkpoint(self.args.output_dir) or True
        fed = is_fed(self.train_dataset)
        if fed and not isinstance(resume_from_checkpoint, (bool, type(None))) and not self.args.ignore_data_skip:
            self._checkpoint = _read_checkpoint(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any, **more: Any) -> Any:
        """Epochs and updates of the whole run, including those on other topologies before it was resumed."""
        values = super().set_initial_training_values(args, dataloader, *rest, **more)
        if self._checkpoint is None or not isinstance(dataloader, TrainerFeed):
            return values
        dataloader.loader.load_state_dict(self._checkpoint.state)
        if dataloader.left == 0:
            dataloader.set_epoch(dataloader.loader.epoch + 1)
        self._first_epoch = dataloader.loader.epoch
        epochs, updates, examples, samples, total, steps, max_steps = values
        # Updates that an uninterrupted run of this topology would have made here, and the difference to this run.
        uninterrupted = (self._first_epoch + 1) * updates - ceil(
            dataloader.left / args.gradient_accumulation_steps
        )
        ahead = self._checkpoint.global_step - uninterrupted
        if args.max_steps > 0:
            epochs = max(ceil((max_steps - ahead) / updates), self._first_epoch)
        else:
            max_steps += ahead
        return epochs, updates, examples, samples, total, steps, max_steps

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        begun = super()._init_training_state(*args, **kwargs)
        return begun if self._first_epoch is None else (self._first_epoch, 0)  # nothing to skip

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **rest: Any) -> Any:
        if isinstance(train_dataloader, TrainerFeed):
            train_dataloader.set_epoch(epoch)
            self._state_at_update = train_dataloader.loader.state_dict()
            if self.state.global_step >= self.state.max_steps:  # resumed at its end
                self.control.should_training_stop = True
                return None
            left = train_dataloader.left
            rest["steps_in_epoch"] = left
            rest["num_update_steps_per_epoch"] = ceil(left / self.args.gradient_accumulation_steps)
            rest["steps_trained_in_current_epoch"] = 0
        return super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **rest)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._feed is not None:
            # In the file of global_step, so that a killed job has both of them or none.
            self.state.stateful_callbacks[_STATE_KEY] = self._state_at_update
        return super()._save_checkpoint(*args, **kwargs)


def _read_checkpoint(checkpoint: Path) -> _TrainerCheckpoint:
    """The state of a checkpoint."""
    path = checkpoint / "trainer_state.json"
    try:
        read = json.loads(path.read_bytes())
        global_step, callbacks = int(read["global_step"]), dict(read.get("stateful_callbacks") or {})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(
            "the checkpoint has no readable trainer_state.json",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=str(path),
            remedy="a job that is killed while saving leaves such a folder: remove it, and use the one before",
        ) from error
    if not isinstance(callbacks.get(_STATE_KEY), dict):
        raise StateError(
            "the checkpoint was written without the position in the data",
            where=str(path),
            remedy="ignore_data_skip=True begins its epoch again",
        )
    return _TrainerCheckpoint(global_step, callbacks[_STATE_KEY])


def _epoch_keeper(trainer: FeedMixin) -> Any:
    """A callback that sets the epoch at each update: the Trainer counts from where it resumed."""

    class EpochOfFeed(need("transformers", extra="transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._feed is not None:
                trainer._state_at_update = state_dict = trainer._feed.loader.state_dict()
                state.epoch = state_dict["epoch"] + state_dict["steps"] / max(len(trainer._feed), 1)

    return EpochOfFeed()
