"""The state of a stream's loader in a checkpoint: samples read, and the stream's own state if it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rankfeed.errors import ArgumentError, StateError
from rankfeed.loading.state import VERSION, decode_as
from rankfeed.loading.streams.stream import StreamSnapshot
from rankfeed.plan import Cursor
from rankfeed.storage.decodable import decodable


@decodable
class StreamState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The decoded form of the ``state_dict`` of a stream's loader.

    Args:
        rankfeed: version of this layout.
        epoch: the current epoch.
        position: samples delivered in it, over all ranks (in full steps, where each rank has its own stream).
        steps: steps delivered in it.
        seed: of the random generators of transforms.
        shards: number of streams: one for each rank, or 0 where all ranks read the same one.
        at: samples read when the stream returned its own state.
        own: that state.
    """

    rankfeed: int
    epoch: int
    position: int
    steps: int
    seed: int
    shards: int
    at: int = 0
    own: Any = None


@dataclass(frozen=True)
class StreamCursor(Cursor):
    """A position between two steps of a stream, with the stream's own state there or before, if it has one."""

    snapshot: StreamSnapshot | None = None


def snapshot_at(cursor: Cursor) -> StreamSnapshot | None:
    """The stream's own state at a position or before it; None at the start of an epoch."""
    return cursor.snapshot if isinstance(cursor, StreamCursor) else None


def encode_stream_state(cursor: Cursor, seed: int, shards: int) -> dict[str, Any]:
    """A state as a dict of JSON types.

    Examples:
        >>> encode_stream_state(StreamCursor(2, 40, 5, StreamSnapshot(32, b'{"line":32}')), 0, 0)["own"]
        {'line': 32}
    """
    snapshot = snapshot_at(cursor)
    state = StreamState(
        rankfeed=VERSION,
        epoch=cursor.epoch,
        position=cursor.position,
        steps=cursor.steps,
        seed=seed,
        shards=shards,
        at=0 if snapshot is None else snapshot.num_read,
        own=None if snapshot is None else msgspec.json.decode(snapshot.content),
    )
    encoded: dict[str, Any] = msgspec.to_builtins(state)
    return encoded


def decode_stream_state(state: Mapping[str, Any], seed: int, shards: int) -> StreamCursor:
    """The position of a state."""
    parsed = decode_as(StreamState, state)
    if parsed.seed != seed:
        raise StateError("the checkpoint has another seed", expected=f"seed {seed}", found=f"seed {parsed.seed}")
    if parsed.shards != shards:
        raise StateError(
            "the checkpoint belongs to a stream that was sharded differently",
            expected=_describe_shards(shards),
            found=_describe_shards(parsed.shards),
            remedy="resume on the same number of ranks: a stream for each rank cannot be sharded again; one that "
            "all ranks read (a factory without shard) can",
        )
    snapshot = None if parsed.own is None else StreamSnapshot(parsed.at, msgspec.json.encode(parsed.own))
    try:
        cursor = StreamCursor(parsed.epoch, parsed.position, parsed.steps, snapshot)
    except ArgumentError as error:
        raise StateError("the checkpoint has an impossible position", found=error.summary) from error
    if cursor.steps > cursor.position or not 0 <= parsed.at <= cursor.position or cursor.position % max(1, shards):
        raise StateError(
            "the checkpoint has an impossible position",
            found=f"{cursor.steps} steps, {cursor.position} samples, the stream's own state at {parsed.at}",
        )
    return cursor


def _describe_shards(shards: int) -> str:
    return f"{shards} streams, one for each rank" if shards else "one stream that all ranks read"
