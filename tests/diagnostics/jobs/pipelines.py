"""Small pipelines, sound and broken, that the doctor is tried on. Each gives its samples' ids."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

import rankfeed as rf

SAMPLES = 64


class Numbers(Dataset[Any]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return {"sample_id": index, "x": float(index % 10)}


class Stream(IterableDataset[Any]):
    """Shares itself out over ranks and workers, as far as it is told to."""

    def __init__(self, *, by_rank: bool = True, by_worker: bool = True, samples: int = SAMPLES) -> None:
        self.by_rank, self.by_worker, self.samples = by_rank, by_worker, samples
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        ids = list(range(self.samples))
        if self.by_rank:
            ids = ids[self.rank :: self.ranks]
        info = get_worker_info()
        if self.by_worker and info is not None:
            ids = ids[info.id :: info.num_workers]
        yield from ({"sample_id": each} for each in ids)


def sound(num_workers: int, multiprocessing_context: Any) -> Any:
    data = Numbers()
    sampler: Any = DistributedSampler(data, shuffle=True)
    return DataLoader(
        data, 4, sampler=sampler, num_workers=num_workers, multiprocessing_context=multiprocessing_context
    )


def sound_stream(num_workers: int) -> Any:
    return DataLoader(Stream(), 4, num_workers=num_workers)


def ours(num_workers: int) -> Any:
    return rf.Loader(rf.from_dataset(Numbers(67)), 4, shuffle=True, num_workers=num_workers, id_column="number")


def duplicated_by_workers(num_workers: int) -> Any:
    return DataLoader(Stream(by_worker=False), 4, num_workers=num_workers)


def own_workers() -> Any:
    """Does not let its caller choose the number of workers, and they all read everything."""
    return DataLoader(Stream(by_worker=False), 4, num_workers=2)


class WithNoise(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"sample_id": index, "x": torch.rand(1).item()}


def persistent_noise(num_workers: int) -> Any:
    data = WithNoise()
    options: Any = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(data, 4, sampler=DistributedSampler(data), **options)


def not_sharded(num_workers: int) -> Any:
    return DataLoader(Numbers(), 4, shuffle=True, num_workers=num_workers)


def chosen_part(num_workers: int) -> Any:
    """What random_split chose for evaluation, in its order."""
    part, _ = random_split(Numbers(2 * SAMPLES), [SAMPLES, SAMPLES], torch.Generator().manual_seed(1))
    return DataLoader(part, 4, sampler=DistributedSampler(part, shuffle=False), num_workers=num_workers)


def weighted(num_workers: int) -> Any:
    """Each rank draws its own samples, with replacement, some more often."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    sampler = WeightedRandomSampler([1.0 + each % 4 for each in range(SAMPLES)], SAMPLES // 2, generator=draws)
    return DataLoader(Numbers(), 4, sampler=sampler, num_workers=num_workers)


def to_the_longest(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"tokens": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def filled_up(num_workers: int) -> Any:
    """Texts without ids, filled up to the longest of their batch."""
    texts: Any = [torch.arange(each, each + 1 + min(each, 60)) for each in range(SAMPLES)]
    return DataLoader(
        texts, 16, sampler=DistributedSampler(texts), num_workers=num_workers, collate_fn=to_the_longest
    )


def sharded_twice(num_workers: int) -> Any:
    """As Accelerate does with a loader that shards itself: each rank takes its share of the batches."""
    batches = DataLoader(Stream(), 4, num_workers=num_workers)
    return (batch for number, batch in enumerate(batches) if number % dist.get_world_size() == dist.get_rank())


def uneven(num_workers: int) -> Any:
    samples = range(dist.get_rank(), 61, dist.get_world_size()) if dist.get_rank() else range(0, 80, 2)
    return DataLoader([{"sample_id": each} for each in samples], 4, num_workers=num_workers)  # type: ignore[arg-type]


def padded(num_workers: int) -> Any:
    data = Numbers(63)
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)


def forgotten_set_epoch(num_workers: int) -> Any:
    """The sampler is hidden, so that no training loop reaches it."""
    inner = sound(num_workers, None)

    class Wrapped:
        def __iter__(self) -> Iterator[Any]:
            return iter(inner)

    return Wrapped()


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"sample_id": index, "noise": self.generator.random()}


def same_noise(num_workers: int) -> Any:
    data = Noisy()
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)


class Reseeded(Numbers):
    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "_mine"):
            self._mine = random.Random(7)
        return {"sample_id": index, "noise": self._mine.random()}


def hidden_noise(num_workers: int) -> Any:
    """A generator that is made in each worker, of one seed."""
    data = Reseeded()
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)


class Repeating:
    """Its state counts what was read ahead."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.start, self.step = ahead, 0, 0
        self.ids = range(dist.get_rank(), SAMPLES, dist.get_world_size())

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
    return Repeating(0)


def resume_skips() -> Any:
    return Repeating(1)


def resume_repeats() -> Any:
    return Repeating(-1)


class FromFile(Dataset[Any]):
    """Opens its file before workers are forked."""

    def __init__(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(bytes(range(SAMPLES)) * 1024)
        self.file = open(path, "rb")  # noqa: SIM115

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index * 1024)
        return {"sample_id": index, "x": self.file.read(8)[0]}


def handles_before_fork(num_workers: int) -> Any:
    data = FromFile(f"/tmp/rankfeed-pipelines-{os.getpid()}")
    os.unlink(data.file.name)
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)


class Growing:
    def __init__(self, data: Any) -> None:
        self.data, self.kept = data, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        self.kept.append(np.ones(3 << 20))  # 24 MiB
        return iter(self.data)


def memory_grows() -> Any:
    return Growing(DataLoader(Stream(), 4))


class Heavy(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.rows = np.ones(5 << 20)  # 40 MiB


def memory_copied(num_workers: int) -> Any:
    data = Heavy()
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)


def no_ids(num_workers: int) -> Any:
    data = [torch.tensor([each, each + 1]) for each in range(SAMPLES)]
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers)  # type: ignore[arg-type]


def by_place(num_workers: int) -> Any:
    data = [(torch.zeros(2), each) for each in range(SAMPLES)]
    return DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=num_workers), 1  # type: ignore[arg-type]


def raises() -> Any:
    raise ValueError("the user's own")


class Deep(Dataset[Any]):
    """Raises below many stages, as a pipeline does."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.first(21)

    def first(self, stages: int) -> Any:
        return self.second(stages - 1)

    def second(self, stages: int) -> Any:
        if not stages:
            raise ValueError("the reason")
        return self.first(stages)


def raises_in_a_worker() -> Any:
    return DataLoader(Deep(), 4, num_workers=1)


def raises_later() -> Iterator[Any]:
    yield {"sample_id": [1]}
    raise ValueError("the user's own, in step 1")


def unpicklable(num_workers: int, multiprocessing_context: Any) -> Any:
    data = Numbers()
    return DataLoader(
        data,
        4,
        sampler=DistributedSampler(data),
        num_workers=num_workers,
        multiprocessing_context=multiprocessing_context,
        collate_fn=lambda samples: {"sample_id": [sample["sample_id"] for sample in samples]},
    )


def yields_nothing() -> Any:
    return []


class Once:
    """Can be read once."""

    def __init__(self) -> None:
        self.left = iter(range(dist.get_rank(), 16, dist.get_world_size()))

    def __iter__(self) -> Iterator[Any]:
        return ({"sample_id": [each]} for each in self.left)


def once() -> Any:
    return Once()


def never_ends() -> Iterator[Any]:
    number = dist.get_rank()
    while True:
        number += dist.get_world_size()
        yield {"sample_id": [number]}


def hangs() -> Iterator[Any]:
    yield {"sample_id": [dist.get_rank()]}
    while True:
        time.sleep(1)


def hangs_in_factory() -> Any:
    time.sleep(1000)


def dies() -> Iterator[Any]:
    yield {"sample_id": [dist.get_rank()]}
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)


def exits() -> Any:
    os._exit(3)


def chatters() -> Any:
    for _ in range(3000):
        print("x" * 10_000)
        print("y" * 10_000, file=sys.stderr)
    raise RuntimeError("after much ado")


def differs() -> Any:
    data = Numbers(SAMPLES + dist.get_rank() * 8)
    return DataLoader(data, 4, sampler=DistributedSampler(data))


def slow() -> Iterator[Any]:
    for number in range(8):
        time.sleep(0.05)
        yield {"sample_id": [number * dist.get_world_size() + dist.get_rank()]}
