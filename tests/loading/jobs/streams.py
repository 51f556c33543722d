"""Run by torchrun: streams on ranks over gloo; what came of each goes into OUT/RANK.json.

Each step has an all_reduce of the job's own, as training does: a rank that continues alone would wait there.
"""

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankfeed as rf


def own(lengths: list[int], failing: int | None = None) -> Any:
    def stream(shard: tuple[int, int]) -> Iterator[dict[str, int]]:
        rank, count = shard
        for number in range(lengths[rank]):
            if rank == failing and number == 7:
                raise ValueError("a broken shard")
            yield {"x": rank + count * number}

    return rf.from_iterable(stream)


def one(size: int) -> Any:
    return rf.from_iterable(lambda: ({"x": number} for number in range(size)))


def train(loader: Any, steps: int | None = None) -> list[list[int]]:
    """Take steps together; what this rank was given."""
    found = []
    for batch in itertools.islice(iter(loader), steps):
        dist.all_reduce(torch.ones(1))
        rows = batch["x"][batch["valid"]] if "valid" in batch else batch["x"]
        found.append(rows.tolist())
    return found


def told(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except rf.errors.RankfeedError as error:
        return str(error)


def resumed(stream: Callable[[], Any], tail: Any) -> Any:
    first = rf.Loader(stream(), 2, tail=tail)
    found = train(first, 3)
    second = rf.Loader(stream(), 3, tail=tail)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    return found + train(second)


def of_fields(values: list[list[Any]], **options: Any) -> Any:
    """Types and dimensions of each batch, of streams whose values differ between ranks."""

    def stream(shard: tuple[int, int]) -> Iterator[dict[str, Any]]:
        return ({"x": value} for value in values[shard[0]])

    found = []
    for batch in rf.Loader(rf.from_iterable(stream), 2, tail="pad", **options):
        dist.all_reduce(torch.ones(1))
        found.append({name: f"{value.dtype}, {value.ndim}" for name, value in batch.items()})
    return found


def cases() -> dict[str, Any]:
    """What each rank is given, or its error; what needs no real group is in test_synchronized_end.py."""
    return {
        "one": told(lambda: train(rf.Loader(one(40), 3))),
        "one, workers": told(lambda: train(rf.Loader(one(40), 3, num_workers=2))),
        "one, resumed": told(lambda: resumed(lambda: one(40), "even")),
        "drop, resumed": told(lambda: resumed(lambda: own([23, 18, 21]), "drop")),
        "pad, resumed": told(lambda: resumed(lambda: own([23, 8, 0]), "pad")),
        "failing": told(lambda: train(rf.Loader(own([23, 18, 21], failing=1), 2, tail="pad"))),
        "fields": told(lambda: of_fields([[[1], [2]] * 3, [[], [], [0.5, 1.5]], []])),
        "fields, workers": told(lambda: of_fields([[[1], [2]] * 3, [[], [0.5, 1.5]], []], num_workers=2)),
        "no fields": told(lambda: of_fields([[1] * 9, ["a"] * 9, [2] * 9])),
        "no fields on one": told(lambda: of_fields([[1] * 9, [1, "a"] * 4, [2] * 9])),
        "late": told(lambda: of_fields([[1] * 9, [1] * 7 + [2.5], [2] * 9])),
    }


def lost(rank: int, how: str) -> Any:
    """Rank 1 goes in the middle; the others must hear of it."""
    loader = rf.Loader(own([40] * dist.get_world_size()), 2, tail="pad")
    for step, _ in enumerate(loader):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(0)
    return "went on"


def main(out: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = cases() if how == "cases" else told(lambda: lost(rank, how))
    (out / f"{rank}.json").write_text(json.dumps(found))
    if how == "cases":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
