"""A stream cut into steps, and the steps into ranks: what a Schedule is to a plan, as far as one sees ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from rankfeed.columns import copy_sample
from rankfeed.errors import PlanError, StreamError
from rankfeed.loading.maker import Share
from rankfeed.loading.stream import Reader, Saved
from rankfeed.loading.stream_marks import mark_of
from rankfeed.plan import Tail


@dataclass(frozen=True)
class Place:
    """Where a stream stands behind a step.

    Args:
        read: samples of the stream that belong to this step or those before it.
        saved: the stream's own state there, or at some place before.
        mark: of the last sample read, to compare with other ranks' (see ``mark_of``).
    """

    read: int
    saved: Saved | None = None
    mark: str = ""


@dataclass(frozen=True)
class Cut:
    """How a rank takes its samples out of a stream.

    Of each stretch of the stream it takes every ``stride``-th sample from ``offset`` on.

    Args:
        batch_size: samples that it takes for a full step.
        rank: of this process.
        world_size: ranks there are.
        sharded: whether the stream is this rank's share already.
        tail: how the stream ends.
        epoch: which one this is.
        start: samples of the stream that were read before.
    """

    batch_size: int
    rank: int
    world_size: int
    sharded: bool
    tail: Tail
    epoch: int = 0
    start: int = 0

    @property
    def stride(self) -> int:
        """Samples of the stream for each of this rank."""
        return 1 if self.sharded else self.world_size

    @property
    def offset(self) -> int:
        """Which of them."""
        return 0 if self.sharded else self.rank

    def shares(self, reader: Reader) -> Iterator[tuple[Share, Place]]:
        """This rank's share of each step, and where the stream stands behind it.

        Raises:
            PlanError: the epoch has fewer samples than there are ranks (but under "pad").
            StreamError: it has none; the stream raised.
        """
        for step, (count, mine, place) in enumerate(self._steps(reader)):
            yield self.share(step, place.read - count, count, mine, reader.last), place

    def share(self, step: int, first: int, count: int, mine: list[Any], filler: list[Any]) -> Share:
        """A step's share.

        Args:
            step: its number.
            first: place in the stream of the first sample of the step.
            count: samples of the stream in it.
            mine: those of them that are this rank's.
            filler: a sample to fill up with.
        """
        pads = self.tail == "pad"
        rows = self.batch_size if pads else max(1, len(mine))
        # Where the step begins on a place that no rank's turn begins at, as the last one may under "even".
        offset = (self.offset - (first - self.start)) % self.stride
        places = first + offset + self.stride * np.arange(rows, dtype=np.int64)
        places[len(mine) :] = max(0, first + count - 1)
        return Share(
            step=step,
            ids=places * self.world_size + self.rank if self.sharded else places,
            valid=np.arange(rows) < len(mine),
            rank=self.rank,
            epoch=self.epoch,
            position=first * (self.world_size // self.stride) + self.rank * count // self.stride,
            filled=pads or count < self.stride,
            samples=mine + list(map(copy_sample, filler * (rows - len(mine)))),
        )

    def _steps(self, reader: Reader) -> Iterator[tuple[int, list[Any], Place]]:
        """Of each step the samples in it, this rank's, and where the stream stands behind it."""
        length = self.batch_size * self.stride
        held: tuple[list[Any], Place] | None = None
        before = begins = self._place(reader)
        while True:
            mine = list(map(copy_sample, islice(reader, self.offset, length, self.stride)))
            count = reader.read - before.read
            if count < length:
                break
            place = self._place(reader)
            if self.tail == "even":
                if held is not None:
                    yield length, *held
                # What begins the last step is known to be there, should the stream end behind it.
                held, begins = (mine, place), before
            else:
                yield length, mine, place
            before = place
        self._check(reader.read)
        # A state that the stream gave when it had seen its end is never kept: some begin anew from that.
        if count == 0 or self.tail == "drop":
            if held is not None:
                yield length, *held
        elif held is None:
            yield count, mine, Place(reader.read, before.saved)
        else:
            yield from self._halves(held[0] + mine, length + count, begins)

    def _place(self, reader: Reader) -> Place:
        compared = self.stride > 1 and reader.last
        return Place(reader.read, reader.saved(), mark_of(reader.last[0]) if compared else "")

    def _halves(self, mine: list[Any], count: int, begins: Place) -> Iterator[tuple[int, list[Any], Place]]:
        """The last full step and the rest behind it, as two steps: the larger half, then the smaller."""
        smaller = count // 2 if self.batch_size > 1 else 0
        larger = count - smaller
        first = len(range(self.offset, larger, self.stride))
        yield larger, mine[:first], Place(begins.read + larger, begins.saved)
        if smaller:
            yield smaller, mine[first:], Place(begins.read + count, begins.saved)

    def _check(self, total: int) -> None:
        if self.start or (self.sharded and self.world_size > 1):  # of a share alone nothing can be said
            return
        if total == 0:
            raise empty(self.epoch)
        if total < self.world_size and self.tail != "pad":
            raise PlanError(
                "an epoch has fewer samples than there are ranks",
                expected=f"at least {self.world_size} samples",
                found=total,
                remedy='train on fewer ranks, or take tail="pad", which masks the rows it repeats',
            )


def empty(epoch: int) -> StreamError:
    """What there is to say of a stream without samples."""
    return StreamError(
        "the stream yielded nothing",
        where=f"epoch {epoch}",
        remedy="let the factory open the stream anew each time it is called: an iterator made outside is used up",
    )
