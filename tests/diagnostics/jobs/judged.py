"""Small loaders, each with at most one fault; run by torchrun on two ranks, audits all of them into OUT."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, get_worker_info

import rankfeed as rf

SAMPLES, BATCH = 120, 8
#: Batches that a rank receives in an epoch, by rank, number of ranks, and epoch.
Deal = Callable[[int, int, int], Sequence[Sequence[int]]]


class RepeatingPlan(rf.Plan):
    """Delivers some samples twice, and others not at all."""

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        ids = super().sample_ids(epoch, positions)
        return np.where(ids % 10 == 4, ids - 1, ids)


class Rows:
    """A map-style dataset."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"sample_id": index}


class DroppingWorkers(IterableDataset[dict[str, list[int]]]):
    """Each worker drops its incomplete batch: 24 of 120 samples, the same in every epoch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        ids = range(SAMPLES)[self.rank * workers + worker :: self.ranks * workers]
        return ({"sample_id": [*ids[at : at + BATCH]]} for at in range(0, len(ids) - BATCH + 1, BATCH))


class Dealt:
    """A loader that delivers what is dealt to its rank."""

    def __init__(self, deal: Deal, rank: int, ranks: int) -> None:
        self.deal, self.rank, self.ranks, self.epoch = deal, rank, ranks, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return ({"sample_id": [*batch]} for batch in self.deal(self.rank, self.ranks, self.epoch))


def shuffled(seed: object) -> list[int]:
    return random.Random(str(seed)).sample(range(SAMPLES), SAMPLES)


def batched(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]


def shares(ids: Sequence[int], rank: int, ranks: int) -> list[Sequence[int]]:
    return batched(ids[rank::ranks])


def sound(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    return shares(shuffled(epoch), rank, ranks)


def unsharded(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    return batched(shuffled(epoch))


def other_order(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    return shares(shuffled((rank, epoch)), rank, ranks)


def a_sample_twice(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    ids = shuffled(epoch)
    return shares([ids[0], *ids[:2], *ids[3:]] if ranks > 1 else ids, rank, ranks)


def a_quarter_lacks(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    return shares([sample for sample in shuffled(epoch) if ranks == 1 or sample % 4], rank, ranks)


def uneven(rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    ids = shuffled(epoch)
    return batched(ids if ranks == 1 else [ids[:80], ids[80:]][rank])


def of_plan(plan: rf.Plan, rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    schedule = rf.Schedule(plan, batch_size=BATCH, topology=rf.Topology(rank, ranks), epoch=epoch)
    return [schedule.batch(step).tolist() for step in range(len(schedule))]


def of_steps(steps: Sequence[Sequence[int]], rank: int, ranks: int, epoch: int) -> list[Sequence[int]]:
    """The given steps of each of two ranks; one rank alone takes all."""
    batches = of_plan(rf.Plan(SAMPLES, shuffle="none"), rank, ranks, epoch)
    return batches if ranks == 1 else [batches[step] for step in steps[rank]]


def dealt(deal: Deal, rank: int, world_size: int) -> Any:
    return Dealt(deal, rank, world_size)


def sampled(sampler: Callable[[int, int], Any], rank: int, world_size: int, *, drop_last: bool) -> Any:
    return DataLoader(Rows(), BATCH, sampler=sampler(rank, world_size), drop_last=drop_last)  # type: ignore[arg-type]


def distributed(rank: int, ranks: int) -> Any:
    return DistributedSampler(Rows(), ranks, rank)  # type: ignore[arg-type]


def with_replacement(rank: int, ranks: int) -> Any:
    return RandomSampler(Rows(), replacement=True, num_samples=SAMPLES // ranks)


def dropping_workers(rank: int, world_size: int, num_workers: int) -> Any:
    return DataLoader(DroppingWorkers(rank, world_size), batch_size=None, num_workers=num_workers)


#: The plans of loaders, which `rankfeed verify` examines too.
PLANS: dict[str, rf.Plan] = {
    "plan": rf.Plan(SAMPLES, seed=3),
    "plan_of_windows": rf.Plan([10] * 12, shuffle="window", window=20, lanes=4),
    "plan_that_repeats": RepeatingPlan(SAMPLES),
}
#: Steps of two ranks, and the passes (epoch, start, steps of the ranks) of the launches that delivered them.
RUNS: dict[str, tuple[list[Sequence[int]], list[list[tuple[int, int, list[int]]]]]] = {
    "run_resumed": ([range(8), range(8)], [[(0, 0, [3, 3])], [(0, 48, [5, 5]), (1, 0, [8, 8])]]),
    "run_with_a_gap": (
        [[0, 1, 2, 5, 6, 7], [0, 1, 2, 5, 6, 7]],
        [[(0, 0, [3, 3])], [(0, 80, [3, 3]), (1, 0, [8, 8])]],
    ),
    "run_of_a_short_rank": ([range(8), range(6)], [[(0, 0, [8, 6]), (1, 0, [8, 8])]]),
}
#: Factories as the doctor calls them.
FACTORIES: dict[str, Callable[..., Any]] = {
    "sound": partial(dealt, sound),
    "unsharded": partial(dealt, unsharded),
    "other_order": partial(dealt, other_order),
    "a_sample_twice": partial(dealt, a_sample_twice),
    "a_quarter_lacks": partial(dealt, a_quarter_lacks),
    "uneven": partial(dealt, uneven),
    "remainder_dropped_as_declared": partial(sampled, distributed, drop_last=True),
    "with_replacement": partial(sampled, with_replacement, drop_last=False),
    "dropping_workers": dropping_workers,
    **{name: partial(dealt, partial(of_plan, plan)) for name, plan in PLANS.items()},
    **{name: partial(dealt, partial(of_steps, steps)) for name, (steps, _) in RUNS.items()},
}
globals().update(FACTORIES)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    verdicts = {}
    for name, factory in FACTORIES.items():
        workers = {"num_workers": 2} if factory is dropping_workers else {}
        loader = factory(rank=rank, world_size=ranks, **workers)
        set_epoch = getattr(loader, "set_epoch", None) or getattr(loader.sampler, "set_epoch", None)
        report = rf.audit(loader, epochs=2, universe=SAMPLES, before_epoch=set_epoch)
        verdicts[name] = [report.verdict, str(report)]
    if not rank:
        out.write_text(json.dumps(verdicts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
