"""torchdata's StatefulDataLoader and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.zoo import of_torch
from tests.zoo.data import BATCH, ROWS, collate, place, sample, worker
from tests.zoo.of_torch import Rows, Sample, Stream
from torch.utils.data import IterableDataset, Sampler


def loader(dataset: Any, num_workers: int, multiprocessing_context: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return of_torch.loader(dataset, num_workers, multiprocessing_context, StatefulDataLoader, **options)


def stateful_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """StatefulDataLoader with its own DistributedSampler: sound, resumed where it was."""
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rank, world = place()
    return loader(
        Rows(), num_workers, multiprocessing_context, sampler=StatefulDistributedSampler(Rows(), world, rank)
    )


def stateful_stream(num_workers: int, multiprocessing_context: Any) -> Any:
    """A stream without a state of its own, which is read again up to where it was: sound."""
    return loader(Stream(), num_workers, multiprocessing_context)


class Repeating(IterableDataset[Sample]):
    """Says that it is a sample behind where it is."""

    off = -1

    def __init__(self) -> None:
        (rank, world), self.done = place(), 0
        self.numbers = range(rank, ROWS, world)

    def __iter__(self) -> Iterator[Sample]:
        first, step = worker()
        for index in self.numbers[first::step][self.done :]:
            self.done += 1
            yield sample(index)
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": max(0, self.done + self.off)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Skipping(Repeating):
    """Says that it is a sample ahead of where it is."""

    off = 1


def state_behind(num_workers: int, multiprocessing_context: Any) -> Any:
    """A state that counts one too few: a resumed run repeats a sample of each worker."""
    return loader(Repeating(), num_workers, multiprocessing_context)


def state_ahead(num_workers: int, multiprocessing_context: Any) -> Any:
    """A state that counts one too many: a resumed run skips a sample of each worker."""
    return loader(Skipping(), num_workers, multiprocessing_context)


class ReadAhead(Sampler[int]):
    """Keeps its own count of what it gave out, which runs ahead of what was delivered."""

    def __init__(self) -> None:
        (rank, world), self.done = place(), 0
        self.numbers = range(rank, ROWS, world)

    def __iter__(self) -> Iterator[int]:
        for index in self.numbers[self.done :]:
            self.done += 1
            yield index
        self.done = 0

    def __len__(self) -> int:
        return len(self.numbers)


class CountedBySampler:
    """A loader whose state is its sampler's count."""

    def __init__(self, num_workers: int, multiprocessing_context: Any) -> None:
        self.count = ReadAhead()
        self._inner = of_torch.loader(Rows(), num_workers, multiprocessing_context, sampler=self.count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def state_dict(self) -> dict[str, int]:
        return {"done": self.count.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count.done = state["done"]


def state_of_the_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """A hand-written state that counts what workers were asked for: what they had not delivered is skipped."""
    return CountedBySampler(num_workers, multiprocessing_context)


def nodes(num_workers: int, multiprocessing_context: Any) -> Any:
    """torchdata.nodes over a rank's share: sound."""
    import torchdata.nodes as tn

    return tn.Loader(tn.ParallelMapper(batches(), collate, num_workers=max(1, num_workers), method="thread"))


def nodes_not_shared_out(num_workers: int, multiprocessing_context: Any) -> Any:
    """torchdata.nodes know nothing of ranks."""
    import torchdata.nodes as tn

    return tn.Loader(tn.ParallelMapper(batches(0, 1), collate, num_workers=max(1, num_workers), method="thread"))


def batches(*of: int) -> Any:
    import torchdata.nodes as tn

    rank, world = of or place()
    return tn.Batcher(tn.IterableWrapper([sample(index) for index in range(rank, ROWS, world)]), BATCH)
