"""MosaicML's StreamingDataset."""

from __future__ import annotations

from typing import Any

from tests.zoo.data import BATCH, collate, mds
from torch.utils.data import DataLoader


def loader(num_workers: int, multiprocessing_context: Any, **options: Any) -> Any:
    from tests.sources.streaming_mds import streaming_dataset

    dataset = streaming_dataset()(local=str(mds()), **({"batch_size": BATCH} | options))
    context = multiprocessing_context if num_workers else None
    return DataLoader(dataset, BATCH, num_workers=num_workers, multiprocessing_context=context, collate_fn=collate)


def shuffled(num_workers: int, multiprocessing_context: Any) -> Any:
    """As its documentation says: sound."""
    return loader(num_workers, multiprocessing_context, shuffle=True, shuffle_block_size=40)


def remainder(num_workers: int, multiprocessing_context: Any) -> Any:
    """An epoch of 113 of 120: it repeats samples so that all ranks and workers have equally many."""
    return loader(num_workers, multiprocessing_context, epoch_size=113, shuffle=True)


def other_batch_size(num_workers: int, multiprocessing_context: Any) -> Any:
    """Told of batches of 40, read in batches of 5: it pads to what it was told."""
    return loader(num_workers, multiprocessing_context, batch_size=35)
