"""The batches of a stream on one rank, from opening it to its end on all ranks."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any

import msgspec
import numpy as np

from rankfeed._util.threads import DaemonPool, run_ahead
from rankfeed.columns.field import Field
from rankfeed.columns.layout import Layout, Mismatch, join_layouts, resolve_dtypes
from rankfeed.errors import ArgumentError, RankfeedError, StateError, StreamError
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult, BatchSpec
from rankfeed.loading.engines import process
from rankfeed.loading.options import FeedOptions, check_added_columns
from rankfeed.loading.state import VERSION, check_cursor, decode_as
from rankfeed.loading.streams.sharding import StreamPosition, StreamSharding
from rankfeed.loading.streams.stream import Stream, StreamReader, StreamSnapshot
from rankfeed.loading.streams.synchronized_end import (
    RankReport,
    check_same_start,
    stream_group,
    synchronize_end,
)
from rankfeed.plan import Cursor
from rankfeed.sources import Source
from rankfeed.sources.source import Declared
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import decodable

_log = logging.getLogger("rankfeed")
#: Seconds between messages about a read that is waited for.
_REPORT_INTERVAL = 10.0
#: Seconds that closing waits for the read in progress.
_CLOSE_WAIT = 1.0

PositionedBatch = tuple[BatchResult, StreamPosition]


@decodable
class StreamState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The decoded form of the ``state_dict`` of a stream's loader."""

    rankfeed: int  # version of this layout
    epoch: int
    position: int  # samples delivered in the epoch, over all ranks (in full steps, where each has its own stream)
    steps: int  # steps delivered in it
    seed: int  # of the random generators of transforms
    shards: int  # number of streams: one for each rank, or 0 where all ranks read the same one
    at: int = 0  # samples read when the stream returned its own state
    own: Any = None  # that state
    last: str = ""  # fingerprint of the samples before the position, if all ranks read them


@dataclass(frozen=True)
class StreamCursor(Cursor):
    """A position between two steps of a stream."""

    snapshot: StreamSnapshot | None = None  # the stream's own state there or before, if it has one
    fingerprint: str = ""  # of the samples before it, if it is known


def _stream_cursor(cursor: Cursor) -> StreamCursor:
    """A position of a loader, which may be a plain Cursor."""
    if isinstance(cursor, StreamCursor):
        return cursor
    return StreamCursor(cursor.epoch, cursor.position, cursor.steps)


class StreamFeed:
    """The batches of a Loader over a stream."""

    plan: None = None
    audit_report: None = None

    def __init__(self, stream: Stream, builder: BatchBuilder, options: FeedOptions) -> None:
        if stream.sharded and options.tail == "even":
            raise ArgumentError(
                'tail="even" is not possible where each rank has its own stream',
                expected='tail="drop" (stop after the last step that is full on every rank) or "pad" (go on with '
                "masked rows until the last stream has ended)",
                found='tail="even"',
                remedy="choose one of them, or leave out the factory's parameter shard and yield the whole stream "
                "on every rank",
            )
        self._stream, self._builder, self._options = stream, builder, options
        self._engine: process.ProcessEngine | None = None
        if options.num_workers and options.worker_kind == "process":
            self._engine = process.ProcessEngine(builder, options.num_workers, options.prefetch_factor)
        #: A read that was in progress when an iteration was left.
        self._unfinished_read: Future[None] | None = None

    def steps_left(self, begun: Cursor) -> None: ...

    def is_end(self, cursor: Cursor) -> bool:
        """False: only reading the stream shows its end."""
        return False

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        at = _stream_cursor(cursor)
        snapshot = at.snapshot or StreamSnapshot(0, b"null")
        position = {"epoch": cursor.epoch, "position": cursor.position, "steps": cursor.steps}
        own = {"at": snapshot.num_read, "own": msgspec.json.decode(snapshot.content), "last": at.fingerprint}
        return {"rankfeed": VERSION, **position, "seed": self._builder.seed, "shards": self._shards, **own}

    def load_state(self, state: Mapping[str, Any]) -> Cursor:
        parsed, seed = decode_as(StreamState, state), self._builder.seed
        if parsed.seed != seed:
            raise StateError(
                "the checkpoint has another seed", expected=f"seed {seed}", found=f"seed {parsed.seed}"
            )
        if parsed.shards != self._shards:
            raise StateError(
                "the checkpoint belongs to a stream that was sharded differently",
                expected=_describe_shards(self._shards),
                found=_describe_shards(parsed.shards),
                remedy="resume on the same number of ranks: a stream for each rank cannot be sharded again; one "
                "that all ranks read (a factory without shard) can",
            )
        cursor = check_cursor(parsed.epoch, parsed.position, parsed.steps)
        if not 0 <= parsed.at <= cursor.position or cursor.position % max(1, parsed.shards):
            raise StateError(
                "the checkpoint has an impossible position",
                found=f"{cursor.position} samples, the stream's own state at {parsed.at}",
            )
        snapshot = None if parsed.own is None else StreamSnapshot(parsed.at, msgspec.json.encode(parsed.own))
        return StreamCursor(cursor.epoch, cursor.position, cursor.steps, snapshot, parsed.last)

    def run(self, begun: Cursor) -> Iterator[tuple[BatchResult, Cursor]]:
        options, stream, builder = self._options, self._stream, self._builder
        topology = options.topology.resolve()
        self._wait_for_unfinished_read()
        ranks = topology.world_size
        start = begun.position // ranks if stream.sharded else begun.position
        sharding = StreamSharding(
            options.batch_size, topology.rank, ranks, stream.sharded, options.tail, begun.epoch, start
        )
        window = max(1, options.num_workers * options.prefetch_factor)
        group = stream_group(topology, sharded=stream.sharded)
        if group is not None:
            equal = {
                "epoch": begun.epoch,
                "samples read": begun.position,
                "batch_size": options.batch_size,
                "tail": options.tail,
                "world size": ranks,
                "streams": self._shards,
                "fields": "not inferred yet" if builder.layout is None else builder.layout,
            }
            window = check_same_start(group, topology.rank, equal, ranks, window)
        at = _stream_cursor(begun)
        open_stream = partial(
            stream.open,
            epoch=begun.epoch,
            shard=(topology.rank, ranks),
            start=start,
            snapshot=at.snapshot,
            fingerprint=at.fingerprint,
        )
        batches = StreamBatches(open_stream, sharding, builder, options)
        try:
            if builder.layout is None and builder.collate_fn is None:
                own = batches.infer_layout(all_ranks=group is None and ranks > 1)
                layouts = [own] if group is None else group.gather(own)
                builder.layout = common_layout(layouts, own, builder)
                check_added_columns(builder.layout, builder.id_column, options.tail)
            agreed: Iterable[PositionedBatch] = batches
            if group is not None:
                pads, shared = options.tail == "pad", not stream.sharded
                agreed = synchronize_end(batches, group, window=window, pads=pads, shared=shared)
            with self._workers(topology.rank) as batches.processes:
                for steps, (result, position) in enumerate(agreed, begun.steps + 1):
                    full_steps = (steps - begun.steps) * options.batch_size * ranks
                    delivered = begun.position + full_steps if stream.sharded else position.num_read
                    snapshot, fingerprint = position.snapshot, position.fingerprint
                    yield result, StreamCursor(begun.epoch, delivered, steps, snapshot, fingerprint)
        finally:
            batches.close()
            self._unfinished_read = batches.unfinished_read

    @property
    def _shards(self) -> int:
        return self._options.topology.resolve().world_size if self._stream.sharded else 0

    def _workers(self, rank: int) -> AbstractContextManager[process.ProcessBuilder | None]:
        has_samples = self._builder.layout is not None or self._builder.collate_fn is not None
        return nullcontext() if self._engine is None or not has_samples else self._engine.workers(rank)

    def _wait_for_unfinished_read(self) -> None:
        """Two iterations must not read a stream at once: their iterators may share a file."""
        read, self._unfinished_read = self._unfinished_read, None
        waited = 0.0
        while read is not None and not wait([read], _REPORT_INTERVAL).done:
            waited += _REPORT_INTERVAL
            _log.warning(
                "rank %d cannot begin the stream again: an earlier iteration was left %.0f s ago while the stream "
                "was producing a sample, and it has not returned yet",
                self._options.topology.resolve().rank,
                waited,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unfinished_read": None}


def _timed(specs: Iterator[tuple[BatchSpec, StreamPosition]]) -> Iterator[tuple[BatchSpec, StreamPosition]]:
    """The same, with the time that the samples took to read."""
    while True:
        began = time.perf_counter()
        item = next(specs, None)
        if item is None:
            return
        yield item[0]._replace(read_seconds=time.perf_counter() - began), item[1]


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
        self._specs = _timed(self._sharding.specs(self._reader))
        return self._reader

    def _run(self) -> Generator[PositionedBatch, None, None]:
        if self._failure is not None:
            raise self._failure
        reader = self._reader or self._open()
        options, processes, specs = self._options, self.processes, self._specs
        while not options.num_workers or (processes is not None and not processes.start()):
            item = next(specs, None)
            if item is None:
                return
            yield self._builder.build(item[0]), item[1]
        read_pool, build_pool = DaemonPool(1, "rankfeed-read"), DaemonPool(options.num_workers, "rankfeed")

        def build(step: int, read: Future[tuple[BatchSpec, StreamPosition] | None]) -> PositionedBatch | None:
            item = read.result()
            if item is None:
                return None
            return (processes.build(step, item[0]) if processes else self._builder.build(item[0])), item[1]

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


def common_layout(
    layouts: Sequence[Layout | RankfeedError | None], own: object, builder: BatchBuilder
) -> Layout | None:
    """What the first batches of all ranks have in common, the same on every rank; None without samples."""
    if isinstance(own, RankfeedError):
        raise own
    common: Layout | None = None
    for index, layout in enumerate(layouts):
        if isinstance(layout, RankfeedError):
            summary = f"the samples of process {index} do not have the same fields, so all ranks stop"
            raise StreamError(summary, found=layout)
        try:
            if layout is not None:
                common = layout if common is None else join_layouts(common, layout, loose=builder.ragged == "list")
        except Mismatch as error:
            raise builder.field_error(error, f"first batch of process {index}, and those before it") from error
    return None if common is None else resolve_dtypes(common)


class StreamSource(Source):
    """The source of a BatchBuilder whose samples come with each BatchSpec: it only declares their fields."""

    fingerprint = ""
    as_dicts = False
    _blocks = np.zeros(0, np.int64)
    _fields: Mapping[str, Field] = {}

    def __init__(self, declared: Declared) -> None:
        self.declared = declared


def _describe_shards(shards: int) -> str:
    return f"{shards} streams, one for each rank" if shards else "one stream that all ranks read"
