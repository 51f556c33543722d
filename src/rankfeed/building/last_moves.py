"""The last moves of a pack: its parts get their final names, and the manifest is written.

They are written down first (`ready.json`). Whoever finds a pack that was killed among them makes the rest,
whatever it was asked for. An append that was killed there is called again, and must not add its rows once more:
where nothing but the rows can tell (an iterable without a key), the moves stay written (`made-*.json`) until a
call comes with the same rows.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from rankfeed.building.chunk import Fields
from rankfeed.building.records import Part, Ready
from rankfeed.building.staging import JOB, MADE, READY, empty
from rankfeed.errors import PackError
from rankfeed.storage import (
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    check_data_name,
    fsync_dir,
    load_manifest,
    write_atomic,
)

#: Between the origins of what a data set was packed from and what was appended to it.
AND = "+"


def commit(
    staging: Path,
    parts: list[Part],
    fields: Fields,
    origin: str,
    base: Manifest | None,
    step: Callable[[], object],
) -> None:
    """Give the parts, which agree on their fields, their final names, and write the manifest.

    Args:
        staging: the folder, in which nothing but the moves is left.
        parts: in the order of their rows.
        fields: of all.
        origin: for the manifest: of these rows; empty where nothing but themselves can tell.
        base: the manifest of the shards that are there already and stay as they are.
        step: called with each move.

    Raises:
        OSError: something cannot be moved or written; called again, `finish` goes on.
        PackError: somebody else took files away.
    """
    shards = [] if base is None else list(base.shards)
    taken = {shard.path for shard in shards}
    number = len(shards)
    for part in parts:
        while (name := f"shard-{number:05d}.arrow") in taken:
            number += 1
        taken.add(name)
        shards.append(msgspec.structs.replace(part.shard, path=name))
    total = sum(shard.rows for shard in shards)
    whole = origin if base is None else base.origin + AND + origin
    manifest = Manifest(num_rows=total, fields=dict(fields), shards=shards, origin=whole)
    ready = Ready(manifest, [part.shard.path for part in parts], nameless=base is not None and not origin)
    write_atomic(staging / READY, msgspec.json.encode(ready))
    if not finish(staging, step):
        raise PackError(
            "what was packed is not there any more",
            expected=f"the files of this call in {staging}",
            where=staging.parent,
            remedy="did something else remove them? Call pack again",
        )


def finish(staging: Path, step: Callable[[], object]) -> bool:
    """Make the last moves, if it had come to that; what they were stays written. Whether any were to be made.

    Raises:
        OSError: something cannot be moved or written.
    """
    dest, ready = staging.parent, _read(staging / READY)
    if ready is None or not (staging / JOB).exists():  # which goes once they are made
        return False
    if _shards_of(dest) == ready.manifest.shards:  # they are made, whatever became of the files since
        empty(staging)
        return True
    if not _can_be_made(staging, ready, step):
        (staging / READY).unlink()
        return False
    for staged, shard in zip(ready.staged, ready.new, strict=True):
        if (staging / staged).exists():  # else it was moved before the interruption
            os.replace(staging / staged, dest / shard.path)
        step()
    fsync_dir(dest)
    write_atomic(dest / MANIFEST_NAME, ready.manifest.encode())
    empty(staging)
    return True


def _can_be_made(staging: Path, ready: Ready, step: Callable[[], object]) -> bool:
    """Whether the data set is the one that they began with, and each shard is where it can be.

    Somebody may have cleared up since, or put other data there.
    """
    dest = staging.parent
    if _shards_of(dest) != ready.old:
        return False
    moving = [(staging / staged, shard) for staged, shard in zip(ready.staged, ready.new, strict=True)]
    for path, shard in [*((dest / shard.path, shard) for shard in ready.old), *moving]:
        step()
        if not any(_size(each) == shard.bytes for each in (path, dest / shard.path)):
            return False
    return True


def _shards_of(dest: Path) -> list[ShardInfo]:
    """Shards of the data set that is there; none where there is none."""
    return load_manifest(dest).shards if (dest / MANIFEST_NAME).exists() else []


def remember(staging: Path) -> None:
    """Keep what the moves were whose call has not returned, if nothing else tells whether its rows are there.

    Memories of rows that are not there any more go, and of those that the manifest names.
    """
    ready = _read(staging / READY)
    if ready is not None and ready.nameless:
        os.replace(staging / READY, staging / f"{MADE}{secrets.token_hex(8)}.json")
    forget(staging)
    memories = list(staging.glob(f"{MADE}*"))
    there = set(_shards_of(staging.parent)) if memories else set()
    origin = load_manifest(staging.parent).origin if there else ""
    for path in memories:
        made = _read(path)
        named = made is not None and not made.nameless and origin.startswith(made.manifest.origin)
        if made is None or named or not there.issuperset(made.new):
            path.unlink(missing_ok=True)


def recall(staging: Path, parts: list[Part], origin: str, base: Manifest) -> bool:
    """Whether an append of just these parts was made, whose call has not returned: then this one stands for it.

    Args:
        staging: the folder.
        parts: what would be appended.
        origin: of these rows, if this call can tell: it goes into the manifest.
        base: the manifest that is there.
    """
    if _shards_of(staging.parent) != base.shards:
        return False  # somebody put other data there: `commit` says so
    rows = [part.shard.content for part in parts]
    for path in staging.glob(f"{MADE}*"):
        made = _read(path)
        if made is None or [shard.content for shard in made.new] != rows:
            continue
        empty(staging)
        if origin:
            named = msgspec.structs.replace(base, origin=base.origin + AND + origin)
            told = msgspec.structs.replace(made.manifest, origin=named.origin)
            write_atomic(path, msgspec.json.encode(Ready(told, made.staged)))  # goes once the manifest says so
            write_atomic(staging.parent / MANIFEST_NAME, named.encode())
            path.unlink()
        else:
            os.replace(path, staging / READY)
        return True
    return False


def awaits(staging: Path) -> bool:
    """Whether moves are written that are still to be made, or whose call is to be known again."""
    ready = _read(staging / READY)
    return ready is not None and (ready.nameless or (staging / JOB).exists())


def forget(staging: Path) -> None:
    """The call that made the moves is over."""
    (staging / READY).unlink(missing_ok=True)


def _read(path: Path) -> Ready | None:
    try:
        ready = msgspec.json.decode(path.read_bytes(), type=Ready)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    for name in (*ready.staged, *(shard.path for shard in ready.manifest.shards)):
        check_data_name(name, path)
    return ready


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
