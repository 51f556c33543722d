"""Grain's DataLoader, in an environment of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.zoo.data import BATCH, ROWS, place


class Source:
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"sample_id": np.int64(index)}

    def __repr__(self) -> str:
        return "Source()"


def loader(num_workers: int, shards: Any, rows: int = ROWS, **options: Any) -> Any:
    import grain.python as grain

    sampler = grain.IndexSampler(rows, shard_options=shards, shuffle=True, num_epochs=1, seed=3)
    return grain.DataLoader(
        data_source=Source(rows),
        sampler=sampler,
        operations=[grain.Batch(BATCH, **({"drop_remainder": False} | options))],
        worker_count=num_workers,
    )


def shards(**options: Any) -> Any:
    import grain.python as grain

    rank, world = place()
    return grain.ShardOptions(rank, world, **options)


def shared_out(num_workers: int) -> Any:
    """ShardOptions of this rank; one epoch, which is the same each time it is read."""
    return loader(num_workers, shards())


def not_shared_out(num_workers: int) -> Any:
    """NoSharding, which is what examples have."""
    import grain.python as grain

    return loader(num_workers, grain.NoSharding())


def one_too_many(num_workers: int) -> Any:
    """121 samples on 2 ranks, of which nothing says that any should be dropped: Grain leaves one out."""
    return loader(num_workers, shards(), ROWS + 1)


def remainder_dropped(num_workers: int) -> Any:
    """121 samples with drop_remainder: one never comes."""
    return loader(num_workers, shards(drop_remainder=True), ROWS + 1)
