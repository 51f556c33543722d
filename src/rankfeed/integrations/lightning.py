"""Lightning: checks of a Trainer's loaders, exact means, and a watch over its ranks.

A :class:`rankfeed.Loader` works in a Trainer without this module: it is neither wrapped nor sharded again, its
epoch is set, and its position is in the Trainer's checkpoints. Works with ``lightning`` and with
``pytorch_lightning``.
"""

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import distributed

from rankfeed._util.imports import need
from rankfeed._util.validate import check_instance, check_str
from rankfeed.diagnostics.lockstep import Lockstep
from rankfeed.errors import ArgumentError, PlanError, listed
from rankfeed.integrations import _compat
from rankfeed.loading import Loader
from rankfeed.loading._compat import rankfeed_loaders, restore_positions
from rankfeed.plan import Cursor
from rankfeed.topology import process_group

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
#: Options that log_mean sets: the mean is exact with these values only.
_FIXED = ("batch_size", "on_step", "on_epoch", "reduce_fx", "sync_dist", "sync_dist_group", "rank_zero_only")


def _callback_class() -> Any:
    """Callback of the package in use; a Trainer of the other one accepts it as well."""
    for package in sorted(_PACKAGES, key=lambda package: package not in sys.modules):
        with suppress(ModuleNotFoundError):
            return import_module(package).Callback
    return need("lightning", extra="lightning").pytorch.Callback


class LoaderCheck(_callback_class()):  # type: ignore[misc]
    """A Callback that checks all loaders of a Trainer, of any type, before a rank can wait for another.

    At the start of training, of each epoch and of each evaluation the ranks compare their numbers of batches. With
    different numbers, the ranks with more would wait in a collective forever. Loaders of unknown length cannot be
    compared.

    It also lets the Trainer continue where a checkpoint was taken. Batches are recounted where an epoch was
    resumed on another number of ranks: Lightning would limit all later epochs to the number of that one. After
    the last batch of an epoch the next one begins. A checkpoint that is written during a batch, because of an
    exception or a signal, has the position before that batch.

    Raises:
        PlanError: the ranks would take different numbers of batches; names them.
        ArgumentError: ``overfit_batches`` is set, and a rankfeed.Loader shuffles: epochs would differ. Or a Loader
            is used twice, or other code iterates it during an epoch: it has only one position.

    Examples:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[LoaderCheck()], accelerator="cpu", logger=False)
    """

    #: How many batches have been trained on, and the positions of the loaders after the last of them.
    _trained: tuple[int, dict[Loader, Cursor]] = (-1, {})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for loader in _refuse_reuse(trainer.fit_loop):
            if trainer.overfit_batches > 0 and not loader.is_stream and loader.plan.shuffle != "none":
                raise ArgumentError(
                    "overfit_batches needs the same batches in every epoch",
                    expected="a Loader with shuffle=False",
                    found=f"one with shuffle={loader.plan.shuffle!r}",
                )
        restore_positions(trainer.fit_loop)
        _compat.correct_resumed_epoch(trainer.fit_loop)
        self.on_train_epoch_start(trainer, pl_module)
        _compare_ranks("val", trainer.num_val_batches)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        _compat.recount_batches(trainer)
        _compare_ranks("train", [trainer.num_training_batches])
        self._record_positions(trainer, _compat.positions_after_batch(trainer.fit_loop))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._record_positions(trainer, _compat.positions_after_epoch_end(trainer.fit_loop, self._trained[1]))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        batches, positions = self._trained
        if batches != trainer.fit_loop.epoch_loop.batch_progress.total.processed:
            positions = _compat.positions_after_batch(trainer.fit_loop)  # a batch has ended without a callback yet
        _compat.save_positions(trainer.fit_loop, checkpoint["loops"]["fit_loop"], positions)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        _refuse_reuse(trainer.fit_loop)
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        _compare_ranks("val", batches)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        _compare_ranks("test", trainer.num_test_batches)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        _compare_ranks("predict", trainer.num_predict_batches)

    def _record_positions(self, trainer: Any, positions: dict[Loader, Cursor]) -> None:
        self._trained = trainer.fit_loop.epoch_loop.batch_progress.total.processed, positions


class LockstepCheck(_callback_class()):  # type: ignore[misc]
    """A Callback that ends a hanging training, by an error or exit code 86, and names the rank, the step and why.

    It watches the steps of training with :class:`rankfeed.Lockstep`. Failures in an evaluation or a checkpoint in
    between are reported too; these may take any time, as long as no rank waits in a collective beyond the limit.

    Args:
        **options: of :class:`rankfeed.Lockstep`, such as ``limit``.

    Raises:
        LockstepError: another rank failed, ended, was killed or did not arrive within the limit.

    Examples:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[LockstepCheck(limit=600)], accelerator="cpu", logger=False)
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"name": "lightning", **options}
        self._lockstep: Lockstep[Any] = Lockstep(**self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._lockstep = Lockstep(**self._options).__enter__()

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


def log_mean(
    module: Any, name: str, values: torch.Tensor, valid: torch.Tensor | None = None, **options: Any
) -> None:
    """Log the mean of a value over all rows of an epoch and all ranks, for unequal batches too.

    ``self.log(..., sync_dist=True)`` takes the mean of a batch, padding included, and rounds the number of rows
    per rank. Here rows are summed in float64 (float32 where the device has no other) and divided once. Call it in
    each step, on all ranks.

    Args:
        module: the LightningModule, in one of its steps.
        name: of the logged mean.
        values: one number for each row; or of any other shape.
        valid: bool, of the shape of ``values`` or of its first dimensions: False for padding. A batch of
            ``tail="pad"`` has it as ``batch["valid"]``. None: all are valid.
        **options: of ``self.log``, such as ``prog_bar``; not those that determine the mean.

    Raises:
        ArgumentError: ``valid`` doesn't fit the values, or an option is set here.

    Examples:
        >>> class Logged:
        ...     trainer = type("Trainer", (), {"world_size": 2})
        ...     def log(self, name, value, batch_size, **options):
        ...         print(name, value.item(), batch_size)
        >>> log_mean(Logged(), "loss", torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]))
        loss 6.0 1
        loss 0.0 3
    """
    if refused := [option for option in options if option in _FIXED]:
        raise ArgumentError(
            "log_mean determines how the mean is computed", found=listed(refused), remedy="leave these out"
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
                remedy='pass one value for each row (reduction="none")',
            )
        values = values[valid]
    total = values.sum(dtype=torch.float32 if values.device.type == "mps" else torch.float64)
    # Lightning sums value * batch_size and batch_size, divides each sum by the number of ranks, the second one as
    # an integer, and then one by the other. So both are multiplied by that number; the sum is logged as a batch of
    # one row and the other rows as zeros, since a mean times a number of rows would not be the sum again.
    ranks = module.trainer.world_size
    rows = ranks * values.numel()
    fixed = {**options, "on_step": False, "on_epoch": True, "sync_dist": True}
    module.log(name, total * ranks, batch_size=min(rows, 1), **fixed)
    module.log(name, torch.zeros_like(total), batch_size=max(rows - 1, 0), **fixed)


def _compare_ranks(stage: str, batches: list[int | float]) -> None:
    """Compare the numbers of batches, one for each loader, with those of the other ranks."""
    if (group := process_group()) is None:
        return
    ranks: list[list[int | float]] = [[]] * group[1]
    distributed.all_gather_object(ranks, batches)
    if any(lengths != ranks[0] for lengths in ranks):
        counts = [f"rank {rank}: {' and '.join(map(str, lengths))}" for rank, lengths in enumerate(ranks)]
        raise PlanError(
            f"the ranks would take different numbers of {stage} batches, and wait for each other forever",
            expected="the same number on every rank",
            found=listed(counts, most=16),
            where=f"rank {group[0]}",
            remedy="use a rankfeed.Loader, or give your DataLoader a rankfeed.DistributedSampler",
        )


def _refuse_reuse(loop: Any) -> list[Loader]:
    """The rankfeed loaders of a fit loop, of which none may train and be read elsewhere."""
    training = rankfeed_loaders(loop)
    used = [*training, *rankfeed_loaders(loop.epoch_loop.val_loop)]
    if any(used.count(loader) > 1 for loader in training):
        raise ArgumentError(
            "one Loader cannot be read twice at the same time: it has one position, which checkpoints save",
            expected="a Loader for training that nothing else reads",
            remedy="create another Loader, over the same source if you like",
        )
    return used
