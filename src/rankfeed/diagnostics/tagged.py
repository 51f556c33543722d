"""Which worker of a torch DataLoader built a batch, of which indices, and from which random numbers."""

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
    """A batch and its origin.

    Attributes:
        batch: what the user's collate function returned.
        worker: that built it; None without workers.
        streams: random streams that were drawn from since the batch before.
        indices: of the dataset that collate was given, if they were recorded.
        nones: how many of the samples were None.
    """

    batch: Any
    worker: int | None
    streams: Streams = field(default_factory=dict)
    indices: list[int] | None = None
    nones: int = 0


def record(loader: Any) -> None:
    """Batches of a torch DataLoader come as `Tagged` from now on, with indices if its dataset is map-style.

    Not those of a subclass with an `__iter__` of its own, which may look into its batches.
    """
    if not _is_plain(loader):
        return
    from torch.utils.data import IterableDataset

    tagging = _Tagging(loader.collate_fn, loader.worker_init_fn)
    loader.collate_fn, loader.worker_init_fn = tagging, tagging.begin
    if not isinstance(loader.dataset, IterableDataset):
        object.__setattr__(loader, "dataset", _IndexedDataset(loader.dataset))  # DataLoader refuses setattr


def _is_plain(loader: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        return False
    return type(loader).__iter__.__module__.split(".")[0] in ("torch", "torchdata")


@dataclass
class _Indexed:
    """A sample on its way from the dataset to collate."""

    index: Any
    sample: Any


class _IndexedDataset:
    """A map-style dataset whose samples carry their index; otherwise it looks like the user's."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["_of"] = dataset

    def __getitem__(self, index: Any) -> _Indexed:
        return _Indexed(index, self._of[index])

    def __len__(self) -> int:
        return len(self._of)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_of"], name)
        if name == "__getitems__" and callable(value):
            return lambda indices: [_Indexed(*pair) for pair in zip(indices, value(indices), strict=False)]
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)

    def __reduce__(self) -> Any:
        return _IndexedDataset, (self._of,)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["_of"])


@contextmanager
def tagged(loader: Any) -> Iterator[None]:
    """Batches of a torch DataLoader come as `Tagged` in here, from workers that are started in here.

    Of others they come as they are: a subclass may look into its batches, and workers that persist would go on
    tagging.
    """
    if not _is_plain(loader) or not loader.num_workers or loader.persistent_workers:
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
    """Replaces a collate function and a worker_init_fn."""

    def __init__(self, collate: Callable[[Any], Any], init: Callable[[int], object] | None) -> None:
        self._collate, self._init = collate, init
        self._first: Streams = {}
        self._states: Streams = {}
        self._own: dict[str, Any] = {}
        self._begun = False

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._look_for_generators()

    def _look_for_generators(self) -> None:
        """Of the dataset and of its module; known ones keep their first state."""
        dataset = _dataset()
        known = vars(sys.modules[type(dataset).__module__]).items()
        self._own = {name: each for name, each in known if isinstance(each, _generator_types())}
        self._own |= _generators(dataset, "dataset")
        self._states = self._now()
        self._first = self._states | self._first

    def __call__(self, samples: Any) -> Tagged:
        from torch.utils.data import get_worker_info

        several = [*samples] if isinstance(samples, (list, tuple)) else [samples]
        indices, nones = None, 0
        if several and all(type(each) is _Indexed for each in several):
            indices = [int(each.index) for each in several if hasattr(each.index, "__index__")]
            nones = sum(each.sample is None for each in several)
            bare = [each.sample for each in several]
            samples = bare if isinstance(samples, (list, tuple)) else bare[0]
            indices = indices if len(indices) == len(several) else None
        batch, info = self._collate(samples), get_worker_info()
        if info is None:
            return Tagged(batch, None, {}, indices, nones)
        if not self._begun:
            self._begun = True
            self._look_for_generators()  # some are created with the first sample
        states = self._now()
        # Streams that nothing is drawn from do no harm if they are the same.
        drawn = {name: self._first[name] for name, state in states.items() if self._states[name] != state}
        self._states = states
        return Tagged(batch, info.id, drawn, indices, nones)

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
    dataset: Any = None if info is None else info.dataset
    return vars(dataset)["_of"] if type(dataset) is _IndexedDataset else dataset


def _generator_types() -> tuple[type, ...]:
    import torch

    return random.Random, np.random.Generator, np.random.RandomState, torch.Generator


def _generators(thing: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Generators that an object holds, by where they are."""
    import torch

    if isinstance(thing, _generator_types()):
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
