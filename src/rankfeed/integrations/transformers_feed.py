"""A loader as the Trainer of Transformers iterates it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rankfeed.errors import ArgumentError
from rankfeed.integrations.transformers_batches import IGNORED, real_rows
from rankfeed.loading import Loader, Stream
from rankfeed.plan import Schedule
from rankfeed.sources import Source


def is_fed(dataset: Any) -> bool:
    """Whether a Trainer's data set is read by rankfeed; others are left to the Trainer.

    Raises:
        ArgumentError: it is a stream, which has no length to count a Trainer's epochs and updates by.
    """
    if isinstance(dataset, Stream) or (isinstance(dataset, Loader) and dataset.is_stream):
        raise ArgumentError(
            "a Trainer is not fed by a stream, which has no length",
            expected="a source, or a rankfeed.Loader of one",
            found=repr(getattr(dataset, "source", dataset)),
            remedy="write the samples down once, rankfeed.pack(samples, folder), and give rankfeed.open(folder)",
        )
    return isinstance(dataset, (Source, Loader))


class Feed:
    """A loader as the Trainer iterates it: batches of real rows only, and the columns that the model takes.

    Args:
        loader: what is iterated.
        columns: names that are handed on; None for all.
        gradient_state: accelerate's, told where a pass ends; None in training.
        masks_loss: whether a batch without any real row leaves the loss alone once its labels are masked.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": i, "note": 0} for i in range(3)])
        >>> [batch["x"].tolist() for batch in Feed(rf.Loader(source, 2, tail="pad"), {"x"})]
        [[0, 1], [2]]
    """

    def __init__(
        self,
        loader: Loader,
        columns: set[str] | None = None,
        gradient_state: Any = None,
        *,
        masks_loss: bool = True,
    ) -> None:
        self.loader = loader
        loader.is_integrated = True
        self.dataset = loader.source
        self.batch_size = loader.batch_size
        self.end_of_dataloader = False
        self.remainder = -1
        #: Real rows of the batch in hand.
        self.rows = 0
        #: Which rows of the batches in hand are real, over all ranks: bool [world_size * batch_size].
        self.kept = torch.ones(loader.batch_size * loader.topology.world_size, dtype=torch.bool)
        self._columns = columns
        self._gradient_state = gradient_state
        self._masks_loss = masks_loss

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def left(self) -> int:
        """Steps left of the epoch in hand."""
        return len(self.loader) - int(self.loader.state_dict()["steps"])

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a loaded place in it stays."""
        self.loader.set_epoch(epoch)

    def rewind(self) -> None:
        """Go to the very start, whatever was delivered before."""
        self.loader.load_state_dict({**self.loader.state_dict(), "epoch": 0, "position": 0, "steps": 0})

    def __iter__(self) -> Iterator[Any]:
        if self._gradient_state is None:
            yield from self._trained_on()
            return
        self.rewind()
        self.end_of_dataloader = False
        self._gradient_state._add_dataloader(self)
        try:
            last = len(self) - 1
            for step, batch in enumerate(self.loader):
                self.kept = self._kept(step)
                self.end_of_dataloader = step == last
                yield self._handed(batch)
        finally:
            self._gradient_state._remove_dataloader(self)

    def _trained_on(self) -> Iterator[Any]:
        batches = iter(self.loader)
        position = self.loader.state_dict()["position"]
        for batch in batches:
            before, position = position, self.loader.state_dict()["position"]
            handed = self._handed(batch)
            some_have_none = 0 < position - before < self.loader.topology.world_size
            if some_have_none and isinstance(handed, dict):
                self._mask(handed)
            yield handed

    def _handed(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            self.rows = self.batch_size
            return batch
        batch, self.rows = real_rows(batch)
        return {name: batch[name] for name in batch if self._columns is None or name in self._columns}

    def _mask(self, batch: dict[str, Any]) -> None:
        """Take the stand-in row of a rank that has no sample left out of the loss.

        Raises:
            ArgumentError: it cannot be; on every rank, for one that went on would wait for the others.
        """
        labels = batch.get("labels")
        if not self._masks_loss or not torch.is_tensor(labels) or labels.is_floating_point():
            raise ArgumentError(
                "fewer samples are left in this epoch than there are ranks, and the loss cannot leave a rank out",
                expected="integer labels, and a model or compute_loss_func that takes num_items_in_batch",
                where=f"rank {self.loader.topology.rank}",
                remedy="resume on fewer ranks, or at the start of an epoch",
            )
        if self.rows == 0:
            batch["labels"] = torch.full_like(labels, IGNORED)

    def _kept(self, step: int) -> torch.Tensor:
        loader = self.loader
        if (step + 1) * len(self.kept) <= loader.plan.num_samples:
            return torch.ones_like(self.kept)
        schedule = Schedule(loader.plan, batch_size=loader.batch_size, topology=loader.topology, tail="pad")
        samples = torch.tensor([samples for _, samples in schedule.shares(step)])
        return (torch.arange(loader.batch_size) < samples[:, None]).flatten()
