"""The staging directory of an unfinished dataset: shards under temporary names, and records of what is finished.

Several processes may write the same shard at once: one that was taken for dead, and the one that took its place.
So a staged shard is named by the checksum of its rows: files of one name have the same bytes, whichever process
wrote them.
"""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rankfeed.columns.field import Field
from rankfeed.errors import WriteError
from rankfeed.storage.arrow_shard import read_shard, write_shard
from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.commit import (
    atomic_file,
    decodable,
    make_directory,
    read_record,
    remove_temporaries,
    write_atomic,
    write_record,
)
from rankfeed.storage.lease import DURATION, HeldLease, Lease, LeaseOwner, StallDetector
from rankfeed.storage.manifest import STAGING_NAME, ShardInfo
from rankfeed.storage.mapped import map_file
from rankfeed.storage.untrusted import check_data_name
from rankfeed.writer.chunk import Chunk, Fields

_log = logging.getLogger("rankfeed")
#: Files: the job whose parts are staged, and the journal of the commit. Directories: the lease, those of tasks.
JOB_NAME, JOURNAL_NAME, _LEASE, TASKS = "job.json", "commit.json", "lease", "tasks"
#: The record of a task: its number, and the name of its job.
_TASK_NAME = "task-{:05d}-{}.json"
#: About the bytes that a reader reads at once.
_BLOCK_BYTES = 4 << 20
#: Seconds between looks at a lease whose owner may be dead.
_LOOK = 0.2


@decodable
class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A staged shard."""

    needed: dict[str, Field]  # fields as its rows need them
    fields: dict[str, Field]  # as they are stored: wider, if other parts needed that
    shard: ShardInfo  # its entry in the manifest, with its name in the staging directory


@decodable
class TaskRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished task of the job in the file's name; without parts if the map function left no rows."""

    parts: list[Part]


@contextmanager
def lock_staging(dest: Path, *, label: str = "", duration: float = DURATION) -> Iterator[tuple[Path, HeldLease]]:
    """The staging directory, for one writer at a time, and its lease; removed at the end if it is empty.

    A writer with a label is one of several ranks, which take turns: it renews the lease by progress, and waits for
    the others.
    """
    staging = dest / STAGING_NAME
    try:
        with _acquire(staging, label, duration) as held:
            yield staging, held
    finally:
        with suppress(OSError):
            staging.rmdir()


def _acquire(staging: Path, label: str, duration: float) -> HeldLease:
    lease = Lease(staging / _LEASE, duration=duration, by_progress=bool(label))
    stalls, began, reported = StallDetector(), time.monotonic(), False
    while True:
        make_directory(staging)
        owner = lease.owner()
        if owner is None or lease.is_expired(owner, stalls):
            with suppress(FileNotFoundError):  # another writer has ended and removed the directory
                if (held := lease.acquire(owner, label)) is not None:
                    return held
            continue
        if lease.is_alive(owner, stalls) and not (label and owner.label):
            raise _is_writing(owner, staging)
        if not reported and time.monotonic() - began > 2:
            reported = True
            text = "waiting for %s, which is writing to %s; it may make no progress for %.0f s"
            _log.warning(text, owner, staging.parent, duration)
        time.sleep(_LOOK)


def _is_writing(owner: LeaseOwner, staging: Path) -> WriteError:
    return WriteError(
        "another process is writing to this directory",
        found=owner,
        where=staging.parent,
        remedy="wait for it, or choose another directory",
    )


def begin_staging(staging: Path, origin: str, *, resume: bool, shared: bool) -> None:
    """Prepare the staging directory for a job: keep the parts of its earlier runs, or start over."""
    is_same = is_begun(staging, origin)
    for tasks in () if is_same and shared else staging.glob(f"{TASKS}/*"):
        owner = Lease(tasks).owner()
        if owner is not None and owner.has_ended is False:
            raise _is_writing(owner, staging)
    if resume and not is_same and is_resumable(staging):
        raise WriteError(
            "the destination contains an unfinished write of another input, or with other arguments",
            where=staging.parent,
            remedy="repeat the call that was interrupted, or start over with resume=False",
        )
    if not (resume and is_same):
        clear(staging)
        write_atomic(staging / JOB_NAME, origin.encode())
    elif not (staging / TASKS).exists():  # else ranks may be writing
        remove_temporaries(staging)
    if shared:
        make_directory(staging / TASKS)


def is_begun(staging: Path, origin: str) -> bool:
    """Whether the staging directory is that of a job."""
    with suppress(OSError):
        return (staging / JOB_NAME).read_text() == origin
    return False


def is_resumable(staging: Path) -> bool:
    """Whether a second call could continue what is staged: finished shards, or a commit."""
    is_started = any(staging.glob("*.arrow")) or (staging / JOURNAL_NAME).exists()
    return is_started and (staging / JOB_NAME).exists()


def clear(staging: Path) -> None:
    """Remove everything that is staged."""
    # The job first, so that no leftover is taken for an unfinished write; the journal last.
    for path in sorted(staging.iterdir(), key=lambda child: (child.name != JOB_NAME, child.name == JOURNAL_NAME)):
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name != _LEASE:
            shutil.rmtree(path, ignore_errors=True)


def write_part(staging: Path, task: int, index: int, chunk: Chunk, narrow: Part | None = None) -> Part:
    """Write a shard of a task and its record, unless the same rows are staged already.

    ``narrow`` is the part with the same rows under the fields that they need.
    """
    needed, content = (chunk.fields, chunk.digest) if narrow is None else (narrow.needed, narrow.shard.content)
    # The order of the fields counts: it is that of the columns in the file.
    name = digest_of(content.encode(), msgspec.json.encode(list(chunk.fields.items())))
    path = staging / f"{task:05d}-{index:05d}-{name}.arrow"
    record = path.with_suffix(".json")
    part = read_record(record, Part)
    if part is not None and part.shard.path == path.name and is_intact(staging, part):
        return part
    with atomic_file(path) as file:
        write_shard(file, chunk.columns, chunk.fields)
    shard = ShardInfo(
        path=path.name,
        rows=chunk.rows,
        bytes=path.stat().st_size,
        xxh3=file_digest(path),
        block_rows=max(1, min(chunk.rows, chunk.rows * _BLOCK_BYTES // max(1, chunk.nbytes))),
        content=content,
    )
    part = Part(needed, chunk.fields, shard)
    write_record(record, part)
    return part


def is_intact(staging: Path, part: Part) -> bool:
    """Whether a staged shard has the bytes that were written: all of them are read."""
    path = staging / part.shard.path
    try:
        return path.stat().st_size == part.shard.bytes and file_digest(path) == part.shard.xxh3
    except OSError:
        return False


def widened(staging: Path, part: Part, fields: Fields) -> Part:
    """The part with its rows stored under wider fields, which other parts needed; raises OSError."""
    if list(part.fields.items()) == list(fields.items()):  # in the same order, too
        return part
    path = staging / part.shard.path
    rows = part.shard.rows
    stored = Chunk(rows, part.fields, read_shard(map_file(path), part.fields, rows, str(path)))
    chunk = Chunk(rows, dict(fields), {name: stored.take(name, field) for name, field in fields.items()})
    task, index, _ = path.name.split("-")
    return write_part(staging, int(task), int(index), chunk, part)


def write_task(staging: Path, task: int, job: str, parts: list[Part]) -> None:
    """Record that a task is finished; raises OSError."""
    write_record(staging / _TASK_NAME.format(task, job), TaskRecord(parts))


def read_task(staging: Path, task: int, job: str) -> list[Part] | None:
    """The parts of a finished task of this job, whose bytes are not checked; None if it is not finished."""
    record = None
    with suppress(OSError):
        record = read_record(staging / _TASK_NAME.format(task, job), TaskRecord)
    if record is None:
        return None
    for part in record.parts:
        check_data_name(part.shard.path, staging)
    return record.parts


def forget_part(staging: Path, part: Part) -> None:
    """Remove the records of the task that wrote a shard, so that it is written again."""
    for record in staging.glob(f"task-{part.shard.path.split('-')[0]}-*.json"):
        record.unlink(missing_ok=True)


def finished_tasks(staging: Path, job: str) -> set[int]:
    """Numbers of the tasks of this job that have a record; raises OSError."""
    return {int(path.name.split("-")[1]) for path in staging.glob(f"task-*-{job}.json")}
