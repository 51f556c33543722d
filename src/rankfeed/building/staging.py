"""Where a pack is until it is whole: a hidden folder inside its destination.

Each finished part lies there with a record of it, and each finished stretch with a record of its parts. When all
are there, they are moved to their final names (see `last_moves`). Whoever finds a folder whose pack was killed
knows from these files how far it got, and goes on.

Several processes, on several machines, may write the same part at once: one that was thought dead, and the one
that took its place. So a part is named by the checksum of its rows: what has one name has the same bytes, whoever
wrote it, and a record that is there speaks of bytes that were whole. A stretch's record has its job in its name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rankfeed.building.chunk import Chunk, Fields
from rankfeed.building.records import Part, Stretch
from rankfeed.errors import PackError
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import (
    ShardInfo,
    atomic_file,
    check_data_name,
    digest_of,
    file_digest,
    make_directory,
    map_file,
    write_atomic,
)
from rankfeed.storage.arrow_shard import read_shard, write_shard

#: About what is read in one go.
BLOCK_BYTES = 4 << 20
#: Whose parts lie here, while it is at work; the lock.
JOB, _LOCK = "job.json", "lock"
#: The last moves: those of a job that has come to them, and of earlier ones (see `last_moves`).
READY, MADE = "ready.json", "made-"


@contextmanager
def locked(dest: Path) -> Iterator[Path]:
    """The staging folder, for one pack at a time.

    Raises:
        PackError: another process packs into the same folder now.
    """
    from filelock import FileLock, SoftFileLock, Timeout

    staging = dest / STAGING_NAME
    for _ in range(8):
        make_directory(staging)
        lock = FileLock(staging / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            if isinstance(lock, SoftFileLock):  # what a FileLock turns into where there is no flock
                raise _maybe_killed(dest) from error
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


def _maybe_killed(dest: Path) -> PackError:
    lock = dest / STAGING_NAME / _LOCK
    found = None
    with suppress(OSError):
        found = "process {} on {}".format(*lock.read_text().split()[:2])
    return PackError(
        "another process is packing into this folder, or was killed while it did",
        expected="a file system with locks that end with their process (flock), which this one has not",
        found=found,
        where=dest,
        remedy=f"wait for it; if it is not there any more, remove {lock} and call pack again: it goes on where it "
        "stopped (Lustre has such locks where it is mounted with -o flock)",
    )


def begin(staging: Path, origin: str, *, resume: bool) -> None:
    """Make the staging folder fit for a job: keep what it left, or start over.

    Raises:
        PackError: what is there was left by a job with another input or other parameters.
    """
    job = staging / JOB
    if job.exists():
        left = job.read_text()
        if resume and left != origin and has_parts(staging):
            raise PackError(
                "an interrupted pack of another input, or with other parameters, lies in this folder",
                where=staging.parent,
                remedy="call pack as it was called then, or start over with resume=False",
            )
        if resume and left == origin:
            for leftover in staging.glob(".tmp-*"):
                leftover.unlink(missing_ok=True)
            return
    empty(staging)
    write_atomic(job, origin.encode())


def is_begun(staging: Path) -> bool:
    """Whether there is anything that a second call could go on with."""
    return (staging / READY).exists() or has_parts(staging)


def has_parts(staging: Path) -> bool:
    """Whether finished parts lie there."""
    return any(staging.glob("*.arrow"))


def empty(staging: Path) -> None:
    """Forget what was staged; the last moves stay written.

    Raises:
        OSError: it cannot be removed.
    """
    for path in staging.iterdir():
        # The folder is of ranks that are at work now.
        if not (path.name.startswith((_LOCK, READY, MADE)) or path.is_dir()):
            path.unlink(missing_ok=True)


def write_part(staging: Path, task: int, number: int, chunk: Chunk) -> Part:
    """Write rows and the record of them, or find that the same rows are there.

    Args:
        staging: the folder.
        task: which stretch of the input the rows belong to.
        number: of the part within it.
        chunk: the rows.

    Raises:
        OSError: they cannot be written; nothing is left behind.
    """
    return _written(staging, f"{task:05d}-{number:05d}", chunk, chunk.fields, chunk.digest)


def _written(staging: Path, place: str, chunk: Chunk, own: Fields, content: str) -> Part:
    # Fields by their order, too: it is that of the columns in the file.
    name = digest_of(content.encode(), msgspec.json.encode(list(chunk.fields.items())))
    path = staging / f"{place}-{name}.arrow"
    earlier = _recorded(path)
    if earlier is not None:
        return earlier
    with atomic_file(path) as file:
        write_shard(file, chunk.columns, chunk.fields, chunk.rows)
    shard = ShardInfo(
        path=path.name,
        rows=chunk.rows,
        bytes=path.stat().st_size,
        xxh3=file_digest(path),
        block_rows=max(1, min(chunk.rows, chunk.rows * BLOCK_BYTES // max(1, chunk.nbytes))),
        content=content,
    )
    part = Part(dict(own), dict(chunk.fields), shard)
    write_atomic(path.with_suffix(".json"), msgspec.json.encode(part))
    return part


def _recorded(path: Path) -> Part | None:
    """A part that was finished under this name, its bytes checked; None if there is none."""
    try:
        part = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Part)
    except (OSError, msgspec.DecodeError):
        return None
    return part if part.shard.path == path.name and is_whole(path.parent, part) else None


def is_whole(staging: Path, part: Part) -> bool:
    """Whether a part lies there with the bytes that it was written with: all of them are read."""
    path = staging / part.shard.path
    try:
        return path.stat().st_size == part.shard.bytes and file_digest(path) == part.shard.xxh3
    except OSError:
        return False


def write_stretch(staging: Path, task: int, job: str, parts: list[Part]) -> None:
    """Record that a stretch is finished.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(_stretch_path(staging, task, job), msgspec.json.encode(Stretch(job, parts)))


def read_stretch(staging: Path, task: int, job: str) -> list[Part] | None:
    """The parts of a stretch that is recorded as finished for this job, or None. Their bytes are not read."""
    try:
        stretch = msgspec.json.decode(_stretch_path(staging, task, job).read_bytes(), type=Stretch)
    except (OSError, msgspec.DecodeError):
        return None
    for part in stretch.parts:
        check_data_name(part.shard.path, staging)
    return stretch.parts if stretch.job == job else None


def forget_stretch(staging: Path, task: int, job: str) -> None:
    """Take the record of a stretch away, so that it is packed again."""
    _stretch_path(staging, task, job).unlink(missing_ok=True)


def finished_stretches(staging: Path, job: str) -> set[int]:
    """Numbers of the stretches of which there is a record.

    Raises:
        OSError: the folder cannot be read.
    """
    end = f"-{_short(job)}.json"
    return {
        int(name.removeprefix("stretch-").removesuffix(end))
        for name in os.listdir(staging)
        if name.startswith("stretch-") and name.endswith(end)
    }


def _stretch_path(staging: Path, task: int, job: str) -> Path:
    return staging / f"stretch-{task:05d}-{_short(job)}.json"


def _short(job: str) -> str:
    return digest_of(job.encode())[:16]


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
    return _written(staging, path.name.rsplit("-", 1)[0], chunk, part.own, part.shard.content)


def clear(dest: Path) -> None:
    """Remove the staging folder, the lock last: from then on it may be another process's."""
    staging = dest / STAGING_NAME
    with suppress(OSError):
        for path in list(staging.iterdir()):
            if path.name == _LOCK:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        (staging / _LOCK).unlink(missing_ok=True)
        staging.rmdir()
