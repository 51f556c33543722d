"""The batches of a stream that one rank can make, from opening it to its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rankfeed._util.threads import DaemonPool
from rankfeed.columns import Field, Layout
from rankfeed.errors import RankfeedError
from rankfeed.loading.maker import Made, Maker, Share
from rankfeed.loading.stream import Reader
from rankfeed.loading.stream_shares import Cut, Place
from rankfeed.loading.stream_stop import Report
from rankfeed.loading.stream_workers import Make, made_ahead, made_now
from rankfeed.sources import Source
from rankfeed.sources.source import Declared
from rankfeed.storage.checksum import digest_of

PlacedBatch = tuple[Made, Place]
#: Seconds that closing a feed waits for the read under way.
_CLOSE_WAIT = 1.0


class StreamFeed:
    """A rank's batches, as far as its own stream goes; what `stream_stop.Stop` makes equal.

    Args:
        opened: opens the stream where the epoch is begun. Called for the first batch, so that its error is one of
            the batch, which all ranks hear of.
        cut: how the rank takes its samples.
        maker: makes batches in this process, which those that only fill are.
        make: makes all others.
        threads: that call it; 0 to have each batch made when it is asked for.
        depth: batches made ahead.

    Attributes:
        reading: once the feed is closed, the end of a read that was still under way; None where there was none.
        layout: what the samples of all batches hold, to be set before the first; None where ``collate_fn`` makes
            them.
    """

    def __init__(
        self, opened: Callable[[], Reader], cut: Cut, maker: Maker, make: Make, threads: int, depth: int
    ) -> None:
        self._opened, self._cut, self._maker, self._make = opened, cut, maker, make
        self._threads, self._depth = threads, depth
        self.reading: Future[None] | None = None
        self.layout: Layout | None = None
        self._reader: Reader | None = None
        self._shares: Iterator[tuple[Share, Place]] = iter(())
        self._failed: Exception | None = None
        self._began = False
        self._lent: list[Any] = []
        self._place = Place(cut.start)
        self._steps = 0
        self._batches = self._run()

    def __iter__(self) -> Iterator[PlacedBatch]:
        return self

    def __next__(self) -> PlacedBatch:
        return next(self._batches)

    def observe(self, *, all_ranks: bool) -> Layout | RankfeedError | None:
        """What the samples of the first step hold, transformed; what is wrong with them; None if there are none.

        A stream or transform that raises is left to the first batch, which is where all ranks hear of it.

        Args:
            all_ranks: whether to look at those of other ranks too, where all read one stream and none is asked.
        """
        try:
            reader = self._open()
            if all_ranks:
                reader.keep(self._cut.batch_size * self._cut.stride)
            first = list(islice(self._shares, 1))
            if not first:
                return None
            self._shares = chain(first, self._shares)
            share = first[0][0]
            if all_ranks:
                kept = reader.kept()
                share = replace(share, ids=self._cut.start + np.arange(len(kept)), samples=kept)
            found: Layout | RankfeedError | None = self._make(replace(share, observes=True)).batch
        except Exception as error:
            self._failed = error
            return None
        return found

    def _open(self) -> Reader:
        self._reader = self._opened()
        self._shares = self._cut.shares(self._reader)
        return self._reader

    def _run(self) -> Generator[PlacedBatch, None, None]:
        self._began = True
        if self._failed is not None:
            raise self._failed
        reader = self._reader or self._open()
        shares = ((replace(share, layout=self.layout), place) for share, place in self._shares)
        if not self._threads:
            try:
                yield from made_now(shares, self._make)
            finally:
                reader.close()
            return
        pool = DaemonPool(1, "rankfeed-read")
        try:
            yield from made_ahead(shares, pool, self._make, self._threads, self._depth)
        finally:
            # A running generator cannot be closed: the thread that reads does it, after its last read.
            self.reading = pool.close(last=reader.close)
            if self.reading is not None and wait([self.reading], _CLOSE_WAIT).done:
                self.reading.result()
                self.reading = None

    @property
    def spare(self) -> list[Any]:
        """A sample to fill up with, in a list; an empty list where there is none yet."""
        return self._lent or ([] if self._reader is None else self._reader.last)

    @spare.setter
    def spare(self, sample: list[Any]) -> None:
        self._lent = sample

    def report(self, ready: Sequence[PlacedBatch], ended: bool, error: str) -> Report:
        """How this rank stands behind these batches."""
        if ready:
            self._place = ready[-1][1]
        self._steps += len(ready)
        place = self._place
        mark = digest_of(*(behind.mark.encode() for _, behind in ready))
        return Report(self._cut.rank, len(ready), ended, place.read, mark, error, bool(self.spare))

    def filler(self) -> PlacedBatch:
        """A batch that only fills."""
        share = self._cut.share(self._steps, self._place.read, 0, [], self.spare)
        self._steps += 1
        return self._maker.make_share(replace(share, layout=self.layout)), self._place

    def close(self) -> None:
        """End what runs."""
        self._batches.close()
        if self._reader is not None and not self._began:
            self._reader.close()


class Unfetched(Source):
    """Stands where a maker has its source, where samples come with their share and nothing is fetched.

    Args:
        declared: what is known of their fields.
    """

    fingerprint = ""
    as_dicts = False

    def __init__(self, declared: Declared) -> None:
        self.declared = declared

    @property
    def blocks(self) -> npt.NDArray[np.int64]:
        """None."""
        return np.zeros(0, np.int64)

    @property
    def fields(self) -> Mapping[str, Field]:
        """None that are known to be those of columns."""
        return {}

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> NoReturn:
        raise NotImplementedError("samples of a stream come with their share")
