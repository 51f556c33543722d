"""Adapts a loader to the interface that the Trainer of Transformers iterates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rankfeed.errors import ArgumentError
from rankfeed.integrations.transformers.tokens import IGNORED, without_padding
from rankfeed.loading import Loader, Stream
from rankfeed.plan import Schedule
from rankfeed.sources import Source


def is_fed(dataset: Any) -> bool:
    """Whether a Trainer's dataset is read by rankfeed."""
    if isinstance(dataset, Stream) or (isinstance(dataset, Loader) and dataset.is_stream):
        raise ArgumentError(
            "a Trainer cannot train on a stream, which has no length",
            expected="a source, or a rankfeed.Loader of one",
            found=repr(getattr(dataset, "source", dataset)),
            remedy="write the samples once, rankfeed.pack(samples, folder), and pass rankfeed.open(folder)",
        )
    return isinstance(dataset, (Source, Loader))


class TrainerFeed:
    """The batches of a loader without padding rows and with the columns that the model uses.

    Args:
        loader: the loader.
        columns: names of the columns to keep; None for all.
        gradient_state: accelerate's, which is informed of the last batch; None in training.
        masks_loss: whether a batch of padding rows only does not affect the loss once its labels are masked.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": i, "note": 0} for i in range(3)])
        >>> [batch["x"].tolist() for batch in TrainerFeed(rf.Loader(source, 2, tail="pad"), {"x"})]
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
        #: Rows of the current batch that are no padding.
        self.rows = 0
        #: Which rows of the current step are no padding, over all ranks: bool [world_size * batch_size].
        self.kept = torch.ones(loader.batch_size * loader.topology.world_size, dtype=torch.bool)
        self._columns = columns
        self._gradient_state = gradient_state
        self._masks_loss = masks_loss

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def left(self) -> int:
        """Steps left of the current epoch."""
        return len(self.loader) - int(self.loader.state_dict()["steps"])

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a loaded position in it is kept."""
        self.loader.set_epoch(epoch)

    def rewind(self) -> None:
        """Go to the start of epoch 0."""
        self.loader.load_state_dict({**self.loader.state_dict(), "epoch": 0, "position": 0, "steps": 0})

    def __iter__(self) -> Iterator[Any]:
        if self._gradient_state is None:
            yield from self._training_batches()
            return
        self.rewind()
        self.end_of_dataloader = False
        self._gradient_state._add_dataloader(self)
        try:
            last = len(self) - 1
            for step, batch in enumerate(self.loader):
                self.kept = self._kept_rows(step)
                self.end_of_dataloader = step == last
                yield self._select(batch)
        finally:
            self._gradient_state._remove_dataloader(self)

    def _training_batches(self) -> Iterator[Any]:
        batches = iter(self.loader)
        position = self.loader.state_dict()["position"]
        for batch in batches:
            before, position = position, self.loader.state_dict()["position"]
            selected = self._select(batch)
            some_rank_is_empty = 0 < position - before < self.loader.topology.world_size
            if some_rank_is_empty and isinstance(selected, dict):
                self._mask_loss(selected)
            yield selected

    def _select(self, batch: Any) -> Any:
        if not isinstance(batch, dict):
            self.rows = self.batch_size
            return batch
        batch, self.rows = without_padding(batch)
        return {name: batch[name] for name in batch if self._columns is None or name in self._columns}

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

    def _kept_rows(self, step: int) -> torch.Tensor:
        loader = self.loader
        if (step + 1) * len(self.kept) <= loader.plan.num_samples:
            return torch.ones_like(self.kept)
        schedule = Schedule(loader.plan, batch_size=loader.batch_size, topology=loader.topology, tail="pad")
        samples = torch.tensor([samples for _, samples in schedule.shares(step)])
        return (torch.arange(loader.batch_size) < samples[:, None]).flatten()
