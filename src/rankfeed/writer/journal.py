"""Commits a written dataset: the staged shards get their final names, then the manifest is replaced.

The renames are written to a journal first. The next call that finds the journal of a process that was killed
completes the commit, whatever it was called for, so a commit happens once.
"""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
from msgspec import UNSET

from rankfeed.errors import WriteError
from rankfeed.storage.commit import decodable, fsync_dir, read_record, write_atomic, write_record
from rankfeed.storage.manifest import MANIFEST_NAME, SHARD_NAME, Manifest, ShardInfo, load_manifest
from rankfeed.storage.untrusted import check_data_name
from rankfeed.writer.chunk import Fields
from rankfeed.writer.staging import JOURNAL_NAME, Part, clear

#: Between the origins of what a dataset was written from and what was appended to it.
ORIGIN_SEPARATOR = "+"


@decodable
class CommitJournal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The renames of a commit."""

    manifest: Manifest  # of the committed dataset
    staged: list[str]  # names of the staged shards, in the order of the last shards of the manifest


def commit(
    staging: Path,
    parts: list[Part],
    fields: Fields,
    origin: str,
    base: Manifest | None,
    logical_types: dict[str, str],
    step: Callable[[], object],
) -> None:
    """Publish staged shards that all have these fields, after the shards of ``base`` if rows are appended."""
    shards = [] if base is None else list(base.shards)
    taken = {shard.path for shard in shards}
    free = (name for name in map(SHARD_NAME.format, count(len(shards))) if name not in taken)
    shards += [msgspec.structs.replace(part.shard, path=name) for part, name in zip(parts, free, strict=False)]
    total = sum(shard.rows for shard in shards)
    origins = origin if base is None else base.origin + ORIGIN_SEPARATOR + origin
    types = (logical_types or UNSET) if base is None else base.logical_types
    manifest = Manifest(total, dict(fields), shards, origins, types)
    journal = CommitJournal(manifest, [part.shard.path for part in parts])
    step()
    write_record(staging / JOURNAL_NAME, journal)
    if not complete_commit(staging, step):
        raise WriteError(
            "cannot commit: files of this call, or of the dataset it appends to, are gone",
            expected=f"the files of this call in {staging}",
            where=staging.parent,
            remedy="make sure that no other program removes them, and call write again",
        )


def complete_commit(staging: Path, step: Callable[[], object]) -> bool:
    """Complete the commit in the journal; False if there is none that can be completed."""
    dest, path = staging.parent, staging / JOURNAL_NAME
    journal = read_record(path, CommitJournal)
    if journal is None:
        return False
    for name in (*journal.staged, *(shard.path for shard in journal.manifest.shards)):
        check_data_name(name, path)
    shards = journal.manifest.shards
    committed = load_manifest(dest).shards if (dest / MANIFEST_NAME).exists() else []
    if committed != shards:
        first = len(shards) - len(journal.staged)
        renames = [(staging / name, shard) for name, shard in zip(journal.staged, shards[first:], strict=False)]
        # Complete only the dataset that the commit began with, if each shard is at one of its two places.
        places = [(dest / shard.path, shard) for shard in committed] + renames
        is_begun = first >= 0 and committed == shards[:first]
        if not is_begun or not all(_exists(place, dest, shard, step) for place, shard in places):
            path.unlink()
            return False
        for staged, shard in renames:
            if staged.exists():  # else it was renamed before the interruption
                os.replace(staged, dest / shard.path)
            step()
        fsync_dir(dest)
        step()
        write_atomic(dest / MANIFEST_NAME, journal.manifest.encode())
    clear(staging)
    return True


def _exists(staged: Path, dest: Path, shard: ShardInfo, step: Callable[[], object]) -> bool:
    step()
    paths = (staged, dest / shard.path)
    return any(path.exists() and path.stat().st_size == shard.bytes for path in paths)
