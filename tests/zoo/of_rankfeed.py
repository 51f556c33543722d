"""rankfeed's own loader, samplers and drop-ins: all sound."""

from __future__ import annotations

from typing import Any

from tests.zoo.data import BATCH, ROWS, packed, tars
from tests.zoo.of_torch import Rows, Stream, loader

import rankfeed as rf


def threads(num_workers: int) -> Any:
    """A Loader with threads, 113 samples."""
    source = rf.from_dataset(Rows(ROWS - 7))
    return rf.Loader(source, BATCH, shuffle=True, num_workers=num_workers, id_column="number"), "number"


def processes(num_workers: int) -> Any:
    """A Loader with worker processes over packed data."""
    return rf.Loader(rf.open(packed()), BATCH, shuffle=True, num_workers=num_workers, worker_kind="process")


def from_tars(num_workers: int) -> Any:
    """5 tar shards on 2 ranks."""
    return rf.Loader(rf.open(tars(5)), BATCH, shuffle=True, num_workers=num_workers), "cls"


def sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """DistributedSampler for a stock DataLoader; 113 samples, none repeated."""
    own = rf.DistributedSampler(ROWS - 7, BATCH, shuffle=True)
    return loader(Rows(ROWS - 7), num_workers, multiprocessing_context, sampler=own)


def batch_sampler(num_workers: int, multiprocessing_context: Any) -> Any:
    """DistributedBatchSampler for a stock DataLoader; 113 samples."""
    own = rf.DistributedBatchSampler(ROWS - 7, BATCH, shuffle=True)
    return loader(Rows(ROWS - 7), num_workers, multiprocessing_context, batch_size=1, batch_sampler=own)


class Everything(Stream):
    def __init__(self) -> None:
        super().__init__(ranks=False, workers=False)
        self.topology = rf.Topology.detect()

    def __iter__(self) -> Any:
        return iter(rf.split(super().__iter__()))


def split(num_workers: int, multiprocessing_context: Any) -> Any:
    """A stream that knows neither ranks nor workers, in `rf.split`."""
    return loader(Everything(), num_workers, multiprocessing_context)


def in_accelerate(num_workers: int) -> Any:
    """A Loader that an Accelerator has prepared."""
    from accelerate import Accelerator

    from rankfeed.integrations.accelerate import accelerated

    accelerator = Accelerator(cpu=True)
    return accelerator.prepare(accelerated(processes(num_workers), accelerator))
