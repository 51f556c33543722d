"""Hugging Face's IterableDataset, over Parquet files."""

from __future__ import annotations

from typing import Any

from tests.zoo import of_torch
from tests.zoo.data import ROWS, collate, parquet, place


def loader(dataset: Any, num_workers: int, multiprocessing_context: Any, **options: Any) -> Any:
    return of_torch.loader(dataset, num_workers, multiprocessing_context, collate_fn=collate, **options)


def stream(files: int) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.IterableDataset.from_parquet(parquet(files))


def split(dataset: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, *place())


def split_by_node(num_workers: int, multiprocessing_context: Any) -> Any:
    """4 files on 2 ranks with 2 workers: sound."""
    return loader(split(stream(4)), num_workers, multiprocessing_context)


def split_with_shuffle(num_workers: int, multiprocessing_context: Any) -> Any:
    """Shuffled with one seed, then split, with set_epoch: sound."""
    return loader(split(stream(4).shuffle(seed=1, buffer_size=30)), num_workers, multiprocessing_context)


def shuffled_by_each_rank(num_workers: int, multiprocessing_context: Any) -> Any:
    """Shuffled with another seed on each rank before the split: ranks cut different lists of files."""
    dataset = stream(4).shuffle(seed=10 + place()[0], buffer_size=30)
    return loader(split(dataset), num_workers, multiprocessing_context)


def five_files(num_workers: int, multiprocessing_context: Any) -> Any:
    """5 files on 2 ranks: each rank reads all files and keeps each second sample; one worker idles."""
    return loader(split(stream(5)), num_workers, multiprocessing_context)


def not_split(num_workers: int, multiprocessing_context: Any) -> Any:
    """Workers share the files, ranks do not."""
    return loader(stream(4), num_workers, multiprocessing_context)


def more_workers_than_files(num_workers: int, multiprocessing_context: Any) -> Any:
    """2 files on 2 ranks: the second worker has nothing to do."""
    return loader(split(stream(2)), num_workers, multiprocessing_context)


def interleaved(num_workers: int, multiprocessing_context: Any) -> Any:
    """Two streams mixed by chance until the first ends: the rest of the other never comes."""
    import datasets

    datasets.disable_progress_bars()
    halves = [datasets.IterableDataset.from_parquet(half) for half in (parquet(4)[:2], parquet(4)[2:])]
    mixed = datasets.interleave_datasets(halves, probabilities=[0.7, 0.3], seed=1)
    return loader(split(mixed), num_workers, multiprocessing_context)


def shuffled_and_resumed(num_workers: int, multiprocessing_context: Any) -> Any:
    """A state forgets what lay in the shuffle buffer, which never comes; with workers it cannot be loaded."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = split(stream(4).shuffle(seed=1, buffer_size=30))
    return loader(dataset, num_workers, multiprocessing_context, kind=StatefulDataLoader)


def map_style(num_workers: int, multiprocessing_context: Any) -> Any:
    """A table in memory, split by rank, under a plain DataLoader: sound."""
    import datasets

    datasets.disable_progress_bars()
    dataset = split(datasets.Dataset.from_dict({"sample_id": list(range(ROWS))}))
    return loader(dataset, num_workers, multiprocessing_context)
