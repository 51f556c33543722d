"""Pipelines that the doctor is tried on, besides those of the zoo. Most deliver the ids of their samples."""

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from tests.zoo.data import BATCH, ROWS
from tests.zoo.of_torch import Rows, Sample, Stream, loader, shared
from torch.utils.data import DataLoader, WeightedRandomSampler


def own_workers() -> Any:
    """Does not let its caller choose the number of workers, which all read everything."""
    return DataLoader(Stream(workers=False), BATCH, num_workers=2)


class WithNoise(Rows):
    def __getitem__(self, index: int) -> Sample:
        return {"sample_id": index, "x": torch.rand(1).item()}


def persistent_noise(num_workers: int, multiprocessing_context: Any) -> Any:
    """Random numbers of torch in workers that stay."""
    data, persistent = WithNoise(), num_workers > 0
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data), persistent_workers=persistent)


class Reseeded(Rows):
    """Makes a generator in each worker, of one seed."""

    def __getitem__(self, index: int) -> Sample:
        if not hasattr(self, "_mine"):
            self._mine = random.Random(7)
        return {"sample_id": index, "noise": self._mine.random()}


def hidden_noise(num_workers: int, multiprocessing_context: Any) -> Any:
    return loader(Reseeded(), num_workers, multiprocessing_context, sampler=shared(Reseeded()))


def weighted(num_workers: int, multiprocessing_context: Any) -> Any:
    """Each rank draws its own samples, with replacement, some more often."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    sampler = WeightedRandomSampler([1.0 + index % 4 for index in range(ROWS)], ROWS // 2, generator=draws)
    return loader(Rows(), num_workers, multiprocessing_context, sampler=sampler)


def no_ids(num_workers: int, multiprocessing_context: Any) -> Any:
    data = [torch.tensor([index, index + 1]) for index in range(ROWS)]
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


class Resuming:
    """Batches, and the number of those to skip as a state."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.start, self.step = ahead, 0, 0
        self.ids = range(dist.get_rank(), ROWS, dist.get_world_size())

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for step in range(start, len(self.ids) // 4):
            self.step = step
            yield {"sample_id": list(self.ids[self.step * 4 : self.step * 4 + 4])}

    def __len__(self) -> int:
        return len(self.ids) // 4

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step + 1 + self.ahead}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["step"]


def resumes() -> Any:
    return Resuming(0)


def resume_skips() -> Any:
    return Resuming(1)


class Deep(Rows):
    """Raises below many stages, as a pipeline does."""

    def __getitem__(self, index: int) -> Sample:
        return self.first(21)

    def first(self, stages: int) -> Any:
        return self.second(stages - 1)

    def second(self, stages: int) -> Any:
        if not stages:
            raise ValueError("the reason")
        return self.first(stages)


def raises_in_a_worker() -> Any:
    return DataLoader(Deep(), 4, num_workers=1)


def hangs() -> Iterator[Any]:
    yield {"sample_id": [dist.get_rank()]}
    while True:
        time.sleep(1)
