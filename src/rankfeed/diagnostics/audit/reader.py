"""Iterates the loader on one rank for an audit, and records the key and place of each delivered sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from rankfeed.diagnostics.deliveries import LoaderTraits, RankEpoch, RankRecord
from rankfeed.diagnostics.judge import KeyKind
from rankfeed.diagnostics.keys import USUAL, Key, KeyArray, ids_in, keys_of
from rankfeed.diagnostics.multiset import HashPartitions
from rankfeed.diagnostics.samplers import attribute, traits_of
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


class AuditReader:
    """A rank's passes over its loader."""

    def __init__(self, loader: Iterable[Any], key: Key, scratch: Path, rank: int, memory: int) -> None:
        self.loader, self.key, self.scratch, self.memory = loader, key, scratch, memory
        self.records: list[RankRecord] = []
        self.partitions: list[HashPartitions] = []
        traits = traits_of(loader, 0 if as_own(loader) is not None else None)
        self.summary = RankSummary(rank, traits, dataset_of(loader))

    def read(self, max_steps: int | None) -> None:
        """Read an epoch."""
        path = self.scratch / f"epoch-{len(self.records)}"
        self.partitions.append(HashPartitions(path, self.memory, numbered=True))
        log = RankRecord(indexed=self.summary.traits.indexed)
        self.records.append(log)
        own, summary = as_own(self.loader), self.summary
        # A column of the user may have the name of the mask if the loader needs none.
        masked = own is not None and (own.tail == "pad" or "valid" not in own.source.fields)
        # Workers that persist would tag batches after the audit, too.
        tags = attribute(self.loader, "num_workers") and not attribute(self.loader, "persistent_workers")
        restore = record(self.loader, indices=False) if tags else lambda: None
        before = Counter[str]() if own is None else own.unproven_samples
        try:
            batches = iter(self.loader)
            for step, batch in enumerate(islice(batches, max_steps)):
                origin = batch if isinstance(batch, Tagged) else Tagged(batch, None)
                batch = origin.batch
                keys = self._keys(batch, step)
                if masked and isinstance(batch, Mapping) and "valid" in batch and summary.keys != "none":
                    keys = keys[batch["valid"].cpu().numpy()]  # other rows are padding
                log.add(keys, origin.worker, origin.streams)
                self.partitions[-1].add(keys)
            summary.cut |= max_steps is not None and next(batches, None) is not None
        finally:
            restore()
        plan = getattr(own, "plan", None)  # a stream has none, and an order of its own
        in_order = own is not None and (plan is None or plan.describe().get("shuffle") == "none")
        epoch = log.figures(summary.rank, in_order or log.ascending)
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
