"""MosaicML's StreamingDataset."""

from __future__ import annotations

from typing import Any

from tests.zoo import of_torch
from tests.zoo.data import BATCH, ROWS, collate, mds


def loader(num_workers: int, multiprocessing_context: Any, rows: int = ROWS, **options: Any) -> Any:
    from tests.sources.mds.streaming_mds import streaming_dataset

    dataset = streaming_dataset()(local=str(mds(rows)), **({"batch_size": BATCH} | options))
    return of_torch.loader(dataset, num_workers, multiprocessing_context, collate_fn=collate)


def shuffled(num_workers: int, multiprocessing_context: Any) -> Any:
    """As its documentation says: sound."""
    return loader(num_workers, multiprocessing_context, shuffle=True, shuffle_block_size=40)


def remainder(num_workers: int, multiprocessing_context: Any) -> Any:
    """113 samples: some are repeated, so that all ranks and workers have equally many."""
    return loader(num_workers, multiprocessing_context, ROWS - 7, shuffle=True)


def part_of_an_epoch(num_workers: int, multiprocessing_context: Any) -> Any:
    """An `epoch_size` of 90 of 120 samples: other samples are left out in each epoch."""
    return loader(num_workers, multiprocessing_context, epoch_size=90, shuffle=True)


def other_batch_size(num_workers: int, multiprocessing_context: Any) -> Any:
    """Told of batches of 35 and read in batches of 5: sound, though the order is another one than meant."""
    return loader(num_workers, multiprocessing_context, batch_size=35)
