"""Reads the data of a Trainer of Transformers through rankfeed loaders.

Written for Transformers 5, whose Trainer saves the number of updates and skips batches of the present number of
processes when it resumes (huggingface/transformers#34365 on its sharding).
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rankfeed._util.imports import need
from rankfeed.errors import ArgumentError, SourceError, StateError, describe_error
from rankfeed.integrations._compat import ActiveEpoch
from rankfeed.integrations.accelerate import check_ranks, gather_for_metrics
from rankfeed.integrations.transformers.tokens import IGNORED, PadTokens
from rankfeed.loading import Loader
from rankfeed.loading.streams.stream import Stream
from rankfeed.plan import Cursor
from rankfeed.sources import Source

#: Key of the loader's state among the "stateful_callbacks" of a checkpoint's trainer_state.json.
_STATE_KEY = "rankfeed"
#: Undocumented methods that the mixin overrides; Trainers before version 5 have others.
_OVERRIDDEN = ("_run_epoch", "_init_training_state", "_save_checkpoint", "set_initial_training_values")
_Trainer: Any = object


def is_fed(dataset: Any) -> bool:
    """Whether a Trainer's dataset is read by rankfeed; refuses a stream."""
    if isinstance(dataset, Stream) or (isinstance(dataset, Loader) and dataset.is_stream):
        raise ArgumentError(
            "a Trainer cannot train on a stream, which has no length",
            expected="a source, or a rankfeed.Loader of one",
            found=repr(getattr(dataset, "source", dataset)),
            remedy="write the samples once, rankfeed.write(samples, folder), and pass rankfeed.open(folder)",
        )
    return isinstance(dataset, (Source, Loader))


@dataclass(frozen=True)
class ModelColumns:
    """The arguments of a model's forward, which ``remove_unused_columns`` keeps, and which of them are labels."""

    arguments: frozenset[str]
    labels: frozenset[str]

    def kept(self, names: Collection[str]) -> list[str]:
        """The columns that the model uses; an ArgumentError if it would get labels alone."""
        kept = [name for name in names if name in self.arguments]
        if len(kept) < len(names) and self.labels.issuperset(kept):
            raise self.removed_error("the model uses none of the source's columns as an input", names)
        return kept

    def removed_error(self, failure: str, names: Collection[str]) -> ArgumentError:
        """An error whose cause is a column that was removed."""
        removed = [name for name in names if name not in self.arguments]
        return ArgumentError(
            failure,
            expected=f"arguments of the model's forward: {', '.join(sorted(self.arguments - self.labels))}",
            found=f"remove_unused_columns=True, which removes {', '.join(removed)}",
            remedy="TrainingArguments(remove_unused_columns=False) if the data_collator makes the arguments from "
            "these columns; else rename them, or pass a rankfeed.Loader whose transform returns the arguments",
        )


class TrainerFeed:
    """The batches of a loader without padding rows and with the columns that the model uses."""

    def __init__(
        self,
        loader: Loader,
        columns: ModelColumns | None = None,
        gradient_state: Any = None,
        *,
        masks_loss: bool = True,
    ) -> None:
        self.loader = loader
        loader.is_integrated = True
        self.dataset = loader.source
        self.batch_size = loader.batch_size
        #: Rows of the current batch that are not padding.
        self.rows = 0
        #: In evaluation, the weighted sum of this rank's losses, and the sum of the weights.
        self.loss, self.weight = 0.0, 0.0
        self._columns = columns  # that are kept; None for all
        self._gradient_state = gradient_state  # accelerate's, in evaluation
        self._masks_loss = masks_loss  # whether rows with masked labels do not affect the loss

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def steps_left(self) -> int:
        return len(self.loader) - self.loader.progress.cursor.steps

    def __iter__(self) -> Iterator[Any]:
        progress = self.loader.progress
        if self._gradient_state is not None:
            progress.go_to(Cursor())
            epoch = ActiveEpoch(self.loader.schedule_at(Cursor()), cuts_padding=True)
            yield from map(self._select, epoch.count(self.loader, self._gradient_state))
            return
        for batch in self.loader:
            delivered = progress.cursor.position - progress.previous.position
            selected = self._select(batch)
            if 0 < delivered < self.loader.topology.world_size and isinstance(selected, dict):  # a rank is empty
                self._mask_loss(selected)
            yield selected

    def _select(self, batch: Any) -> Any:
        """The batch without padding rows; if all rows are padding one is kept, since every rank takes the step."""
        self.rows = self.batch_size
        if not isinstance(batch, dict):
            return batch
        valid = batch.get("valid")
        if valid is None:
            columns = (column for column in batch.values() if torch.is_tensor(column) and column.dim())
            self.rows = next(map(len, columns), 0)
        else:
            self.rows = int(valid.sum())  # padding is at the end
        names = [name for name in batch if name != "valid"]
        kept = names if self._columns is None else self._columns.kept(names)
        self._check_nulls(batch, set(kept))
        if valid is None or self.rows == len(valid):
            return {name: batch[name] for name in kept}
        return {name: batch[name][: max(self.rows, 1)] for name in kept}

    def _check_nulls(self, batch: dict[str, Any], chosen: set[str]) -> None:
        """Refuse nulls of a column that the model uses without the mask of the column."""
        derived = [(name, mask) for name in chosen for mask in self.dataset.derived.get(name, ())]
        place = self.loader.progress.previous
        for name, mask in derived:
            valid = batch.get(mask)
            if mask in chosen or not torch.is_tensor(valid) or valid.dtype != torch.bool or valid.all():
                continue
            raise SourceError(
                "a value is null, and the model does not use the mask of its column",
                expected=f"values in column {name!r}, or {mask!r} among the arguments of the model's forward()",
                found=f"{int((~valid).sum())} nulls in a batch of {len(valid)} rows",
                where=f"rank {self.loader.topology.rank}, epoch {place.epoch}, step {place.steps}",
                remedy=f"replace nulls in the data_collator and remove {mask!r} from the batch; or leave such "
                "samples out with source.select()",
            )

    def _mask_loss(self, batch: dict[str, Any]) -> None:
        """Exclude the padding row of a rank without samples from the loss."""
        labels = batch.get("labels")
        if not self._masks_loss or not torch.is_tensor(labels) or labels.is_floating_point():
            raise ArgumentError(
                "fewer samples are left in this epoch than there are ranks, and the loss cannot exclude a rank",
                expected="integer labels, and a model or compute_loss_func that accepts num_items_in_batch",
                where=f"rank {self.loader.topology.rank}",
                remedy="resume on fewer ranks, or at the start of an epoch",
            )
        if self.rows == 0:
            batch["labels"] = torch.full_like(labels, IGNORED)


class FeedMixin(_Trainer):  # type: ignore[misc]
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
    #: Updates of the model and state of the loader in the checkpoint that training resumes from.
    _checkpoint: tuple[int, Mapping[str, Any]] | None = None
    _first_epoch: int | None = None
    #: The loader's state at the last update; the Trainer reads the batches of the next update before it.
    _state_at_update: Mapping[str, Any] | None = None
    #: What is evaluated, and whether the model predicts the next label, so that the first of a row has no loss.
    _evaluated: TrainerFeed | None = None
    _is_shifted = False
    # Attributes of the Trainer.
    gather_function: Any
    model_accepts_loss_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trainer = super()
        missing = [name for name in _OVERRIDDEN if not hasattr(trainer, name)]
        if missing:
            raise ArgumentError(
                "the mixin needs the Trainer of Transformers 5 as its next base class",
                expected="class Trainer(FeedMixin, transformers.Trainer), transformers>=5",
                found=f"no {', '.join(missing)} in {[base.__name__ for base in type(self).__mro__[1:3]]}",
            )
        for argument in (*args, *kwargs.values()):
            is_fed(argument)  # before the Trainer reports that a stream has no length
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
        loader.progress.go_to(Cursor())
        return self._feed

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The feed of ``eval_dataset``, one of them by its name, or the Trainer's own."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        return self._eval_feed(dataset) if is_fed(dataset) else super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The feed of the dataset of ``predict``."""
        return self._eval_feed(test_dataset) if is_fed(test_dataset) else super().get_test_dataloader(test_dataset)

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
                remedy="evaluate on a Dataset that is not a source, which the Trainer reads without rankfeed",
            )
        return TrainerFeed(loader, self._model_columns(), self.accelerator.gradient_state)

    def _model_columns(self) -> ModelColumns | None:
        """The columns that the model uses; None if others are not removed."""
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        labels = frozenset(("label", "label_ids", *self.label_names))
        return ModelColumns(frozenset(self._signature_columns), labels)

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
        check_ranks(loader, args.world_size, args.process_index, self.get_tp_size() * self.get_cp_size())
        return loader

    def _loader_of_source(self, source: Source, batch_size: int, shuffle: bool, tail: Any) -> Loader:
        args = self.args
        used, fields = self._model_columns(), [*source.fields]
        columns = fields if used is None else used.kept(fields)
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
            collate_fn=None if pads else partial(_plain_dict, collator, used, fields),
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
        global_step, state = self._checkpoint
        loader = dataloader.loader
        loader.load_state_dict(state)
        self._first_epoch = loader.epoch
        loader.set_epoch(loader.epoch)  # the next one, after a state of the end of one
        epochs, updates, examples, samples, total, steps, max_steps = values
        # Updates that an uninterrupted run of this topology would have made here, and the difference to this run.
        updates_left = math.ceil(dataloader.steps_left / args.gradient_accumulation_steps)
        ahead = global_step - ((self._first_epoch + 1) * updates - updates_left)
        if args.max_steps > 0:
            epochs = max(math.ceil((max_steps - ahead) / updates), self._first_epoch)
        else:
            max_steps += ahead
        return epochs, updates, examples, samples, total, steps, max_steps

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        begun = super()._init_training_state(*args, **kwargs)
        return begun if self._first_epoch is None else (self._first_epoch, 0)  # nothing to skip

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **rest: Any) -> Any:
        if isinstance(train_dataloader, TrainerFeed):
            train_dataloader.loader.set_epoch(epoch)
            self._state_at_update = train_dataloader.loader.state_dict()
            if self.state.global_step >= self.state.max_steps:  # resumed at its end
                self.control.should_training_stop = True
                return None
            left = train_dataloader.steps_left
            rest["steps_in_epoch"] = left
            rest["num_update_steps_per_epoch"] = math.ceil(left / self.args.gradient_accumulation_steps)
            rest["steps_trained_in_current_epoch"] = 0
        return super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **rest)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._feed is not None:
            # In the file of global_step, so that a killed job has both of them or none.
            self.state.stateful_callbacks[_STATE_KEY] = self._state_at_update
        return super()._save_checkpoint(*args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As the Trainer's, with exact rows and loss for a TrainerFeed."""
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, TrainerFeed):
            return super().evaluation_loop(dataloader, *rest)
        args = self.args
        original = self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices
        self._evaluated, self._is_shifted = dataloader, self._shifts_labels()
        dataloader.loss = dataloader.weight = 0.0
        self.gather_function = partial(gather_for_metrics, self.accelerator, self.accelerator.gather_for_metrics)
        # A rank's loss must be the model's mean over its rows, which is weighted here. The Trainer would divide it
        # by a count over all ranks, which is too high for some models (it includes the first labels of GPT-2).
        self.model_accepts_loss_kwargs = args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(dataloader, *rest)
        finally:
            self.gather_function, self.model_accepts_loss_kwargs, args.average_tokens_across_devices = original
            self._evaluated = None
        if output.metrics is not None and f"{metric_key_prefix}_loss" in output.metrics:
            own_sums = torch.tensor([dataloader.loss, dataloader.weight], dtype=torch.float64, device=args.device)
            total, weight = self.accelerator.gather(own_sums).view(-1, 2).sum(0).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = total / weight if weight else math.nan
        return output

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the loss is weighted by the number of labels or rows that it is the mean of."""
        feed = self._evaluated
        weight = 0 if feed is None else feed.rows
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        if weight and torch.is_tensor(labels) and not labels.is_floating_point():
            predicted = labels[..., 1:] if self._is_shifted and labels.dim() > 1 else labels
            weight = int(predicted.ne(IGNORED).sum())
        done = super().prediction_step(model, inputs, *args, **kwargs)
        if feed is not None and done[0] is not None and weight:
            loss = float(done[0])
            if math.isfinite(loss) or not self.args.logging_nan_inf_filter:
                feed.loss += loss * weight
                feed.weight += weight
        return done

    def _shifts_labels(self) -> bool:
        auto = need("transformers.models.auto.modeling_auto", extra="transformers")
        names = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        model = self.accelerator.unwrap_model(self.model)
        inner = getattr(getattr(model, "base_model", None), "model", model)  # of a PEFT model, or itself
        causal = (
            getattr(self, "_loss_shifts_labels", False) or {type(part).__name__ for part in (model, inner)} & names
        )
        return bool(causal) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _read_checkpoint(checkpoint: Path) -> tuple[int, Mapping[str, Any]]:
    """Updates of the model, and the state of the loader."""
    path = checkpoint / "trainer_state.json"
    try:
        read = json.loads(path.read_bytes())
        global_step, callbacks = int(read["global_step"]), dict(read.get("stateful_callbacks") or {})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StateError(
            "the checkpoint has no readable trainer_state.json",
            found=describe_error(error),
            where=str(path),
            remedy="a job that is killed while saving leaves such a folder: remove it, and use the one before",
        ) from error
    if not isinstance(callbacks.get(_STATE_KEY), dict):
        raise StateError(
            "the checkpoint was written without the position in the data",
            where=str(path),
            remedy="ignore_data_skip=True begins its epoch again",
        )
    return global_step, callbacks[_STATE_KEY]


def _epoch_keeper(trainer: FeedMixin) -> Any:
    """A callback that sets the epoch at each update: the Trainer counts from where it resumed."""

    class EpochOfFeed(need("transformers", extra="transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer._feed is not None:
                trainer._state_at_update = state_dict = trainer._feed.loader.state_dict()
                state.epoch = state_dict["epoch"] + state_dict["steps"] / max(len(trainer._feed), 1)

    return EpochOfFeed()


def _plain_dict(
    collator: Callable[[list[Any]], Any], used: ModelColumns | None, names: list[str], samples: list[Any]
) -> Any:
    """A collator's batch as a plain dict, to which a loader can add its mask."""
    try:
        batch = collator(samples)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if used is None or name not in names or name in used.arguments:
            raise
        raise used.removed_error(f"the data_collator needs the column {name!r}", names) from error
    return dict(batch) if isinstance(batch, Mapping) else batch
