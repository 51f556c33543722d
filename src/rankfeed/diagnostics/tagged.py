"""Which worker of a torch DataLoader made a batch, and from which random numbers: said by the worker itself."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

#: How deep a data set is looked into for generators of its own, and how many entries of a list.
_DEPTH, _ENTRIES = 4, 32

#: Digests of the random streams that a worker draws from, as they were when it began, by name of the generator.
Streams = dict[str, str]


@dataclass
class Tagged:
    """A batch, who made it, and the streams that were found to be drawn from since the batch before."""

    batch: Any
    worker: int
    streams: Streams = field(default_factory=dict)


@contextmanager
def tagged(loader: Any) -> Iterator[None]:
    """Batches of a torch DataLoader come as `Tagged` in here, from workers that are started in here.

    Of others they come as they are: a subclass may look into its batches, and workers that persist would go on
    tagging.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader) or not loader.num_workers:
        yield
        return
    if loader.persistent_workers or type(loader).__iter__.__module__.split(".")[0] not in ("torch", "torchdata"):
        yield
        return
    collate, init = loader.collate_fn, loader.worker_init_fn
    tagging = _Tagging(collate, init)
    loader.collate_fn, loader.worker_init_fn = tagging, tagging.begin
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, init


class _Tagging:
    """Stands where a collate function stood, and begins where a worker does."""

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], object] | None) -> None:
        self._collate, self._init = collate, init
        self._first: Streams = {}
        self._states: Streams = {}
        self._own: dict[str, Any] = {}

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._own = dict(_generators(_dataset(), "dataset"))
        self._first = self._states = self._now()

    def __call__(self, samples: Any) -> Tagged:
        from torch.utils.data import get_worker_info

        batch, info = self._collate(samples), get_worker_info()
        states = self._now()
        # Streams that nothing is drawn from do no harm if they are the same.
        drawn = {name: self._first[name] for name, state in states.items() if self._states[name] != state}
        self._states = states
        return Tagged(batch, info.id if info else 0, drawn)

    def _now(self) -> Streams:
        return _states() | {name: _state(each) for name, each in self._own.items()}


def _states() -> Streams:
    import torch

    return {
        "torch": xxh3_128_hexdigest(torch.random.get_rng_state().numpy().tobytes()),
        "numpy": xxh3_128_hexdigest(repr(np.random.get_state(legacy=False)).encode()),
        "random": xxh3_128_hexdigest(repr(random.getstate()).encode()),
    }


def _dataset() -> Any:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else info.dataset


def _generators(thing: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Generators that an object holds, by where they are."""
    import torch

    if isinstance(thing, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
        yield name, thing
    elif not depth or isinstance(thing, (type, torch.Tensor, np.ndarray, str, bytes, int, float)) or thing is None:
        return
    elif isinstance(thing, (list, tuple)):
        for number, each in enumerate(thing[:_ENTRIES]):
            yield from _generators(each, f"{name}[{number}]", depth - 1)
    else:
        parts = thing if isinstance(thing, Mapping) else getattr(thing, "__dict__", {})
        for key, each in list(parts.items())[:_ENTRIES] if isinstance(parts, dict) else ():
            yield from _generators(each, f"{name}.{key}", depth - 1)


def _state(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return xxh3_128_hexdigest(repr(generator.getstate()).encode())
    if isinstance(generator, np.random.Generator):
        return xxh3_128_hexdigest(repr(generator.bit_generator.state).encode())
    if isinstance(generator, np.random.RandomState):
        return xxh3_128_hexdigest(repr(generator.get_state(legacy=False)).encode())
    return xxh3_128_hexdigest(generator.get_state().numpy().tobytes())
