"""The batches of a stream on one rank, from opening it to its end on all ranks."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rankfeed.columns.field import Field
from rankfeed.columns.layout import Layout, Mismatch, join_layouts, resolve_dtypes
from rankfeed.errors import ArgumentError, RankfeedError, StateError, StreamError
from rankfeed.loading.batch_builder import BatchBuilder, BatchResult
from rankfeed.loading.engines import process
from rankfeed.loading.options import FeedOptions, check_added_columns
from rankfeed.loading.state import VERSION, check_cursor, decode_as
from rankfeed.loading.streams.sharding import StreamSharding
from rankfeed.loading.streams.stream import START, Stream, StreamPosition, StreamSnapshot
from rankfeed.loading.streams.stream_batches import PositionedBatch, StreamBatches
from rankfeed.loading.streams.synchronized_end import check_same_start, stream_group, synchronize_end
from rankfeed.plan import Cursor
from rankfeed.sources import Source
from rankfeed.sources.source import Declared
from rankfeed.storage.commit import decodable

_log = logging.getLogger("rankfeed")
#: Seconds between messages about a read that is waited for.
_REPORT_INTERVAL = 10.0


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

    at: StreamPosition = START  # the same in the stream of this rank


def _position_in_stream(cursor: Cursor) -> StreamPosition:
    return cursor.at if isinstance(cursor, StreamCursor) else START


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
        at = _position_in_stream(cursor)
        snapshot = at.snapshot or StreamSnapshot(0, b"null")
        position = {"epoch": cursor.epoch, "position": cursor.position, "steps": cursor.steps}
        own = {"at": snapshot.num_read, "own": msgspec.json.decode(snapshot.content), "last": at.fingerprint}
        return {"rankfeed": VERSION, **position, "seed": self._builder.seed, "shards": self._shards, **own}

    def load_state(self, state: Mapping[str, Any]) -> Cursor:
        parsed, seed = decode_as(StreamState, state), self._builder.seed
        if parsed.seed != seed:
            raise StateError("the checkpoint has another seed", expected=seed, found=parsed.seed)
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
        at = StreamPosition(cursor.position // max(1, parsed.shards), snapshot, parsed.last)
        return StreamCursor(cursor.epoch, cursor.position, cursor.steps, at)

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
        at = replace(_position_in_stream(begun), num_read=start)
        open_stream = partial(stream.open, epoch=begun.epoch, shard=(topology.rank, ranks), at=at)
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
                    yield result, StreamCursor(begun.epoch, delivered, steps, position)
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
