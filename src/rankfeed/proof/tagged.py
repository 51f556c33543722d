"""Which worker of a torch DataLoader made a batch, and from which random numbers: said by the worker itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

#: Digests of the random streams that a worker draws from, by the name of their generator.
Streams = dict[str, str]


@dataclass
class Tagged:
    """A batch, who made it, and the streams that were found to be drawn from since the batch before."""

    batch: Any
    worker: int
    streams: Streams = field(default_factory=dict)


@contextmanager
def tagged(loader: Any) -> Iterator[None]:
    """Batches of a torch DataLoader with workers come as `Tagged` in here, if its workers are started in here."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader) or not loader.num_workers:
        yield
        return
    own = loader.collate_fn
    loader.collate_fn = _Tagging(own)
    try:
        yield
    finally:
        loader.collate_fn = own


class _Tagging:
    """Stands where a collate function stood."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self.own = own
        self._seeds: Streams = {}
        self._states: Streams = {}

    def __call__(self, samples: Any) -> Tagged:
        from torch.utils.data import get_worker_info

        batch, info = self.own(samples), get_worker_info()
        return Tagged(batch, -1 if info is None else info.id, self._drawn())

    def _drawn(self) -> Streams:
        """Streams of which something was drawn since the batch before: others do no harm if they are the same."""
        states = _states()
        self._seeds = self._seeds or _seeds()
        drawn = {
            name: self._seeds[name] for name, state in states.items() if self._states.get(name, state) != state
        }
        self._states = states
        return drawn


def _states() -> Streams:
    import torch

    return {
        "torch": xxh3_128_hexdigest(torch.random.get_rng_state().numpy().tobytes()),
        "numpy": xxh3_128_hexdigest(repr(np.random.get_state(legacy=False)).encode()),
        "random": xxh3_128_hexdigest(repr(random.getstate()).encode()),
    }


def _seeds() -> Streams:
    """What stays the same for some hundred draws: two workers that were seeded alike have it in common."""
    import torch

    _, key, *_ = np.random.get_state(legacy=True)
    return {
        "torch": str(torch.initial_seed()),
        "numpy": xxh3_128_hexdigest(np.asarray(key).tobytes()),
        "random": xxh3_128_hexdigest(repr(random.getstate()[1][:-1]).encode()),
    }
