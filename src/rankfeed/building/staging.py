"""Where a pack is until it is whole: a hidden folder inside its destination.

Each finished part lies there with a record of it. When all are there, a plan of the last moves is written
(`ready.json`), the parts are moved to their final names and the manifest last. Whoever finds a folder whose pack
was killed knows from these files how far it got, and goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rankfeed.building.chunk import Chunk, Fields
from rankfeed.columns import Field
from rankfeed.errors import PackError
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import (
    MANIFEST_NAME,
    Manifest,
    Shard,
    atomic_file,
    file_digest,
    make_durable,
    map_file,
    write_atomic,
)
from rankfeed.storage.arrow_shard import read_shard, write_shard

#: About what is read in one go.
BLOCK_BYTES = 4 << 20
_JOB, _READY, _LOCK = "job.json", "ready.json", "lock"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of finished rows.

    Args:
        task: which stretch of the input it belongs to.
        number: of the part within the stretch.
        own: fields as its rows ask for.
        fields: as they are stored, which differs where other parts asked for more.
        shard: its entry in the manifest; the path is that in the staging folder.
    """

    task: int
    number: int
    own: dict[str, Field]
    fields: dict[str, Field]
    shard: Shard


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last moves: staged names, in the order of the manifest's shards."""

    manifest: Manifest
    staged: list[str]


@contextmanager
def locked(dest: Path) -> Iterator[Path]:
    """The staging folder, for one pack at a time.

    Raises:
        PackError: another process packs into the same folder now.
    """
    from filelock import FileLock, Timeout

    staging = dest / STAGING_NAME
    for _ in range(8):
        staging.mkdir(parents=True, exist_ok=True)
        lock = FileLock(staging / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise PackError(
                "another process is packing into this folder",
                where=dest,
                remedy="wait for it, or choose another folder",
            ) from error
        except FileNotFoundError:
            continue  # whoever had it finished and removed the folder in between
        try:
            # The lock is worth something only if its file is still the one that others would find.
            if (staging / _LOCK).exists():
                yield staging
                return
        finally:
            lock.release()
    raise PackError("the folder could not be locked", where=dest)


def begin(staging: Path, origin: str, *, resume: bool) -> None:
    """Make the staging folder fit for a job: keep what it left, or start over.

    Raises:
        PackError: what is there was left by a job with another input or other parameters.
    """
    job = staging / _JOB
    if job.exists():
        left = job.read_text()
        if resume and left != origin:
            raise PackError(
                "an interrupted pack of another input, or with other parameters, lies in this folder",
                where=staging.parent,
                remedy="call pack as it was called then, or start over with resume=False",
            )
        if resume:
            for leftover in staging.glob(".tmp-*"):
                leftover.unlink()
            return
    for path in staging.iterdir():
        if path.name != _LOCK:
            path.unlink()
    write_atomic(job, origin.encode())


def write_part(staging: Path, task: int, number: int, chunk: Chunk, *, keep: bool) -> Part:
    """Write rows and the record of them, or keep those of an earlier run.

    Args:
        staging: the folder.
        task: which stretch of the input the rows belong to.
        number: of the part within it.
        chunk: the rows.
        keep: whether an earlier run's part may stay if it holds the same rows.

    Raises:
        OSError: they cannot be written; nothing is left behind.
    """
    content = chunk.digest
    if keep:
        earlier = read_part(staging, task, number)
        if earlier is not None and earlier.shard.content == content and earlier.fields == chunk.fields:
            return earlier
    return _write(staging, Part(task, number, chunk.fields, chunk.fields, _NO_SHARD), chunk, content)


_NO_SHARD = Shard(path="-", rows=1, bytes=1, xxh3="0" * 32, block_rows=1, content="0" * 32)


def _write(staging: Path, part: Part, chunk: Chunk, content: str) -> Part:
    path = staging / f"{part.task:05d}-{part.number:05d}.arrow"
    path.with_suffix(".json").unlink(missing_ok=True)  # a record never speaks of a file that came after it
    with atomic_file(path) as file:
        write_shard(file, chunk.columns, chunk.fields, chunk.rows)
    shard = Shard(
        path=path.name,
        rows=chunk.rows,
        bytes=path.stat().st_size,
        xxh3=file_digest(path),
        block_rows=max(1, min(chunk.rows, chunk.rows * BLOCK_BYTES // max(1, chunk.nbytes))),
        content=content,
    )
    written = msgspec.structs.replace(part, fields=dict(chunk.fields), shard=shard)
    write_atomic(path.with_suffix(".json"), msgspec.json.encode(written))
    return written


def read_part(staging: Path, task: int, number: int) -> Part | None:
    """A part that an earlier run finished, its bytes checked; None if there is none."""
    path = staging / f"{task:05d}-{number:05d}.arrow"
    try:
        part = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Part)
        whole = path.stat().st_size == part.shard.bytes and file_digest(path) == part.shard.xxh3
    except (OSError, msgspec.DecodeError):
        return None
    return part if whole and part.shard.path == path.name else None


def widened(staging: Path, part: Part, fields: Fields) -> Part:
    """The part with its rows stored under wider fields, as others asked for.

    Raises:
        OSError: it cannot be written.
    """
    if list(part.fields.items()) == list(fields.items()):  # in the same order, too
        return part
    path = staging / part.shard.path
    columns = read_shard(map_file(path), part.fields, part.shard.rows, str(path))
    chunk = Chunk(part.shard.rows, part.fields, columns).laid_out(fields)
    return _write(staging, part, chunk, part.shard.content)


def commit(staging: Path, parts: list[Part], fields: Fields, origin: str) -> None:
    """Give the parts, which agree on their fields, their final names, and write the manifest.

    Raises:
        OSError: something cannot be moved or written; called again, it goes on.
    """
    shards = [
        msgspec.structs.replace(part.shard, path=f"shard-{number:05d}.arrow") for number, part in enumerate(parts)
    ]
    total = sum(shard.rows for shard in shards)
    manifest = Manifest(num_rows=total, fields=dict(fields), shards=shards, origin=origin)
    ready = Ready(manifest, [part.shard.path for part in parts])
    write_atomic(staging / _READY, msgspec.json.encode(ready))
    finish(staging)


def finish(staging: Path) -> bool:
    """Make the last moves, if it had come to that.

    Returns:
        whether it had.
    """
    dest = staging.parent
    try:
        ready = msgspec.json.decode((staging / _READY).read_bytes(), type=Ready)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    for staged, shard in zip(ready.staged, ready.manifest.shards, strict=True):
        if (staging / staged).exists():  # else it was moved before the interruption
            os.replace(staging / staged, dest / shard.path)
    make_durable(dest)
    write_atomic(dest / MANIFEST_NAME, ready.manifest.encode())
    return True


def clear(dest: Path) -> None:
    """Remove the staging folder, and the destination too where nothing else is in it."""
    shutil.rmtree(dest / STAGING_NAME, ignore_errors=True)
