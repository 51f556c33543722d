"""What Accelerate's `prepare` makes of a DataLoader."""

from __future__ import annotations

from typing import Any

from tests.zoo.data import ROWS
from tests.zoo.of_torch import Rows, Stream, distributed_sampler, loader


def prepared(of: Any, **options: Any) -> Any:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    return accelerator.prepare(of)


def shuffled(num_workers: int, multiprocessing_context: Any) -> Any:
    """A plain DataLoader, which Accelerate shares out: sound."""
    return prepared(loader(Rows(), num_workers, multiprocessing_context, shuffle=True), use_seedable_sampler=True)


def sampler_that_shards(num_workers: int, multiprocessing_context: Any) -> Any:
    """A DistributedSampler inside: of a rank's share Accelerate delivers each second batch."""
    return prepared(distributed_sampler(num_workers, multiprocessing_context))


def stream_that_shards(num_workers: int, multiprocessing_context: Any) -> Any:
    """A stream that reads its rank's share: rank 0 reads for all, and its share alone is seen."""
    return prepared(loader(Stream(), num_workers, multiprocessing_context))


def stream_that_shards_not_dispatched(num_workers: int, multiprocessing_context: Any) -> Any:
    """The same with dispatch_batches=False: each rank keeps each second batch of its share."""
    return prepared(loader(Stream(), num_workers, multiprocessing_context), dispatch_batches=False)


def dispatched(num_workers: int, multiprocessing_context: Any) -> Any:
    """A stream that knows no ranks, read by rank 0 for all: sound."""
    return prepared(loader(Stream(ranks=False), num_workers, multiprocessing_context), dispatch_batches=True)


def split_batches(num_workers: int, multiprocessing_context: Any) -> Any:
    """Batches of 10, cut over ranks: sound."""
    inner = loader(Rows(), num_workers, multiprocessing_context, shuffle=True, batch_size=10)
    return prepared(inner, split_batches=True, use_seedable_sampler=True)


def even_batches(num_workers: int, multiprocessing_context: Any) -> Any:
    """113 samples: the last batch is filled with samples of the epoch's beginning."""
    inner = loader(Rows(ROWS - 7), num_workers, multiprocessing_context, shuffle=True)
    return prepared(inner, use_seedable_sampler=True)


def uneven_batches(num_workers: int, multiprocessing_context: Any) -> Any:
    """even_batches=False: 23 batches on 2 ranks, 12 steps and 11."""
    inner = loader(Rows(ROWS - 7), num_workers, multiprocessing_context)
    return prepared(inner, even_batches=False)
