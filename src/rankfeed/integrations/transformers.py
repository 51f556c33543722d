"""The Trainer of Transformers, fed by rankfeed: exact shares, resumption by seeking, exact evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rankfeed.errors import ArgumentError, StateError, safe_str
from rankfeed.integrations.transformers_batches import AsDict, PadTokens
from rankfeed.integrations.transformers_evaluation import ExactEvaluation
from rankfeed.integrations.transformers_feed import Feed, is_fed
from rankfeed.loading import Loader
from rankfeed.sources import Source
from rankfeed.sources.extras import need

__all__ = ["FeedMixin", "PadTokens"]

#: Where the loader's state lies among the "stateful_callbacks" of a checkpoint's trainer_state.json.
_KEY = "rankfeed"
#: What the mixin overrides beside the documented methods; Trainers before 5 have other ones.
_NEEDED = ("_run_epoch", "_init_training_state", "_save_checkpoint", "set_initial_training_values")


@dataclass(frozen=True)
class _Place:
    """What a checkpoint says: updates of the model, and the loader's state."""

    global_step: int
    state: Mapping[str, Any]


class FeedMixin(ExactEvaluation):
    """Feeds a Trainer from rankfeed sources or loaders: ``class Trainer(FeedMixin, transformers.Trainer): ...``.

    ``train_dataset``, ``eval_dataset`` (or a dict of them) and what ``predict`` gets may be a source or a
    :class:`rankfeed.Loader`; anything else is left to the Trainer. For a source the loader is made from the
    arguments: batch size, ``data_seed`` (or ``seed``), number of workers (threads), ``dataloader_drop_last``,
    ``train_sampling_strategy`` ("random" or "sequential"), ``remove_unused_columns``, and the ``data_collator``.

    A checkpoint holds the loader's state in its ``trainer_state.json``. Resuming seeks: it takes the same time
    anywhere in an epoch, on any number of ranks, batch size and ``gradient_accumulation_steps``. With
    ``ignore_data_skip=True`` the epoch begins anew, as it does in a plain Trainer.

    Evaluation and ``predict`` deliver every sample once, in the order of the source; ``compute_metrics`` sees
    exactly these rows. The loss is the mean over all labels that count (not -100) or, for other labels, over rows.

    Needs Transformers 5 (``_run_epoch`` and ``_init_training_state`` of its Trainer are overridden).

    Raises:
        ArgumentError: a loader, a stream or an argument that the Trainer cannot be fed by.
        StateError: a checkpoint without a loader's state, or one of other data or another plan.
    """

    _feed: Feed | None = None
    _place: _Place | None = None
    _first_epoch: int | None = None
    #: The loader's state at the last update: the Trainer takes the batches of the next one before it makes it.
    _updated: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        behind = super()
        missing = [name for name in _NEEDED if not hasattr(behind, name)]
        if missing:
            raise ArgumentError(
                "the mixin needs the Trainer of Transformers 5 behind it",
                expected="class Trainer(FeedMixin, transformers.Trainer), transformers>=5",
                found=f"no {', '.join(missing)} in {[each.__name__ for each in type(self).__mro__[1:3]]}",
            )
        for each in (*args, *kwargs.values()):
            is_fed(each)  # a Trainer says other things of what has no length
        super().__init__(*args, **kwargs)
        # First of all, so that the others see the right epoch.
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
                "batches by length are not made of a source",
                expected='train_sampling_strategy="random" or "sequential"',
                found=repr(strategy),
                remedy="pack the tokens into rows of one length",
            )
        loader = self._loader_of(
            self.train_dataset,
            self._train_batch_size,
            shuffle=strategy == "random",
            tail="drop" if args.dataloader_drop_last else "even",
        )
        masks_loss = bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)
        self._feed = Feed(loader, self._taken(), masks_loss=masks_loss)
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
        """The feed of what ``predict`` got."""
        if not is_fed(test_dataset):
            return super().get_test_dataloader(test_dataset)
        return self._eval_feed(test_dataset)

    def _eval_feed(self, dataset: Source | Loader) -> Feed:
        if self.args.eval_use_gather_object:
            raise ArgumentError("predictions are gathered as tensors", remedy="leave out eval_use_gather_object")
        if self._feed is not None and dataset is self._feed.loader:
            raise ArgumentError("one loader cannot train and evaluate", remedy="give two loaders, or the source")
        loader = self._loader_of(dataset, self.args.eval_batch_size, shuffle=False, tail="pad")
        if loader.tail != "pad":
            raise ArgumentError(
                "evaluation gathers as many rows of each rank", expected='tail="pad"', found=repr(loader.tail)
            )
        if loader.topology.world_size != self.args.world_size:
            raise ArgumentError(
                "tensor- or context-parallel ranks share their rows, and evaluation gathers those of each process",
                expected=f"{self.args.world_size} ranks with rows of their own",
                found=loader.topology.world_size,
                remedy="evaluate on a Dataset that is no source: the Trainer feeds that by itself",
            )
        return Feed(loader, self._taken(), self.accelerator.gradient_state)

    def _taken(self) -> set[str] | None:
        """The columns that the model takes, if others are to be left out."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return set(self._signature_columns)

    def _loader_of(self, dataset: Source | Loader, batch_size: int, *, shuffle: bool, tail: Any) -> Loader:
        args = self.args
        loader = dataset if isinstance(dataset, Loader) else self._made(dataset, batch_size, shuffle, tail)
        if loader.batch_size != batch_size:
            raise ArgumentError(
                "the loader has another batch size than the Trainer's arguments",
                expected=batch_size,
                found=loader.batch_size,
                remedy="give the Trainer a source, or per_device_..._batch_size of the loader",
            )
        if self.get_sp_size() > 1:
            raise ArgumentError("sequence parallelism cuts a DataLoader's batches itself", found="sp_size > 1")
        ranks = args.world_size // (self.get_tp_size() * self.get_cp_size())
        here = loader.topology
        if here.world_size != ranks or (ranks == args.world_size and here.rank != args.process_index):
            raise ArgumentError(
                "the loader's ranks are not those that the Trainer shares data between",
                expected=f"{ranks} ranks",
                found=f"rank {here.rank} of {here.world_size}",
                remedy="give a Loader with topology=rankfeed.Topology.from_mesh(mesh, dims)",
            )
        return loader

    def _made(self, source: Source, batch_size: int, shuffle: bool, tail: Any) -> Loader:
        args = self.args
        taken, fields = self._taken(), source.fields
        columns = [name for name in fields if taken is None or name in taken]
        if not columns:
            raise ArgumentError(
                "the model takes none of the source's columns",
                expected=", ".join(sorted(taken or ())),
                found=", ".join(fields),
                remedy="rename them, or remove_unused_columns=False",
            )
        collator = self.data_collator
        if collator is need("transformers", extra="transformers").default_data_collator:
            collator = PadTokens(pad_token_id=getattr(self.processing_class, "pad_token_id", None) or 0)
        ours = isinstance(collator, PadTokens)
        return Loader(
            source,
            batch_size,
            shuffle=shuffle,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            tail=tail,
            columns=columns,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor or 2,
            batch_transform=collator if ours else None,
            collate_fn=None if ours else AsDict(collator),
        )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's own; the loader goes on where the checkpoint was taken."""
        self._place = self._first_epoch = None
        if resume_from_checkpoint is True:
            utils = need("transformers.trainer_utils", extra="transformers")
            resume_from_checkpoint = utils.get_last_checkpoint(self.args.output_dir) or True
        fed = is_fed(self.train_dataset)
        if fed and not isinstance(resume_from_checkpoint, (bool, type(None))) and not self.args.ignore_data_skip:
            self._place = _place_in(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any, **more: Any) -> Any:
        """Epochs and updates of the whole run, those of other topologies before a resumption among them."""
        values = super().set_initial_training_values(args, dataloader, *rest, **more)
        if self._place is None or not isinstance(dataloader, Feed):
            return values
        dataloader.loader.load_state_dict(self._place.state)
        if dataloader.left == 0:
            dataloader.set_epoch(dataloader.loader.epoch + 1)
        self._first_epoch = dataloader.loader.epoch
        epochs, updates, examples, samples, total, steps, max_steps = values
        # Where an uninterrupted run of this topology would be now, in updates, and how far this one is beyond.
        here = (self._first_epoch + 1) * updates - ceil(dataloader.left / args.gradient_accumulation_steps)
        beyond = self._place.global_step - here
        if args.max_steps > 0:
            epochs = max(ceil((max_steps - beyond) / updates), self._first_epoch)
        else:
            max_steps += beyond
        return epochs, updates, examples, samples, total, steps, max_steps

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        begun = super()._init_training_state(*args, **kwargs)
        return begun if self._first_epoch is None else (self._first_epoch, 0)  # nothing to skip: it was sought

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **rest: Any) -> Any:
        if isinstance(train_dataloader, Feed):
            train_dataloader.set_epoch(epoch)
            self._updated = train_dataloader.loader.state_dict()
            if self.state.global_step >= self.state.max_steps:  # a run that was resumed at its end
                self.control.should_training_stop = True
                return None
            left = train_dataloader.left
            rest["steps_in_epoch"] = left
            rest["num_update_steps_per_epoch"] = ceil(left / self.args.gradient_accumulation_steps)
            rest["steps_trained_in_current_epoch"] = 0
        return super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **rest)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._feed is not None:
            # In the file that holds global_step: a job killed in between has both of them or none.
            self.state.stateful_callbacks[_KEY] = self._updated
        return super()._save_checkpoint(*args, **kwargs)


def _place_in(checkpoint: Path) -> _Place:
    """What a checkpoint says of the data.

    Raises:
        StateError: it was cut, or written without rankfeed.
    """
    path = checkpoint / "trainer_state.json"
    try:
        read = json.loads(path.read_bytes())
        global_step, callbacks = int(read["global_step"]), dict(read.get("stateful_callbacks") or {})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(
            "the checkpoint has no readable trainer_state.json",
            found=f"{type(error).__name__}: {safe_str(error)}",
            where=str(path),
            remedy="a job killed while it saved leaves such a folder: remove it, and resume from the one before",
        ) from error
    if not isinstance(callbacks.get(_KEY), dict):
        raise StateError(
            "the checkpoint was written without the place in the data",
            where=str(path),
            remedy="ignore_data_skip=True begins its epoch anew",
        )
    return _Place(global_step, callbacks[_KEY])


def _epoch_keeper(trainer: FeedMixin) -> Any:
    """A callback that says how much is done at each update: the Trainer counts from where it resumed."""

    class EpochOfFeed(need("transformers", extra="transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._feed is not None:
                trainer._updated = at = trainer._feed.loader.state_dict()
                state.epoch = at["epoch"] + at["steps"] / max(len(trainer._feed), 1)

    return EpochOfFeed()
