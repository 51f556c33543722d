"""A loader of fixed figures, to be watched."""

from typing import Any

import rankfeed as rf

FIGURES: dict[str, int | float] = {
    "epoch": 2,
    "epoch_step": 3,
    "epoch_steps": 9,
    "steps": 21,
    "samples": 210,
    "seconds": 20.0,
    "samples_per_second": 10.5,
    "waiting_seconds": 0.0,
    "waited_seconds": 5.0,
    "waited_share": 0.25,
    "source_seconds": 1.0,
    "transform_seconds": 4.0,
    "collate_seconds": 0.5,
    "transfer_seconds": 0.0,
    "cache_lookups": 210,
    "cache_hits": 105,
    "cache_hit_share": 0.5,
    "padded_bytes": 100,
    "padding_bytes": 10,
    "padding_share": 0.1,
    "private_bytes": 10**9,
}


class FakeLoader:
    """The part of a loader that `rf.watch` reads."""

    def __init__(self, rank: int = 0, **figures: float) -> None:
        self.figures: dict[str, int | float] = {**FIGURES, **figures}
        self.topology = rf.Topology(rank=rank, world_size=rank + 1)

    def stats(self) -> dict[str, int | float]:
        return dict(self.figures)

    def __iter__(self) -> Any:
        raise NotImplementedError


#: A watch does not keep its loader alive.
_KEPT: list[FakeLoader] = []


def fake_loader(rank: int = 0, **figures: float) -> FakeLoader:
    """A loader that is kept alive."""
    _KEPT.append(FakeLoader(rank, **figures))
    return _KEPT[-1]
