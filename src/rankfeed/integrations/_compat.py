"""Corrects the batch counts and resume positions of Lightning and Accelerate, through their private details.

Each entry names the version it was written for and the upstream thread. What a Loader does without any of these
integrations is ``rankfeed.loading._compat``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rankfeed.errors import ArgumentError
from rankfeed.loading import Loader
from rankfeed.loading._compat import rankfeed_loaders
from rankfeed.plan import Cursor, Schedule

_T = TypeVar("_T")

# Accelerate 1.15 learns the end of an epoch from attributes of its own DataLoaders, which its GradientState keeps
# (huggingface/accelerate, data_loader.DataLoaderStateMixin).


class ActiveEpoch:
    """The rest of an epoch that is being read, with the attributes of a DataLoader that GradientState reads."""

    remainder = 0  # samples to keep of the last step; 0 for all, since no padding is gathered

    def __init__(self, schedule: Schedule, *, cuts_padding: bool = False) -> None:
        self.schedule, self.step, self._cuts_padding = schedule, -1, cuts_padding

    @property
    def shares(self) -> list[tuple[int, int]]:
        """For each rank, the rows of the current batch, and how many of them are not padding."""
        shares = self.schedule.shares(self.step)
        return [(max(samples, 1) if self._cuts_padding else rows, samples) for rows, samples in shares]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last."""
        return self.step == len(self.schedule) - 1

    def count(self, batches: Iterable[_T], gradient_state: Any) -> Iterator[_T]:
        """The batches, while GradientState knows this epoch; it forgets it also if the loop is left early."""
        gradient_state._add_dataloader(self)
        try:
            for batch in batches:
                self.step += 1
                yield batch
        finally:
            gradient_state._remove_dataloader(self)


# Lightning 2.6 counts the batches of an epoch before its loaders resume, takes the end of an epoch for progress in
# the next one, and saves the state of loaders that are one batch ahead (Lightning-AI/pytorch-lightning#19764).


def positions_after_batch(loop: Any) -> dict[Loader, Cursor]:
    """Positions of the loaders after the batch that a fit loop has taken last."""
    # Of loaders without a length it holds one more batch, to see their end in advance.
    ahead = bool(getattr(loop._data_fetcher, "batches", None))
    return {
        loader: loader.progress.previous if ahead else loader.progress.cursor for loader in rankfeed_loaders(loop)
    }


def positions_after_epoch_end(loop: Any, before: Mapping[Loader, Cursor]) -> dict[Loader, Cursor]:
    """Positions after a batch, corrected for loaders that are shorter than others and have ended."""
    positions, epoch = positions_after_batch(loop), loop.epoch_progress.current.processed
    for loader, cursor in positions.items():
        is_behind = (cursor.epoch, cursor.position) <= (before[loader].epoch, before[loader].position)
        if is_behind and loop.epoch_loop.batch_progress.current.processed > 1:
            raise ArgumentError(
                "a training loader was iterated by other code during an epoch: it has one position, and "
                "checkpoints would have that of the other iteration",
                expected=f"more than {before[loader].position} samples of epoch {before[loader].epoch} delivered",
                found=f"{cursor.position} of epoch {cursor.epoch}",
                where=f"rank {loader.topology.rank} of {loader.topology.world_size}",
                remedy="create another Loader, over the same source if you like, for hooks that read batches",
            )
        if loop._combined_loader._mode == "max_size":
            # It has moved on to its next epoch, and would be read in this one.
            if cursor.epoch > before[loader].epoch:
                end = before[loader].position if loader.is_stream else loader.plan.num_samples
                positions[loader] = replace(before[loader], position=end)
        elif cursor.epoch > epoch and loop.epoch_loop.batch_progress.is_last_batch:
            # It was begun again, and would continue there, where the next epoch begins it.
            positions[loader] = Cursor(epoch + 1)
    return positions


def save_positions(loop: Any, state: dict[str, Any], positions: Mapping[Loader, Cursor]) -> None:
    """Let the saved state of a fit loop be that after the last batch that was trained on."""
    if not (states := state["state_dict"].get("combined_loader")):
        return
    stateful = [
        loader
        for loader in loop._combined_loader.flattened
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    ]
    for loader, loader_state in zip(stateful, states, strict=True):
        if loader in positions:
            loader_state.update(loader.state_at(positions[loader]))
    batches = state["epoch_loop.batch_progress"]
    if loop._data_fetcher and loop._data_fetcher.fetched > batches["current"]["processed"]:
        batches["is_last_batch"] = False
    for counts in (batches["total"], batches["current"]):
        if counts["ready"] > counts["processed"]:
            counts.update(dict.fromkeys(("ready", "started", "completed"), counts["processed"]))
    if positions and batches["current"]["processed"] and not batches["is_last_batch"]:
        # Lightning counts an epoch that `max_steps` ended as finished, and would leave out the rest of it.
        for counts in state["epoch_progress"].values():
            if counts["processed"] == counts["started"]:
                counts.update(dict.fromkeys(("processed", "completed"), counts["started"] - 1))


def correct_resumed_epoch(loop: Any) -> None:
    """Begin the next epoch after a checkpoint of the end of one."""
    # Lightning would limit it to the batches of the old one.
    epochs, inner = loop.epoch_progress, loop.epoch_loop
    current, batches = epochs.current, inner.batch_progress
    is_over = current.ready == current.started == current.processed
    if not (loop.restarting and is_over and batches.is_last_batch and rankfeed_loaders(loop)):
        return
    if inner.restarted_on_train_batch_end:  # what Lightning would count of the last batch as it continues
        batches.increment_completed()
        inner._batches_that_stepped += not inner._should_accumulate()
    for counts in (epochs.total, current):
        counts.ready = counts.completed = counts.processed
    loop._restarting = inner.restarting = loop._resuming_from_checkpoint = False
    loop.update_restart_stage()


def recount_batches(trainer: Any) -> None:
    """Let this epoch have as many batches as its loaders; Lightning counts only before its first epoch."""
    loop = trainer.fit_loop
    combined, limit, loaders = loop._combined_loader, trainer.limit_train_batches, rankfeed_loaders(loop)
    if not loaders:
        return
    for loader in loaders:
        loader.is_recounted = True
    if loop.max_batches == float("inf"):  # beside a loader without a length
        return

    def limited(batches: int) -> int:
        return min(batches, limit) if isinstance(limit, int) else int(batches * limit)

    pairs = zip(combined.flattened, combined.limits, strict=True)
    limits = [limited(len(loader)) if loader in loaders and not loader.is_stream else old for loader, old in pairs]
    if limits == combined.limits and len(combined) == loop.max_batches:
        return
    combined.limits = limits
    iter(loop._data_fetcher)  # reads the length again
    loop.max_batches = len(combined)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
