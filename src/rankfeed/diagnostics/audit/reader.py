"""One rank reads its loader, and keeps the key and place of each delivery."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from rankfeed.diagnostics.audit.epochs import WHOLE_RANK, LoaderTraits, RankEpoch
from rankfeed.diagnostics.audit.rules import KeyKind
from rankfeed.diagnostics.keys import USUAL, Key, Words, ids_in, keys_of
from rankfeed.diagnostics.multiset import HashPartitions, pack_places
from rankfeed.diagnostics.tagged import Tagged, tagged
from rankfeed.errors import AuditError
from rankfeed.plan import Plan

if TYPE_CHECKING:
    from rankfeed.loading import Loader


@dataclass(frozen=True)
class RankSummary:
    """What a rank tells the others after it has read its loader."""

    rank: int
    share: int | None  # of tensor-parallel peers, the data-parallel rank whose samples they read
    keys: KeyKind
    width: int  # words of a key; 0 if there are none
    epochs: tuple[RankEpoch, ...]
    cut: bool
    traits: LoaderTraits
    dataset: tuple[int, int] | None  # length, and a fingerprint of the indices of a Subset


@dataclass
class ObservedEpoch:
    """An epoch of one rank, while it is read."""

    partitions: HashPartitions | None = None
    sizes: array[int] = field(default_factory=lambda: array("q"))
    ascending: bool = True
    streams: dict[tuple[int, str], str] = field(default_factory=dict)
    _last: int = -(1 << 63)
    _orders: dict[int, xxh3_128] = field(default_factory=lambda: {WHOLE_RANK: xxh3_128()})

    def add(self, words: Words, worker: int | None) -> None:
        """Count the keys of a batch."""
        content = np.ascontiguousarray(words)
        for order in {WHOLE_RANK, WHOLE_RANK if worker is None or not len(words) else worker}:
            self._orders.setdefault(order, xxh3_128()).update(content.data)
        if words.shape[1] > 1:
            self.ascending = False
        elif len(words):
            numbers = words[:, 0].view(np.int64)
            self.ascending &= bool(self._last <= numbers[0] and (numbers[1:] >= numbers[:-1]).all())
            self._last = int(numbers[-1])
        if self.partitions is not None:
            self.partitions.add(np.column_stack([words, pack_places(len(self.sizes), len(words), worker)]))
        self.sizes.append(len(words))

    def figures(self, rank: int, in_order: bool) -> RankEpoch:
        drawn = tuple((worker, name, digest) for (worker, name), digest in sorted(self.streams.items()))
        sizes = dict(sorted(Counter(self.sizes).items()))
        orders = {worker: order.hexdigest() for worker, order in self._orders.items()}
        return RankEpoch(rank, len(self.sizes), sum(self.sizes), sizes, orders, in_order or self.ascending, drawn)


class AuditReader:
    """A rank's passes over its loader."""

    def __init__(self, loader: Iterable[Any], key: Key, scratch: Path, rank: int, memory: int) -> None:
        self.loader, self.key, self.scratch, self.rank, self.memory = loader, key, scratch, rank, memory
        self.logs: list[ObservedEpoch] = []
        self.keys: KeyKind = "ids"
        self.width = 0
        self.cut = False
        self.traits, self.dataset = traits_of(loader), dataset_of(loader)

    def read(self, max_steps: int | None) -> None:
        """Read an epoch."""
        log = ObservedEpoch()
        self.logs.append(log)
        own = as_own(self.loader)
        # A column of the user may have the name of the mask if the loader needs none.
        masked = own is not None and (own.tail == "pad" or "valid" not in own.source.fields)
        with tagged(self.loader):
            batches = iter(self.loader)
            for batch in islice(batches, max_steps):
                worker = None
                if isinstance(batch, Tagged):
                    worker = batch.worker or 0
                    log.streams |= {(worker, name): digest for name, digest in batch.streams.items()}
                    batch = batch.batch
                words = self._keys(batch, len(log.sizes))
                if masked and isinstance(batch, Mapping) and "valid" in batch and self.keys != "none":
                    words = words[batch["valid"].cpu().numpy()]  # other rows are padding
                if len(words) and log.partitions is None:
                    path = self.scratch / f"epoch-{len(self.logs)}"
                    log.partitions = HashPartitions(path, self.width + 1, self.memory)
                log.add(words, worker)
            self.cut |= max_steps is not None and next(batches, None) is not None

    def _keys(self, batch: Any, step: int) -> Words:
        """Keys of a batch; none if it has no ids and its rows cannot be told apart."""
        try:
            words, by_content = keys_of(batch, self.key)
        except AuditError:
            if self.key != USUAL or ids_in(batch, USUAL) is not None:
                raise
            words, by_content, self.keys = np.empty((0, 1), np.uint64), False, "none"
        if by_content and self.keys == "ids":
            self.keys = "content"
        if len(words) and self.keys != "none":
            if self.width not in (0, words.shape[1]):
                raise AuditError(
                    "keys are whole numbers in some batches and not in others",
                    where=f"rank {self.rank}, step {step}",
                    remedy="key= names a field that all samples have",
                )
            self.width = words.shape[1]
        return words if self.keys != "none" else words[:0]

    def summary(self) -> RankSummary:
        own = as_own(self.loader)
        plan = getattr(own, "plan", None)  # a stream has none, and an order of its own
        in_order = own is not None and (plan is None or plan.describe().get("shuffle") == "none")
        return RankSummary(
            self.rank,
            share=own.topology.rank if own is not None and own.topology.launcher == "mesh" else None,
            keys=self.keys,
            width=self.width,
            epochs=tuple(log.figures(self.rank, in_order) for log in self.logs),
            cut=self.cut,
            traits=self.traits,
            dataset=self.dataset,
        )


def as_own(loader: Any) -> Loader | None:
    """The loader, if it is a `Loader`, of a source or of a stream."""
    from rankfeed.loading import Loader

    return loader if isinstance(loader, Loader) else None


def traits_of(loader: Any) -> LoaderTraits:
    """What a loader and its samplers declare."""
    workers = getattr(loader, "num_workers", 0)
    samplers = [*_samplers(loader)]
    return LoaderTraits(
        workers=workers if isinstance(workers, int) and as_own(loader) is None else 0,
        drops=any(getattr(each, "drop_last", False) is True for each in (loader, *samplers))
        or getattr(loader, "tail", None) == "drop",
        replaces=any(
            getattr(each, "replacement", False) is True or type(each).__name__.startswith("Weighted")
            for each in samplers
        ),
    )


def _samplers(loader: Any) -> Iterator[Any]:
    yield getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    for _ in range(3):  # Accelerate puts one around another
        yield batches
        batches = getattr(batches, "batch_sampler", None) or getattr(batches, "sampler", None)


def dataset_of(loader: Any) -> tuple[int, int] | None:
    """Samples of an epoch as far as the loader shows them, and a fingerprint of the indices of a torch Subset."""
    from torch.utils.data import DataLoader, IterableDataset, Subset

    if (own := as_own(loader)) is not None:
        plan = getattr(own, "plan", None)
        return (plan.num_samples, 0) if type(plan) is Plan and not own.state_dict()["position"] else None
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    indices = np.asarray(dataset.indices) if isinstance(dataset, Subset) else np.empty(0)
    return len(dataset), xxh3_64_intdigest(indices.tobytes())
