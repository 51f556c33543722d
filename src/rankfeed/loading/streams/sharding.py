"""Divides a stream into steps and the steps among ranks, as a Schedule does for a plan."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from rankfeed.columns.layout import copy_sample
from rankfeed.errors import StreamError
from rankfeed.loading.batch_builder import BatchSpec
from rankfeed.loading.streams.stream import StreamPosition, StreamReader
from rankfeed.plan import Tail
from rankfeed.plan.schedule import refuse_short_epoch


@dataclass(frozen=True)
class StreamSharding:
    """Which samples of a stream a rank takes: of each step, every ``stride``-th sample from ``offset`` on."""

    batch_size: int  # samples that it takes for a full step
    rank: int
    world_size: int
    sharded: bool  # whether the stream already is this rank's share
    tail: Tail
    epoch: int = 0
    start: int = 0  # samples of the stream that were read before

    @property
    def stride(self) -> int:
        """Samples of the stream for each sample of this rank."""
        return 1 if self.sharded else self.world_size

    @property
    def offset(self) -> int:
        """Index of this rank's sample among them."""
        return 0 if self.sharded else self.rank

    def specs(self, reader: StreamReader) -> Iterator[tuple[BatchSpec, StreamPosition]]:
        """This rank's part of each step, with the time that it took to read, and the position after it."""
        began = time.perf_counter()
        for step, (count, samples, position) in enumerate(self._steps(reader)):
            spec = self.spec(step, position.num_read - count, count, samples, reader.last)
            yield spec._replace(read_seconds=time.perf_counter() - began), position
            began = time.perf_counter()

    def spec(self, step: int, first: int, count: int, mine: list[Any], filler: list[Any]) -> BatchSpec:
        """The BatchSpec of a step of ``count`` samples from position ``first`` on."""
        is_padded = self.tail == "pad"
        rows = self.batch_size if is_padded else max(1, len(mine))
        # The last step under "even" may begin at a position that is not rank 0's.
        offset = (self.offset - (first - self.start)) % self.stride
        positions = first + offset + self.stride * np.arange(rows, dtype=np.int64)
        positions[len(mine) :] = max(0, first + count - 1)
        is_masked = is_padded or count < self.stride
        return BatchSpec(
            step=step,
            ids=positions * self.world_size + self.rank if self.sharded else positions,
            valid=np.arange(rows) < len(mine) if is_masked else None,
            rank=self.rank,
            epoch=self.epoch,
            position=first * (self.world_size // self.stride) + self.rank * count // self.stride,
            samples=mine + list(map(copy_sample, filler * (rows - len(mine)))),
        )

    def _steps(self, reader: StreamReader) -> Iterator[tuple[int, list[Any], StreamPosition]]:
        """The samples of each step, those of this rank, and the position after it."""
        length = self.batch_size * self.stride
        held: tuple[list[Any], StreamPosition] | None = None  # under "even" a step waits for the one after it
        before = held_from = self._position(reader)
        while True:
            samples = list(map(copy_sample, islice(reader, self.offset, length, self.stride)))
            count = reader.num_read - before.num_read
            if count < length:
                break
            position = self._position(reader)
            if self.tail == "even":
                if held is not None:
                    yield length, *held
                held, held_from = (samples, position), before
            else:
                yield length, samples, position
            before = position
        self._check_length(reader.num_read)
        # A snapshot taken at the end of the stream is never used: some streams begin again from it.
        if count == 0 or self.tail == "drop":
            if held is not None:
                yield length, *held
        elif held is None:
            yield count, samples, StreamPosition(reader.num_read, before.snapshot)
        else:  # the last full step and the rest after it as two steps: the larger half, then the smaller
            total, samples = length + count, held[0] + samples
            smaller = total // 2 if self.batch_size > 1 else 0
            split = len(range(self.offset, total - smaller, self.stride))
            position = StreamPosition(held_from.num_read + total - smaller, held_from.snapshot)
            yield total - smaller, samples[:split], position
            if smaller:
                yield smaller, samples[split:], StreamPosition(held_from.num_read + total, held_from.snapshot)

    def _position(self, reader: StreamReader) -> StreamPosition:
        fingerprint = "" if self.sharded else reader.fingerprint()
        return StreamPosition(reader.num_read, reader.snapshot(), fingerprint)

    def _check_length(self, total: int) -> None:
        if self.start or (self.sharded and self.world_size > 1):  # other ranks may have samples
            return
        if total == 0:
            raise empty_stream("the stream yielded nothing", where=f"epoch {self.epoch}")
        refuse_short_epoch(total, self.world_size, self.tail, f"epoch {self.epoch}")


def empty_stream(summary: str, where: str | None = None) -> StreamError:
    """The error for a stream without samples."""
    return StreamError(
        summary,
        where=where,
        remedy="let the factory open the stream at each call: an iterator that was created outside is exhausted",
    )
