"""Small sources, transforms and comparisons for the tests of the loader. Importable by spawned workers."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rankfeed.columns.columns import Columns, Objects
from rankfeed.columns.field import Field
from rankfeed.loading import Loader
from rankfeed.loading.engines import process
from rankfeed.sources.source import Source, check_columns, check_ids
from rankfeed.topology import Topology

#: No batch is built in the process of the test while its workers start.
process.INLINE_AFTER = 60.0

ENGINES: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 3},
    {"num_workers": 2, "worker_kind": "process"},
]
#: How they are called in the names of tests.
NAMES = ["inline", "thread-1", "thread-3", "process-2"]


def workers() -> list[psutil.Process]:
    """Worker processes of this process that are still running."""
    found = []
    for server in servers():
        for worker in server.children():
            with suppress(psutil.NoSuchProcess):
                if worker.status() != psutil.STATUS_ZOMBIE:
                    found.append(worker)
    return found


def servers() -> list[psutil.Process]:
    """The server that the workers of this process are forked from."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any("rankfeed._util.workers.server" in argument for argument in child.cmdline()):
                found.append(child)
    return found


class Memory(Source):
    """Samples computed from their ids: dense, ragged (1-D and 2-D), bytes and text."""

    fields: Mapping[str, Field] = {  # type: ignore[assignment]
        "y": Field("dense", "int64"),
        "point": Field("dense", "float32", (3,)),
        "x": Field("ragged", "float32", (2,)),
        "tokens": Field("ragged", "int32"),
        "raw": Field("bytes"),
        "name": Field("str"),
    }

    def __init__(self, size: int, block: int = 7, mark: str = "") -> None:
        self.size = size
        self.block = block
        self.mark = mark

    @property
    def blocks(self) -> np.ndarray[Any, Any]:
        full, rest = divmod(self.size, self.block)
        return np.array([self.block] * full + [rest] * (rest > 0), np.int64)

    @property
    def fingerprint(self) -> str:
        return f"{self.size:x}{self.mark}"

    def fetch(self, sample_ids: Any, columns: Sequence[str] | None = None) -> Columns:
        names = check_columns(columns, self.fields)
        rows = map(sample, check_ids(sample_ids, self.size).tolist())
        return Columns.from_samples([{name: row[name] for name in names} for row in rows], self.fields)


def sample(each: int) -> dict[str, Any]:
    length = each * 7 % 5
    return {
        "y": np.int64(each * 10),
        "point": np.arange(3, dtype=np.float32) + each,
        "x": np.arange(2 * length, dtype=np.float32).reshape(length, 2) + each,
        "tokens": np.arange(1 + each % 4, dtype=np.int32) * each,
        "raw": bytes([each % 256]) * (each % 3),
        "name": f"sämple {each}",
    }


Pair = namedtuple("Pair", ["image", "label"])


class Wrapped(Source):
    """A map-style Dataset's own samples, whatever they are, read by the user's own code."""

    runs_user_code = True
    as_dicts = False
    fields: Mapping[str, Field] = {"": Field("object")}  # type: ignore[assignment]
    fingerprint = "w"  # type: ignore[assignment]

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def blocks(self) -> np.ndarray[Any, Any]:
        return np.array([len(self.dataset)], np.int64)

    def fetch(self, sample_ids: Any, columns: Sequence[str] | None = None) -> Columns:
        rows = [self.dataset[sample_id] for sample_id in check_ids(sample_ids, len(self.dataset)).tolist()]
        return Columns({"": Objects(rows)}, len(rows))


class Tuples:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, tuple[float, str]]:
        return torch.full((2,), float(index)), index, (index / 2, str(index))


class Pairs(Tuples):
    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        return Pair(torch.full((2,), float(index)), index)


class Drawing(Tuples):
    """Draws random numbers, as datasets with augmentation do."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:  # type: ignore[override]
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class StatefulStream:
    """A stream of numbers that has a state: how many it has yielded, where it continues."""

    def __init__(self, size: int, name: str = "x") -> None:
        self.size, self.name, self.at = size, name, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.at < self.size:
            self.at += 1
            yield {self.name: self.at - 1}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def keyed(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"y": sample["y"], "draw": rng.integers(1 << 60)}


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {"y": sample["y"], "twice": sample["y"] * 2}


def from_globals(sample: dict[str, Any]) -> dict[str, Any]:
    return {"y": sample["y"], "torch": torch.rand(()), "numpy": np.random.rand(), "random": random.random()}


def drawn_too(sample: tuple[int, float, float, float]) -> tuple[Any, ...]:
    return (*sample, float(torch.rand(())))


def batch_noise(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**batch, "noise": torch.from_numpy(rng.random(3))}


def batch_from_globals(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "noise": torch.rand(3), "other": random.random()}


def bad_at_13(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 130:
        raise KeyError("no thirteenth")
    return sample


def to_none(sample: dict[str, Any]) -> None:
    return None


def not_picklable(samples: list[Any]) -> Any:
    return {"lock": threading.Lock()}


BYTES = np.arange(64, dtype=np.uint8)


def every_kind(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors, arrays and other values that are not all packed numbers."""
    numbers = torch.tensor([complex(sample["y"], 1) for sample in samples])
    return {
        "conjugated": numbers.conj(),
        "negated": torch.view_as_complex(torch.ones(2, 2)).conj().imag,
        "half": torch.ones(len(samples), dtype=torch.bfloat16),
        "columns": [torch.arange(6).reshape(2, 3).T, torch.arange(10)[::3], torch.arange(3).expand(4, 3)],
        "nothing": (torch.empty(0, 4), np.zeros((2, 0)), []),
        "number": (torch.tensor(3.5), np.int64(3), np.float16(1.5), None),
        "sparse": torch.eye(3).to_sparse(),
        "unsigned": torch.ones(5, dtype=torch.uint16),
        "learned": [torch.nn.Parameter(torch.ones(2)).detach(), torch.ones(2, dtype=torch.bool)],
        "arrays": [np.asfortranarray(np.arange(6).reshape(2, 3)), np.array([None, "x"]), np.array(True)],
        "views": [BYTES[3:9], BYTES[:0], BYTES[20:60], BYTES[1:9].view(np.int32), BYTES[12:20].view(np.int32)],
        "raw": [b"abc", b"", b"x" * 100_000],
        "": torch.ones(2),
    }


def fatal_at_13(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["y"] == 130:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return {**sample, "pid": os.getpid()}


def wide(sample: dict[str, Any]) -> dict[str, Any]:
    """More than a pipe holds, so that a worker is often in the middle of sending."""
    return {"y": sample["y"], "wide": np.full(30_000, sample["y"], np.float32)}


class FatalOnce:
    """Kills the worker that reads some sample, the first time."""

    def __init__(self, folder: Path, *ids: int) -> None:
        self.folder = folder
        self.ids = ids

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        each = int(sample["y"]) // 10
        marker = self.folder / str(each)
        if each in self.ids and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


def ranks(world_size: int) -> list[Topology]:
    return [Topology(rank=rank, world_size=world_size) for rank in range(world_size)]


def feed(rank: int = 0, world_size: int = 1, size: int = 50, batch_size: int = 4, **options: Any) -> Loader:
    """A loader of one rank of several, over ``size`` samples."""
    options = {"shuffle": "global", "id_column": "id", "seed": 3, **options}
    return Loader(Memory(size), batch_size, topology=Topology(rank=rank, world_size=world_size), **options)


def loaded(state: dict[str, Any], *arguments: Any, **options: Any) -> Loader:
    """A loader that resumes from a state, which was saved as JSON."""
    loader = feed(*arguments, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def state_after(steps: int, *arguments: Any, epoch: int = 0, **options: Any) -> dict[str, Any]:
    """The state of a loader that has delivered some steps of an epoch."""
    loader = feed(*arguments, **options)
    loader.set_epoch(epoch)
    take(iter(loader), steps)
    return loader.state_dict()


def delivered(batches: Sequence[dict[str, Any]]) -> list[int]:
    """Sample ids of those rows that are not masked."""
    ids: list[int] = []
    for batch in batches:
        ids += batch["id"][batch.get("valid", torch.ones_like(batch["id"], dtype=torch.bool))].tolist()
    return ids


def steps_of(loaders: Sequence[Any], count: int | None = None) -> list[list[Any]]:
    """All ranks side by side: for each step the batch of each rank. Ranks that differ in steps fail."""
    out = []
    iterators = [iter(loader) for loader in loaders]
    while count is None or len(out) < count:
        step = [next(iterator, None) for iterator in iterators]
        if all(batch is None for batch in step):
            break
        assert all(batch is not None for batch in step), "ranks took different numbers of steps"
        out.append(step)
    return out


def assert_once(ids: Sequence[int], size: int) -> None:
    assert Counter(ids) == Counter(range(size))


def same(one: Any, other: Any) -> bool:
    """Whether two batches are the same, to the byte."""
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            return same(list(one.unbind()), list(other.unbind()))
        dense = (one.to_dense(), other.to_dense()) if one.is_sparse else (one, other)
        return one.dtype == other.dtype and torch.equal(*dense)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def keyed_all(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "draw": rng.random()}


class ReusedOutput:
    """A transform that writes each of its results to the same memory, which is of a given kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.array, self.result = kind, np.zeros(3, np.int64), dict[str, Any]()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.array[:] = sample["y"]
        x: Any = {"tensor": torch.from_numpy(self.array), "view": self.array[:2], "list": [self.array]}.get(
            self.kind, self.array
        )
        result = self.result if self.kind == "dict" else {}
        result["number"], result["x"] = sample["y"], x
        return result
