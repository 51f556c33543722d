"""Records for each batch of a torch DataLoader its worker, dataset indices and random generator states."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_hexdigest

from rankfeed.diagnostics.batch_columns import columns
from rankfeed.diagnostics.generators import global_generators, is_generator, state_of
from rankfeed.diagnostics.keys import hashes

#: How deep a dataset is searched for generators of its own, and how many entries of a list.
_DEPTH, _ENTRIES = 4, 32


@dataclass
class Tagged:
    """A batch and its origin."""

    batch: Any
    worker: int | None
    #: Digests of random generators that were drawn from since the batch before, by name: of the state when the
    #: worker began and after the first batch that drew.
    streams: dict[str, str] = field(default_factory=dict)
    indices: list[int] | None = None  # of the dataset that collate was given, if they were recorded
    dropped: int = 0  # samples that are surely not in the batch


def record(loader: Any, *, indices: bool = True, keep: int = 0) -> Callable[[], None]:
    """Batches of a torch DataLoader come as `Tagged` until the returned function is called.

    ``keep``: number of batches whose samples are kept, if this process builds them.
    """
    from torch.utils.data import DataLoader, IterableDataset

    package = type(loader).__iter__.__module__.split(".")[0] if isinstance(loader, DataLoader) else ""
    if package not in ("torch", "torchdata"):  # a subclass with an __iter__ of its own may look into its batches
        return lambda: None
    before = loader.dataset, loader.collate_fn, loader.worker_init_fn
    indexed = indices and not isinstance(loader.dataset, IterableDataset)
    keep = keep if indexed or loader.batch_sampler is not None else 0  # batches of a stream have no samples
    origin = Origin(loader.dataset if indexed else None, loader.collate_fn, loader.worker_init_fn, keep)

    def put(dataset: Any, collate: Any, init: Any) -> None:
        object.__setattr__(loader, "dataset", dataset)  # DataLoader refuses setattr
        loader.collate_fn, loader.worker_init_fn = collate, init

    put(_IndexedDataset(loader.dataset) if indexed else loader.dataset, origin, origin.begin)
    return lambda: put(*before)


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


class Origin:
    """Replaces a collate function and a worker_init_fn, and records what batches are made of."""

    def __init__(self, dataset: Any, collate: Any, init: Callable[[int], object] | None, keep: int) -> None:
        self.dataset, self.collate = dataset, collate  # the user's; the dataset is None if it has no indices
        self._init, self._keep = init, keep
        #: Of the first batches, the indices, a copy of the samples that collate was given, and whether they are
        #: several and not fetched as one.
        self.kept: list[tuple[list[int] | None, Any, bool]] = []
        self._generators: dict[str, Any] = {}
        #: States when the worker began, and now; digests of the streams that were drawn from.
        self._first: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._drawn: dict[str, str] = {}
        self._began = False

    def begin(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        self._find_generators()

    def _find_generators(self) -> None:
        """The global ones, and those of the dataset and its module; earlier ones keep their first state."""
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        dataset: Any = None if info is None else info.dataset
        dataset = vars(dataset)["_of"] if type(dataset) is _IndexedDataset else dataset
        module = vars(sys.modules.get(type(dataset).__module__, random))
        of_module = {name: value for name, value in module.items() if is_generator(value)}
        self._generators = of_module | _generators(dataset, "dataset") | global_generators()
        self._states = self._now() | self._states
        self._first = self._states | self._first

    def __call__(self, samples: Any) -> Tagged:
        from torch.utils.data import get_worker_info

        is_list, info = isinstance(samples, (list, tuple)), get_worker_info()
        several = [*samples] if is_list else [samples]
        indices, bare = None, []
        if several and all(type(indexed) is _Indexed for indexed in several):
            numbers = [indexed.index for indexed in several] if is_list else samples.index
            if isinstance(numbers, (list, tuple)) and all(hasattr(index, "__index__") for index in numbers):
                indices = [int(index) for index in numbers]
            bare = [indexed.sample for indexed in several] if is_list else []
            samples = bare if is_list else samples.sample
        if info is None and len(self.kept) < self._keep:
            with suppress(Exception):  # of objects that cannot be copied
                self.kept.append((indices, copy.deepcopy(samples), is_list))
        batch = self.collate(samples)
        dropped = _dropped(bare, batch) if bare else 0
        if info is None:
            return Tagged(batch, None, {}, indices, dropped)
        if not self._began:
            self._began = True
            self._find_generators()  # some are created with the first sample
        before, self._states = self._states, self._now()
        # Streams that nothing is drawn from do no harm if they are the same, and those that are seeded for each
        # sample begin in the same state only.
        drawn = {
            name: self._drawn.setdefault(name, self._first[name] + state)
            for name, state in self._states.items()
            if before[name] != state
        }
        return Tagged(batch, info.id, drawn, indices, dropped)

    def _now(self) -> dict[str, str]:
        states = {name: state_of(generator) for name, generator in self._generators.items()}
        return {name: xxh3_128_hexdigest(pickle.dumps(state)) for name, state in states.items()}


def _dropped(samples: list[Any], batch: Any) -> int:
    """How many samples are surely not in a batch: None, or those beyond the rows of a field without new values."""
    if nones := sum(sample is None for sample in samples):
        return nones
    found = columns(batch, len(samples))
    if not found or max(map(len, found.values())) >= len(samples):
        return 0
    given = {name: hashes(column) for name, column in columns(samples, len(samples)).items()}
    known = {key for keys in given.values() for key in keys or ()}
    fewer = [keys for column in found.values() if (keys := hashes(column)) and known.issuperset(keys)]
    return len(samples) - min(map(len, fewer)) if fewer else 0


def _generators(thing: Any, name: str, depth: int = _DEPTH) -> dict[str, Any]:
    """Generators that an object holds, by where they are."""
    if is_generator(thing):
        return {name: thing}
    if isinstance(thing, (list, tuple)):
        parts = {f"{name}[{number}]": part for number, part in enumerate(thing[:_ENTRIES])}
    else:
        fields = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        fields = [*fields.items()][:_ENTRIES] if isinstance(fields, dict) else []  # not of classes
        parts = {f"{name}.{key}": part for key, part in fields}
    found: dict[str, Any] = {}
    for path, part in parts.items() if depth else ():
        found |= _generators(part, path, depth - 1)
    return found
