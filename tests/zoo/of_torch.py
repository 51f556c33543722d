"""torch's own DataLoader and samplers, rightly and wrongly used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.zoo.data import BATCH, ROWS, folder, place, sample, worker
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, random_split

Sample = dict[str, Any]


class Rows(Dataset[Sample]):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


class Stream(IterableDataset[Sample]):
    """Shared out over ranks or workers, or not, as the arguments say."""

    def __init__(self, rows: int = ROWS, *, ranks: bool = True, workers: bool = True) -> None:
        (rank, world), self.workers = place() if ranks else (0, 1), workers
        self.numbers = range(rank, rows, world)

    def __iter__(self) -> Iterator[Sample]:
        first, step = worker() if self.workers else (0, 1)
        return map(sample, self.numbers[first::step])


def loader(
    dataset: Any, num_workers: int, multiprocessing_context: Any, kind: Any = DataLoader, **options: Any
) -> Any:
    """torch's DataLoader, or one of another kind that takes the same arguments."""
    options = {"batch_size": BATCH, **options}
    return kind(
        dataset,
        num_workers=num_workers,
        multiprocessing_context=multiprocessing_context if num_workers else None,
        **options,
    )


def shared(dataset: Any, **options: Any) -> Any:
    """torch's sampler for this rank."""
    rank, world = place()
    return DistributedSampler(dataset, world, rank, **options)


# --- sound ----------------------------------------------------------------------------------------------------


def distributed_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """What torch's documentation says."""
    return loader(Rows(), num_workers, multiprocessing_context, sampler=shared(Rows()))


def stream_shared_out(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each worker reads its share of its rank's share."""
    return loader(Stream(), num_workers, multiprocessing_context)


# --- who reads what -------------------------------------------------------------------------------------------


def no_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """Every rank reads everything: the DataLoader has no sampler that knows of ranks."""
    torch.manual_seed(1)
    return loader(Rows(), num_workers, multiprocessing_context, shuffle=True)


def own_seed_on_each_rank(num_workers: int, multiprocessing_context: Any) -> Any:
    """Every rank reads everything, each in an order of its own, so that it is not noticed."""
    torch.manual_seed(place()[0])
    return loader(Rows(), num_workers, multiprocessing_context, shuffle=True)


def stream_for_each_worker(num_workers: int, multiprocessing_context: Any) -> Any:
    """Every worker reads its rank's whole share."""
    return loader(Stream(workers=False), num_workers, multiprocessing_context)


def stream_for_each_rank(num_workers: int, multiprocessing_context: Any) -> Any:
    """Workers share, ranks do not."""
    return loader(Stream(ranks=False), num_workers, multiprocessing_context)


def stream_for_everybody(num_workers: int, multiprocessing_context: Any) -> Any:
    """Every worker of every rank reads everything."""
    return loader(Stream(ranks=False, workers=False), num_workers, multiprocessing_context)


def other_split_on_each_rank(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each rank draws its own training part, since random_split was given no generator: parts overlap."""
    torch.manual_seed(place()[0])
    train, _ = random_split(Rows(), [100, ROWS - 100])
    return loader(train, num_workers, multiprocessing_context, sampler=shared(train))


# --- how long ------------------------------------------------------------------------------------------------


def padded_by_the_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """119 samples: torch repeats the first of the epoch, so that ranks have equally many."""
    return loader(Rows(ROWS - 1), num_workers, multiprocessing_context, sampler=shared(Rows(ROWS - 1)))


def cut_by_the_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """drop_last leaves out one sample in each epoch, and the last short batch of each rank too."""
    data = Rows(ROWS - 1)
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data, drop_last=True), drop_last=True)


def uneven_list(num_workers: int, multiprocessing_context: Any) -> Any:
    """`files[rank::world_size]` of 121 files: one rank takes a step more."""
    rank, world = place()
    return loader([sample(index) for index in range(ROWS + 1)[rank::world]], num_workers, multiprocessing_context)


class Islice(IterableDataset[Sample]):
    def __init__(self, rows: int) -> None:
        self.place, self.rows = place(), rows

    def __iter__(self) -> Iterator[Sample]:
        rank, world = self.place
        return map(sample, islice(range(self.rows), rank, None, world))


def islice_on_each_rank(num_workers: int, multiprocessing_context: Any) -> Any:
    """`islice(stream, rank, None, world_size)`, which is right as long as there are no workers."""
    return loader(Islice(ROWS), num_workers, multiprocessing_context)


class ByLength(Sampler[list[int]]):
    """Batches of as many samples as fit: lengths differ, and so does the number of batches."""

    def __init__(self) -> None:
        rank, world = place()
        self.numbers = range(rank, ROWS, world)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.numbers:
            batch.append(index)
            if sum(20 if row % 2 else 11 for row in batch) > 60:
                yield batch
                batch = []
        if batch:
            yield batch


def batches_by_length(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each rank fills batches up to a number of tokens: ranks take different numbers of steps."""
    options = {"batch_size": 1, "batch_sampler": ByLength()}
    return loader(Rows(), num_workers, multiprocessing_context, **options)


# --- epochs and chance ----------------------------------------------------------------------------------------


class WithoutSetEpoch:
    """A training loop in which set_epoch was forgotten: the loader inside cannot be reached."""

    def __init__(self, inner: Any) -> None:
        self._of = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of)


def forgotten_set_epoch(num_workers: int, multiprocessing_context: Any) -> Any:
    """DistributedSampler shuffles by its epoch, which is never set."""
    return WithoutSetEpoch(distributed_sampler(num_workers, multiprocessing_context))


class Fixed(DistributedSampler[Sample]):
    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(0).permutation(ROWS)  # self.epoch should be in it
        return iter(order[self.rank :: self.num_replicas].tolist())


def set_epoch_without_effect(num_workers: int, multiprocessing_context: Any) -> Any:
    """A sampler of the user's own that takes set_epoch and makes nothing of it."""
    rank, world = place()
    return loader(Rows(), num_workers, multiprocessing_context, sampler=Fixed(Rows(), world, rank))  # type: ignore[arg-type]


class Noisy(Rows):
    """Augments by numpy's global generator."""

    def __getitem__(self, index: int) -> Sample:
        return sample(index) | {"x": np.random.rand()}


def seeded_alike(_: int) -> None:
    np.random.seed(0)


def seeds_without_the_worker(num_workers: int, multiprocessing_context: Any) -> Any:
    """worker_init_fn gives every worker the same seed: all draw the same augmentation."""
    options = {"sampler": shared(Noisy()), "worker_init_fn": seeded_alike}
    return loader(Noisy(), num_workers, multiprocessing_context, **options)


class NoisyByItsOwn(Rows):
    """Augments by a generator that it made when it was built, of which each worker gets a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Sample:
        return sample(index) | {"x": self.rng.random()}


def generator_in_the_constructor(num_workers: int, multiprocessing_context: Any) -> Any:
    """`np.random.default_rng(0)` in the data set: each worker draws the same numbers, and in each epoch again."""
    data = NoisyByItsOwn()
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


def augmented(num_workers: int, multiprocessing_context: Any) -> Any:
    """numpy's global generator, which torch seeds in each worker: sound."""
    return loader(Noisy(), num_workers, multiprocessing_context, sampler=shared(Noisy()))


# --- memory, files, time --------------------------------------------------------------------------------------


class Hoarding(Rows):
    """Keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytes] = []

    def __getitem__(self, index: int) -> Sample:
        self.kept.append(bytes([index % 251]) * (1 << 20))
        return sample(index)


def keeps_every_sample(num_workers: int, multiprocessing_context: Any) -> Any:
    """Workers that live on keep a megabyte of each sample: memory grows by 60 MB an epoch on each rank."""
    data = Hoarding()
    return loader(
        data, num_workers, multiprocessing_context, sampler=shared(data), persistent_workers=num_workers > 0
    )


class AllInMemory(Rows):
    """Loads all data when first asked, in any process."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Any = None

    def __getitem__(self, index: int) -> Sample:
        if self.all is None:
            self.all = np.ones(128 << 17)
        return sample(index) | {"x": self.all[index]}


def everything_in_each_worker(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each worker loads the whole data set, 128 MB, for itself."""
    data = AllInMemory()
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


class Array(Rows):
    """Holds an array of 64 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.all = np.ones(64 << 17)

    def __getitem__(self, index: int) -> Sample:
        return sample(index) | {"x": self.all[index]}


def array_in_the_constructor(num_workers: int, multiprocessing_context: Any) -> Any:
    """An array of 64 MB, which forked workers share; spawned ones are sent a copy each."""
    data = Array()
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


class Names(Rows):
    """Holds a list of Python objects of some 80 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"folder/of/the/training/part/{index:012d}.jpg" for index in range(800_000)]

    def __getitem__(self, index: int) -> Sample:
        return sample(index) | {"x": float(max(map(len, self.names[index::ROWS])))}


def list_in_the_constructor(num_workers: int, multiprocessing_context: Any) -> Any:
    """A list of 800,000 strings: to read one counts a reference in it, which copies its page in each worker."""
    data = Names()
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


def numbers_file() -> Path:
    def write(path: Path) -> None:
        (path / "numbers").write_bytes(np.arange(ROWS, dtype=np.int64).tobytes())

    return folder("numbers", write) / "numbers"


class FromFile(Rows):
    """Reads by one file that was opened when the data set was built."""

    def __init__(self) -> None:
        super().__init__()
        self.file = numbers_file().open("rb")

    def __getitem__(self, index: int) -> Sample:
        self.file.seek(index * 8)
        return sample(int.from_bytes(self.file.read(8), "little"))


def file_open_before_fork(num_workers: int, multiprocessing_context: Any) -> Any:
    """Forked workers share one position in one file."""
    data = FromFile()
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


class Late(Rows):
    """Makes its plan when it is first read."""

    planned = False

    def __getitem__(self, index: int) -> Sample:
        if not self.planned:
            time.sleep(8)
            self.planned = True
        return sample(index)


def plans_for_long(num_workers: int, multiprocessing_context: Any) -> Any:
    """8 seconds before the first batch, in each worker, in each epoch."""
    return loader(Late(), num_workers, multiprocessing_context, sampler=shared(Late()))


class Slow(Rows):
    def __getitem__(self, index: int) -> Sample:
        time.sleep(0.05)
        return sample(index)


def slow_samples(num_workers: int, multiprocessing_context: Any) -> Any:
    """A quarter of a second for a batch: the GPU would wait."""
    return loader(Slow(), num_workers, multiprocessing_context, sampler=shared(Slow()))
