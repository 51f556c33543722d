"""Lance's own loader and samplers, over 10 fragments of 12 rows."""

from __future__ import annotations

from typing import Any

from tests.zoo import of_torch
from tests.zoo.data import BATCH, lance_table, place

FRAGMENTS = 10


def loader(num_workers: int, multiprocessing_context: Any, fragments: int = FRAGMENTS, **options: Any) -> Any:
    from lance.torch.data import LanceDataset

    dataset = LanceDataset(lance_table(fragments), BATCH, columns=["sample_id", "x"], **options)
    return of_torch.loader(dataset, num_workers, multiprocessing_context, batch_size=None)


def automatic(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each worker asks torch.distributed for the rank: uneven under fork, and unknown under spawn."""
    return loader(num_workers, multiprocessing_context)


def automatic_that_fits(num_workers: int, multiprocessing_context: Any) -> Any:
    """12 fragments on 2 ranks with 2 forked workers come out even: sound."""
    return loader(num_workers, multiprocessing_context, fragments=12)


def fragments(num_workers: int, multiprocessing_context: Any) -> Any:
    """ShardedFragmentSampler knows ranks, and no workers."""
    from lance.sampler import ShardedFragmentSampler

    return loader(num_workers, multiprocessing_context, sampler=ShardedFragmentSampler(*place()))


def uneven_fragments(num_workers: int, multiprocessing_context: Any) -> Any:
    """15 fragments on 2 ranks: one has a fragment more."""
    from lance.sampler import ShardedFragmentSampler

    return loader(num_workers, multiprocessing_context, 15, sampler=ShardedFragmentSampler(*place()))


def fragments_at_random(num_workers: int, multiprocessing_context: Any) -> Any:
    """`randomize=True` shuffles by its seed alone: set_epoch is taken, and without effect."""
    from lance.sampler import ShardedFragmentSampler

    return loader(num_workers, multiprocessing_context, sampler=ShardedFragmentSampler(*place(), randomize=True))


def batches(num_workers: int, multiprocessing_context: Any) -> Any:
    """ShardedBatchSampler knows ranks, and no workers."""
    from lance.sampler import ShardedBatchSampler

    return loader(num_workers, multiprocessing_context, sampler=ShardedBatchSampler(*place()))


def full_scan(num_workers: int, multiprocessing_context: Any) -> Any:
    """FullScanSampler reads everything wherever it is asked."""
    from lance.sampler import FullScanSampler

    return loader(num_workers, multiprocessing_context, sampler=FullScanSampler())


def with_our_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """Lance's loader with rankfeed's sampler: sound."""
    from rankfeed.integrations.lance import ShardedSampler

    return loader(num_workers, multiprocessing_context, sampler=ShardedSampler(shuffle=True, seed=3))
