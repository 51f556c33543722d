"""One rank reads its loader, and keeps the key and place of each delivery."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from rankfeed.diagnostics.audit.epochs import WHOLE_RANK, LoaderTraits, RankEpoch
from rankfeed.diagnostics.audit.rules import KeyKind
from rankfeed.diagnostics.keys import USUAL, Key, KeyArray, ids_in, keys_of
from rankfeed.diagnostics.multiset import HashPartitions, StepLog
from rankfeed.diagnostics.samplers import attribute, draws_with_replacement, drops_remainder
from rankfeed.diagnostics.tagged import Tagged, record
from rankfeed.errors import AuditError
from rankfeed.plan import Plan

if TYPE_CHECKING:
    from rankfeed.loading import Loader


@dataclass
class RankSummary:
    """What a rank tells the others after it has read its loader."""

    rank: int
    traits: LoaderTraits
    dataset: tuple[int, int] | None  # length, and a fingerprint of the indices of a Subset
    share: int | None = None  # of tensor-parallel peers, the data-parallel rank whose samples they read
    keys: KeyKind = "ids"
    key_type: str = ""  # "i" for whole numbers, "S" for digests, empty without keys
    epochs: list[RankEpoch] = field(default_factory=list)
    cut: bool = False


@dataclass
class ObservedEpoch:
    """An epoch of one rank, while it is read."""

    partitions: HashPartitions
    sizes: array[int] = field(default_factory=lambda: array("q"))
    workers: array[int] = field(default_factory=lambda: array("h"))  # -1: unknown
    ascending: bool = True
    streams: dict[tuple[int, str], str] = field(default_factory=dict)
    _last: int = -(1 << 63)
    _orders: dict[int, xxh3_128] = field(default_factory=lambda: {WHOLE_RANK: xxh3_128()})

    def add(self, keys: KeyArray, worker: int | None) -> None:
        """Keep the keys of a batch."""
        for order in {WHOLE_RANK, WHOLE_RANK if worker is None or not len(keys) else worker}:
            self._orders.setdefault(order, xxh3_128()).update(keys.tobytes())
        if keys.dtype.kind != "i":
            self.ascending = False
        elif len(keys):
            self.ascending &= bool(self._last <= keys[0] and (keys[1:] >= keys[:-1]).all())
            self._last = int(keys[-1])
        if len(keys):
            self.partitions.add(keys)
        self.sizes.append(len(keys))
        self.workers.append(-1 if worker is None else worker)

    def figures(self, rank: int, in_order: bool) -> RankEpoch:
        drawn = tuple((worker, name, digest) for (worker, name), digest in sorted(self.streams.items()))
        sizes = dict(sorted(Counter(self.sizes).items()))
        orders = {worker: order.hexdigest() for worker, order in self._orders.items()}
        return RankEpoch(rank, len(self.sizes), sum(self.sizes), sizes, orders, in_order or self.ascending, drawn)


class AuditReader:
    """A rank's passes over its loader."""

    def __init__(self, loader: Iterable[Any], key: Key, scratch: Path, rank: int, memory: int) -> None:
        self.loader, self.key, self.scratch, self.memory = loader, key, scratch, memory
        self.partitions: list[HashPartitions] = []
        self.steps: list[StepLog] = []
        workers = 0 if as_own(loader) is not None else attribute(loader, "num_workers")
        workers = workers if isinstance(workers, int) else 0
        traits = LoaderTraits(workers, drops_remainder(loader), draws_with_replacement(loader))
        self.summary = RankSummary(rank, traits, dataset_of(loader))

    def read(self, max_steps: int | None) -> None:
        """Read an epoch."""
        path = self.scratch / f"epoch-{len(self.partitions)}"
        log = ObservedEpoch(HashPartitions(path, self.memory, numbered=True))
        self.partitions.append(log.partitions)
        own, summary = as_own(self.loader), self.summary
        # A column of the user may have the name of the mask if the loader needs none.
        masked = own is not None and (own.tail == "pad" or "valid" not in own.source.fields)
        # Workers that persist would tag batches after the audit, too.
        tags = attribute(self.loader, "num_workers") and not attribute(self.loader, "persistent_workers")
        restore = record(self.loader, indices=False) if tags else None
        before = Counter[str]() if own is None else own.unproven_samples
        try:
            batches = iter(self.loader)
            for batch in islice(batches, max_steps):
                worker = None
                if isinstance(batch, Tagged):
                    worker = batch.worker or 0
                    log.streams |= {(worker, name): digest for name, digest in batch.streams.items()}
                    batch = batch.batch
                keys = self._keys(batch, len(log.sizes))
                if masked and isinstance(batch, Mapping) and "valid" in batch and summary.keys != "none":
                    keys = keys[batch["valid"].cpu().numpy()]  # other rows are padding
                log.add(keys, worker)
            summary.cut |= max_steps is not None and next(batches, None) is not None
        finally:
            if restore is not None:
                restore()
        plan = getattr(own, "plan", None)  # a stream has none, and an order of its own
        in_order = own is not None and (plan is None or plan.describe().get("shuffle") == "none")
        self.steps.append(StepLog.of(log.sizes, log.workers))
        epoch = log.figures(summary.rank, in_order)
        # Ids of the user's own in a batch show what it has.
        if own is not None and (summary.keys != "ids" or self.key == own.id_column):
            epoch = replace(epoch, unproven=dict(own.unproven_samples - before))
        summary.epochs.append(epoch)
        if own is not None and own.topology.launcher == "mesh":
            summary.share = own.topology.rank

    def _keys(self, batch: Any, step: int) -> KeyArray:
        """Keys of a batch; none if it has no ids and its rows cannot be told apart."""
        summary = self.summary
        try:
            keys, by_content = keys_of(batch, self.key)
        except AuditError:
            if self.key != USUAL or ids_in(batch, USUAL) is not None:
                raise
            summary.keys = "none"
        if summary.keys == "none":
            return np.empty(0, np.int64)
        summary.keys = "content" if by_content else summary.keys
        if len(keys) and summary.key_type not in ("", keys.dtype.kind):
            raise AuditError(
                "keys are whole numbers in some batches and not in others",
                where=f"rank {summary.rank}, step {step}",
                remedy="key= names a field that all samples have",
            )
        summary.key_type = keys.dtype.kind if len(keys) else summary.key_type
        return keys


def as_own(loader: Any) -> Loader | None:
    """The loader, if it is a `Loader`, of a source or of a stream."""
    from rankfeed.loading import Loader

    return loader if isinstance(loader, Loader) else None


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
