"""Factories that no doctor should have to see: each gets a finding, and none a hang."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tests.zoo.data import BATCH, ROWS, place, sample
from tests.zoo.of_torch import Rows, loader, shared


def batches(rows: int = ROWS) -> Iterator[dict[str, Any]]:
    rank, world = place()
    mine = range(rank, rows, world)
    for start in range(0, len(mine), BATCH):
        yield {"sample_id": torch.tensor(mine[start : start + BATCH])}


class Batches:
    """A rank's share, read as often as wanted; an action comes before its fifth batch."""

    def __init__(self, action: Callable[[], object] = lambda: None) -> None:
        self.action = action

    def __iter__(self) -> Iterator[Any]:
        for step, batch in enumerate(batches()):
            if step == 4:
                self.action()
            yield batch


class Acting(Rows):
    """An action comes before sample 77 is read."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def __getitem__(self, index: int) -> Any:
        if index == 77:
            self.action()
        return sample(index)


def in_a_worker(num_workers: int, multiprocessing_context: Any, action: Callable[[], object]) -> Any:
    data = Acting(action)
    return loader(data, num_workers, multiprocessing_context, sampler=shared(data))


def fail(row: int = 77) -> None:
    raise ValueError(f"row {row} has no image")


def hang() -> None:
    while True:
        time.sleep(60)


def kill(signum: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signum)


def raises() -> Any:
    """The factory raises."""
    raise FileNotFoundError("/data/train.index")


def raises_on_one_rank() -> Any:
    """The factory raises on rank 1 alone."""
    if place()[0] == 1:
        raise PermissionError("/data of this host")
    return Batches()


def raises_in_an_epoch() -> Any:
    """The fifth batch raises."""
    return Batches(partial(fail, 20))


def raises_in_a_worker(num_workers: int, multiprocessing_context: Any) -> Any:
    """One sample raises, in a worker of one rank."""
    return in_a_worker(num_workers, multiprocessing_context, fail)


def nothing() -> Any:
    """The loader is empty."""
    return []


def nothing_on_one_rank() -> Any:
    """The loader is empty on rank 1."""
    return [] if place()[0] else Batches()


def none() -> Any:
    """The factory forgot to return anything."""


class Endless:
    def __iter__(self) -> Iterator[Any]:
        first = place()[0]
        while True:
            yield {"sample_id": torch.arange(first, first + 2 * BATCH, 2)}
            first += 2 * BATCH


def endless() -> Any:
    """Batches without end."""
    return Endless()


def hangs_when_built() -> Any:
    """The factory waits for ever."""
    hang()


def waits_for_the_others() -> Any:
    """Rank 0 waits in a collective that rank 1 never joins."""
    import torch.distributed as dist

    if place()[0] == 0:
        dist.barrier()
    return Batches()


def hangs_in_an_epoch() -> Any:
    """Rank 1 hangs in its fifth batch, and takes no SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Batches(hang if place()[0] == 1 else int)


def hangs_in_a_worker(num_workers: int, multiprocessing_context: Any) -> Any:
    """A worker hangs in one sample."""
    return in_a_worker(num_workers, multiprocessing_context, hang)


def killed() -> Any:
    """The process is killed while it builds, as by the kernel when memory ends."""
    kill()


def crashes_in_an_epoch() -> Any:
    """Rank 1 crashes in its fifth batch."""
    return Batches(partial(kill, signal.SIGSEGV) if place()[0] == 1 else int)


def leaves() -> Any:
    """The factory ends the process, with status 0."""
    os._exit(0)


def exits() -> Any:
    """The factory calls sys.exit."""
    sys.exit("no data today")


def worker_killed(num_workers: int, multiprocessing_context: Any) -> Any:
    """A worker is killed."""
    return in_a_worker(num_workers, multiprocessing_context, kill)


class Chatty(Batches):
    def __iter__(self) -> Iterator[Any]:
        for batch in batches():
            print("x" * 2_000_000)
            sys.stderr.write("y" * 2_000_000)
            yield batch


def chatty() -> Any:
    """Prints 4 MB a batch; nothing else is wrong."""
    print("z" * 2_000_000)
    return Chatty()


def no_ids() -> Any:
    """Batches whose samples cannot be distinguished."""
    return [torch.tensor(0.5)] * 12


def no_such_key() -> Any:
    """Says a key that batches do not have."""
    return Batches(), "id"


def other_batches_on_each_rank() -> Any:
    """Rank 1 has other fields than rank 0."""
    return (
        [{"name": ["a", "b"]}, {"name": ["c", "d"]}] if place()[0] else [{"sample_id": torch.tensor([0, 1])}] * 2
    )


def other_key_on_each_rank() -> Any:
    """Ids are numbers on rank 0 and names on rank 1."""
    rank = place()[0]
    return [{"sample_id": [f"k{row}" for row in range(5)] if rank else list(range(5))}]


def unpicklable(num_workers: int, multiprocessing_context: Any) -> Any:
    """A collate function that spawned workers cannot be sent."""
    options = {
        "sampler": shared(Rows()),
        "collate_fn": lambda samples: {"sample_id": [one["sample_id"] for one in samples]},
    }
    return loader(Rows(), num_workers, multiprocessing_context, **options)


class Once:
    """A generator in disguise: its second epoch is empty."""

    def __init__(self) -> None:
        self.batches = batches()

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def one_epoch_only() -> Any:
    """A generator: the second epoch has nothing."""
    return Once()


def wants_more(path: str) -> Any:
    """The factory has an argument that the doctor does not pass."""
    return path
