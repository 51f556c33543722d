"""The batches that one rank makes of its stream, read and built ahead, and what it reports about them."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np

from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed.columns.layout import Layout
from rankfeed.errors import RankfeedError
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines import process
from rankfeed.loading.options import FeedOptions
from rankfeed.loading.streams.sharding import StreamSharding
from rankfeed.loading.streams.stream import StreamPosition, StreamReader
from rankfeed.storage.checksum import digest_of

#: Seconds that closing waits for the read in progress.
_CLOSE_WAIT = 1.0

PositionedBatch = tuple[BatchResult, StreamPosition]


@dataclass(frozen=True)
class RankReport:
    """What a rank reports about the next steps."""

    rank: int
    steps: int  # batches that it has prepared
    ended: bool  # whether its stream has ended after them
    num_read: int = 0  # samples of the stream in them and before
    fingerprint: str = ""  # of the last sample of each of them (see `sample_fingerprint`)
    error: str = ""  # why it cannot continue after them, the last lines of a traceback
    has_filler: bool = True  # whether it has a sample for padding rows


class StreamBatches:
    """The batches of a rank as far as its own stream goes; `synchronize_end` limits them to those of all ranks."""

    def __init__(
        self,
        open_stream: Callable[[], StreamReader],
        sharding: StreamSharding,
        builder: BatchBuilder,
        options: FeedOptions,
    ) -> None:
        self._open_stream, self._sharding, self._builder, self._options = open_stream, sharding, builder, options
        self.processes: process.ProcessBuilder | None = None
        #: After closing, the end of a read that is still in progress.
        self.unfinished_read: Future[None] | None = None
        self._reader: StreamReader | None = None
        self._specs: Iterator[tuple[BatchSpec, StreamPosition]] = iter(())
        self._failure: Exception | None = None
        #: A sample for padding rows: the last one read, or one of another rank.
        self.filler: list[Any] = []
        self._position = StreamPosition(sharding.start)
        self._steps = 0
        self._batches = self._run()

    def __iter__(self) -> Iterator[PositionedBatch]:
        return self

    def __next__(self) -> PositionedBatch:
        return next(self._batches)

    def infer_layout(self, *, all_ranks: bool) -> Layout | RankfeedError | None:
        """The layout of the samples of the first step after the transform; their error; None without samples."""
        try:
            reader = self._open()
            reader.recorded = [] if all_ranks else None
            first = list(islice(self._specs, 1))
            if not first:
                return None
            self._specs = chain(first, self._specs)
            spec = first[0][0]
            if reader.recorded is not None:
                samples = reader.recorded[: self._sharding.batch_size * self._sharding.stride]
                reader.recorded = None
                spec = spec._replace(ids=self._sharding.start + np.arange(len(samples)), samples=samples)
            return self._builder.layout_of(spec)
        except Exception as error:  # raised with the first batch, so that all ranks learn of it
            self._failure = error
            return None

    def _open(self) -> StreamReader:
        self._reader = self._open_stream()
        self._specs = self._sharding.specs(self._reader)
        return self._reader

    def _run(self) -> Generator[PositionedBatch, None, None]:
        if self._failure is not None:
            raise self._failure
        reader = self._reader or self._open()
        options, processes, specs = self._options, self.processes, self._specs
        while not options.num_workers or (processes is not None and not processes.start()):
            pair = next(specs, None)
            if pair is None:
                return
            yield self._builder.build(pair[0]), pair[1]
        read_pool, build_pool = DaemonPool(1, "rankfeed-read"), DaemonPool(options.num_workers, "rankfeed")

        def build(step: int, read: Future[tuple[BatchSpec, StreamPosition] | None]) -> PositionedBatch | None:
            pair = read.result()
            if pair is None:
                return None
            return (processes.build(step, pair[0]) if processes else self._builder.build(pair[0])), pair[1]

        def submit(step: int) -> Future[PositionedBatch | None]:
            pool = processes.thread(step) if processes else build_pool
            return pool.submit(build, step, read_pool.submit(next, specs, None))

        try:
            for batch in run_ahead(count(), submit, options.num_workers * options.prefetch_factor):
                if batch is None:
                    return
                yield batch
        finally:
            build_pool.close()
            # A running generator cannot be closed: the thread that reads closes it, after its last read.
            self.unfinished_read = read_pool.close(last=reader.close)
            if self.unfinished_read is not None and wait([self.unfinished_read], _CLOSE_WAIT).done:
                self.unfinished_read.result()
                self.unfinished_read = None

    def report(self, ready: Sequence[PositionedBatch], ended: bool, error: str) -> RankReport:
        if ready:
            self._position = ready[-1][1]
        if self._reader is not None:
            self.filler = self._reader.last or self.filler
        self._steps += len(ready)
        fingerprint = digest_of(*(position.fingerprint.encode() for _, position in ready))
        num_read = self._position.num_read
        return RankReport(self._sharding.rank, len(ready), ended, num_read, fingerprint, error, bool(self.filler))

    def padding_batch(self) -> PositionedBatch:
        """A batch of padding rows only, built in the calling thread."""
        spec = self._sharding.spec(self._steps, self._position.num_read, 0, [], self.filler)
        self._steps += 1
        return self._builder.build(spec), self._position

    def close(self) -> None:
        self._batches.close()
        if self._reader is not None and self.unfinished_read is None:
            self._reader.close()
