"""What a loader declares, and what its processes show: memory, and files that workers read through one handle."""

import builtins
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import psutil
from xxhash import xxh3_64_hexdigest

from rankfeed._util.process_info import private_bytes
from rankfeed.diagnostics.doctor.records import Built, Moved, Sizes
from rankfeed.diagnostics.samplers import attribute, dataloaders, samplers_of, traits_of


def described(loader: Any, *, seconds: float, grown: int, start_method: str) -> Built:
    """What a loader's attributes say; `seconds` and `grown` (bytes) are what its factory took."""
    dataset = attribute(loader, "dataset")
    dataset = attribute(loader, "source") if dataset is None else dataset
    traits = traits_of(loader)
    fingerprint = attribute(dataset, "fingerprint")
    pickled = None
    if traits.workers and start_method != "fork" and dataset is not None:
        with suppress(Exception):  # the loader will say so itself
            pickled = len(ForkingPickler.dumps(dataset))
    return Built(
        seconds=seconds,
        bytes=max(0, grown),
        length=_length(loader),
        samples=_length(dataset),
        subset=xxh3_64_hexdigest(repr(indices).encode()) if (indices := subset(loader)) is not None else None,
        fingerprint=fingerprint if isinstance(fingerprint, str) else None,
        cuts_one_dataset=any(
            attribute(sampler, name) not in (None, 1)
            for sampler in samplers_of(loader)
            for name in ("num_replicas", "num_processes")
        ),
        persistent=any(inner.persistent_workers for inner in dataloaders(loader)),
        traits=traits,
        resumes=all(callable(attribute(loader, name)) for name in ("state_dict", "load_state_dict")),
        elastic=type(loader).__module__.startswith("rankfeed.") and type(loader).__name__ == "Loader",
        pickled=pickled,
    )


def without_workers(loader: Any) -> None:
    """Let DataLoaders read in this process, also where the factory takes no ``num_workers``."""
    for inner in dataloaders(loader):
        if inner.num_workers:
            inner.num_workers, inner.prefetch_factor, inner.timeout = 0, None, 0


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` wherever a careful training loop would."""
    places = (loader, *samplers_of(loader), attribute(loader, "dataset"))
    for place in {id(place): place for place in places if callable(attribute(place, "set_epoch"))}.values():
        place.set_epoch(epoch)


def subset(loader: Any) -> list[int] | None:
    """Indices of a loader's torch Subset in the dataset at its bottom."""
    import torch

    indices: list[int] | None = None
    dataset = attribute(loader, "dataset")
    while isinstance(dataset, torch.utils.data.Subset):
        own = [int(index) for index in dataset.indices]
        indices = own if indices is None else [own[index] for index in indices]
        dataset = dataset.dataset
    return indices


def _length(thing: Any) -> int | None:
    with suppress(Exception):  # a user's __len__ may raise anything
        return len(thing)
    return None


class ImportMeter:
    """Bytes of this process, without those that imports took: code is no data."""

    def __init__(self) -> None:
        self._imported = self._depth = 0

    def __enter__(self) -> Self:
        self._import, builtins.__import__ = builtins.__import__, self._counted
        return self

    def __exit__(self, *error: object) -> None:
        builtins.__import__ = self._import

    def bytes(self) -> int:
        return private_bytes() - self._imported

    def _counted(self, *arguments: Any, **named: Any) -> Any:
        if self._depth or arguments[0] in sys.modules or not arguments[0]:
            return self._import(*arguments, **named)
        known, before = len(sys.modules), private_bytes()
        self._depth += 1
        try:
            return self._import(*arguments, **named)
        finally:
            self._depth -= 1
            if len(sys.modules) > known:
                self._imported += private_bytes() - before


def sizes(rank: int) -> Sizes:
    """Memory of this process, as measured, and of its children."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found[child.pid] = int(child.memory_full_info().uss)
    return Sizes(rank, found)


class Handles:
    """Positions of the files that this process has open to read before its loader starts workers."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, os.stat_result]] = {}
        self._inherited: dict[int, str] = {}
        # psutil's open_files() leaves out files that were deleted after they were opened.
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                known, mode = os.fstat(number), fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
                in_memory = os.readlink(f"/proc/self/fd/{number}").startswith(("/dev/", "/memfd"))
                if stat.S_ISREG(known.st_mode) and mode == os.O_RDONLY and not in_memory:
                    self._open[number] = _position(number), known

    def look_at_children(self) -> None:
        """Which of them children have as well; while they live."""
        for child in psutil.Process().children(recursive=True):
            for number, (_, known) in self._open.items():
                with suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{child.pid}/fd/{number}"), known):
                        self._inherited[number] = os.readlink(f"/proc/self/fd/{number}")

    def moved(self) -> Iterator[Moved]:
        """Files whose position changed since."""
        for number, path in self._inherited.items():
            with suppress(OSError):
                start, known = self._open[number]
                end = _position(number)
                if end != start and os.path.samestat(os.fstat(number), known):
                    yield Moved(path, start, end)


def _position(number: int) -> int:
    return os.lseek(number, 0, os.SEEK_CUR)
