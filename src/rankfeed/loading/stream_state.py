"""What a checkpoint says of a stream: how many samples of it were read, and its own state where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rankfeed.errors import ArgumentError, StateError
from rankfeed.loading.state import VERSION, parse_as
from rankfeed.loading.stream import Saved
from rankfeed.plan import Cursor
from rankfeed.storage.decodable import decodable


@decodable
class StreamState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The decoded form of the ``state_dict`` of a stream's loader.

    Args:
        rankfeed: version of this layout.
        epoch: epoch that the job is in.
        position: samples delivered in it, over all ranks (in full steps, where ranks have a stream each).
        steps: steps delivered in it.
        seed: of the random generators of transforms.
        shards: streams that there are: one for each rank, or 0 where all read the same one.
        at: samples read when the stream gave its own state.
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
    """A place between two steps of a stream.

    Args:
        saved: the stream's own state there or before, if it has one.
    """

    saved: Saved | None = None


def save(cursor: Cursor, seed: int, shards: int) -> dict[str, Any]:
    """A state as a dict of JSON's own types.

    Examples:
        >>> save(StreamCursor(2, 40, 5, Saved(32, b'{"line":32}')), 0, 0)["own"]
        {'line': 32}
    """
    saved = saved_at(cursor)
    state = StreamState(
        rankfeed=VERSION,
        epoch=cursor.epoch,
        position=cursor.position,
        steps=cursor.steps,
        seed=seed,
        shards=shards,
        at=0 if saved is None else saved.at,
        own=None if saved is None else msgspec.json.decode(saved.content),
    )
    found: dict[str, Any] = msgspec.to_builtins(state)
    return found


def saved_at(cursor: Cursor) -> Saved | None:
    """The stream's own state at a place or before; the start of an epoch has none."""
    return cursor.saved if isinstance(cursor, StreamCursor) else None


def load(state: Mapping[str, Any], seed: int, shards: int) -> StreamCursor:
    """The place that a state names.

    Raises:
        StateError: it is none of a stream, or of another seed or number of streams.
    """
    parsed = parse_as(StreamState, state)
    if parsed.seed != seed:
        raise StateError("the checkpoint has another seed", expected=f"seed {seed}", found=f"seed {parsed.seed}")
    if parsed.shards != shards:
        raise StateError(
            "the checkpoint belongs to a stream that was shared out in another way",
            expected=_way(shards),
            found=_way(parsed.shards),
            remedy="resume on as many ranks as there were: a stream for each rank cannot be shared out anew; one "
            "that all ranks read (a factory without shard) can",
        )
    saved = None if parsed.own is None else Saved(parsed.at, msgspec.json.encode(parsed.own))
    try:
        cursor = StreamCursor(parsed.epoch, parsed.position, parsed.steps, saved)
    except ArgumentError as error:
        raise StateError("the checkpoint names an impossible place", found=error.summary) from error
    if cursor.steps > cursor.position or not 0 <= parsed.at <= cursor.position or cursor.position % max(1, shards):
        raise StateError(
            "the checkpoint names an impossible place",
            found=f"{cursor.steps} steps, {cursor.position} samples, its own state at {parsed.at}",
        )
    return cursor


def _way(shards: int) -> str:
    return f"{shards} streams, one for each rank" if shards else "one stream that all ranks read"
