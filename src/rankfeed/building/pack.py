"""Packing: any source or iterable of dicts, written as Arrow IPC shards with a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from rankfeed.building.chunk import Chunk, join_fields
from rankfeed.building.staging import (
    Part,
    begin,
    clear,
    commit,
    finish,
    locked,
    read_part,
    widened,
    write_part,
)
from rankfeed.building.stretches import chunks_of_iterable, chunks_of_range, cut, stretches
from rankfeed.building.workers import can_travel, run
from rankfeed.columns import Field
from rankfeed.errors import ArgumentError, PackError, RankfeedError
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME, digest_of

#: Changes when the same input would be packed into other bytes.
_LAYOUT = "1"


@dataclass(frozen=True)
class _Job:
    """What a worker needs to pack a stretch of a source."""

    source: Source
    staging: Path
    batch: int
    limit: int


def pack(
    source_or_iterable: Source | Iterable[dict[str, Any]],
    dest: str | os.PathLike[str],
    *,
    runner: Literal["local", "ray", "ranks"] = "local",
    workers: int | None = None,
    shard_bytes: int = 256 << 20,
    progress: bool = True,
    resume: bool = True,
) -> PackedSource:
    """Write a data set as Arrow IPC shards, which any Arrow reader opens, and a manifest.

    The same input gives the same bytes, whatever the number of workers and however often it was interrupted: a
    pack that was killed leaves nothing that opens as a data set, and called again it goes on. An iterable is read
    again from its start then, and compared with what is there.

    Args:
        source_or_iterable: a source, or dicts of numbers, arrays, tensors, strings and bytes with the same keys.
            A field whose arrays all have one shape becomes dense, one whose first dimensions differ ragged.
        dest: folder, new or of a pack that was interrupted; left as it is where this input was packed.
        runner: "local": on this machine. The others are not there yet.
        workers: processes for a source; as many as there are cores if None, 0 or 1 for none. An iterable is
            read by the process that calls.
        shard_bytes: size of a shard, about.
        progress: a bar on standard error while that is a terminal.
        resume: keep what an interrupted pack left; False starts over.

    Returns:
        the packed data set, opened.

    Raises:
        PackError: a sample cannot be stored (named by row and field), or the folder cannot be written or holds
            something else.
        ArgumentError: an argument that cannot be meant.

    Examples:
        >>> import tempfile, numpy as np
        >>> clips = ({"frames": np.ones((n, 2)), "label": n % 2} for n in (3, 1, 2))
        >>> packed = pack(clips, tempfile.mkdtemp() + "/clips", progress=False)
        >>> packed.fields["frames"], packed[2]["frames"].shape
        (Field(kind='ragged', dtype='float64', shape=(2,)), (2, 2))
    """
    if runner != "local":
        raise ArgumentError(f"packing with runner={runner!r} is not there yet", expected='"local"')
    if workers is not None and workers < 0:
        raise ArgumentError("workers cannot be negative", found=workers)
    if shard_bytes < 1:
        raise ArgumentError("a shard has at least one byte", found=shard_bytes)
    given: Any = source_or_iterable
    if not isinstance(given, (Source, Iterable)) or isinstance(given, (str, bytes, dict)):
        raise ArgumentError(
            "this is neither a source nor an iterable of samples",
            found=type(given).__name__,
            remedy="give what rankfeed.open or rankfeed.from_dataset returns, or a generator of dicts",
        )
    target = _folder(dest)
    try:
        _refuse_foreign(target)
        created = not target.exists()
        with locked(target) as staging:
            try:
                finish(staging)
                with _bar(progress, given) as advance:
                    _pack(given, target, staging, workers, shard_bytes, resume, advance)
            except (RankfeedError, OSError):
                # Still under the lock: what is there is ours, and nobody else's beginnings.
                if created and not any(staging.glob("*.arrow")):
                    clear(target)
                    with suppress(OSError):  # not empty
                        target.rmdir()
                raise
            finally:
                if (target / MANIFEST_NAME).exists():
                    clear(target)
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError(
            "the data set could not be written",
            found=error,
            where=target,
            remedy="make room or choose another folder; called again, pack goes on where it stopped",
        ) from error
    return PackedSource(target)


def _folder(dest: Any) -> Path:
    """The folder that is meant.

    Raises:
        ArgumentError: no folder of this machine's file systems.
    """
    if isinstance(dest, (str, os.PathLike)):
        text = os.fspath(dest)
        if isinstance(text, str) and text and "\0" not in text and "://" not in text:
            return Path(text)
    raise ArgumentError(
        "this is no folder to pack into",
        expected="a path (object stores are not written yet)",
        found=repr(dest),
    )


def _pack(
    given: Source | Iterable[dict[str, Any]],
    dest: Path,
    staging: Path,
    workers: int | None,
    shard_bytes: int,
    resume: bool,
    advance: Callable[[int], None],
) -> None:
    origin = ""
    if isinstance(given, Source) and given.identified:
        origin = digest_of(_LAYOUT.encode(), given.fingerprint.encode(), str(shard_bytes).encode())
    if (dest / MANIFEST_NAME).exists():
        _compare(PackedSource(dest), given, origin, shard_bytes, resume, advance)
        return
    begin(staging, origin, resume=resume)
    parts: list[Part] = []
    if isinstance(given, Source):
        ranges, batch = stretches(given, shard_bytes)
        job = _Job(given, staging, batch, 2 * shard_bytes)
        tasks = [(task, start, stop, bool(origin)) for task, (start, stop) in enumerate(ranges)]
        for done in _each(job, tasks, workers):
            parts += done
            advance(sum(part.shard.rows for part in done))
        parts.sort(key=lambda part: (part.task, part.number))
    else:
        for number, chunk in enumerate(cut(chunks_of_iterable(given, shard_bytes), shard_bytes)):
            parts.append(write_part(staging, 0, number, chunk, keep=True))
            advance(chunk.rows)
    if not parts:
        raise PackError("there are no samples to pack", where=dest)
    fields = _joined(parts)
    parts = [widened(staging, part, fields) for part in parts]
    commit(staging, parts, fields, origin)


def _joined(parts: list[Part]) -> dict[str, Field]:
    fields, row = parts[0].own, 0
    for part in parts:
        fields = join_fields(fields, part.own, f"rows {row} to {row + part.shard.rows - 1}")
        row += part.shard.rows
    return fields


def _each(job: _Job, tasks: list[tuple[Any, ...]], workers: int | None) -> Iterator[list[Part]]:
    """The parts of each stretch, in any order."""
    count = min(len(tasks), len(os.sched_getaffinity(0)) if workers is None else workers)
    shared = can_travel(job) if count > 1 else None
    if shared is None:
        return (_pack_stretch(job, *task) for task in tasks)
    return run(_pack_stretch, shared, tasks, count)


def _pack_stretch(job: _Job, task: int, start: int, stop: int, identified: bool) -> list[Part]:
    """Write the rows of a stretch, or find that an earlier run did."""
    if identified:
        found: list[Part] = []
        while (part := read_part(job.staging, task, len(found))) is not None:
            found.append(part)
        if sum(part.shard.rows for part in found) == stop - start:
            return found
    try:
        chunks = cut(chunks_of_range(job.source, start, stop, job.batch), job.limit)
        return [write_part(job.staging, task, number, chunk, keep=True) for number, chunk in enumerate(chunks)]
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError("a shard could not be written", found=error, where=job.staging.parent) from error


def _compare(
    packed: PackedSource,
    given: Source | Iterable[dict[str, Any]],
    origin: str,
    shard_bytes: int,
    resume: bool,
    advance: Callable[[int], None],
) -> None:
    """Find that a finished data set is what would be packed.

    Raises:
        PackError: it is not, or packing it anew was asked for.
    """
    problem = partial(
        PackError,
        where=packed.path,
        remedy="remove the folder or choose another one: a finished data set is never overwritten",
    )
    if not resume:
        raise problem("the folder holds a finished data set")
    if origin or packed.manifest.origin:
        if origin != packed.manifest.origin:
            raise problem("the folder holds a data set of another input, or packed with another shard_bytes")
        return
    # Nothing but the rows themselves tells this input from another.
    chunks: Iterable[Chunk]
    if isinstance(given, Source):
        ranges, batch = stretches(given, shard_bytes)
        chunks = (
            chunk
            for start, stop in ranges
            for chunk in cut(chunks_of_range(given, start, stop, batch), 2 * shard_bytes)
        )
    else:
        chunks = cut(chunks_of_iterable(given, shard_bytes), shard_bytes)
    for number, (chunk, shard) in enumerate(zip_longest(chunks, packed.manifest.shards)):
        if chunk is None or shard is None or chunk.digest != shard.content:
            raise problem(
                "the folder holds a data set of other rows, or packed with another shard_bytes",
                found=f"the first difference in shard {number}",
            )
        advance(chunk.rows)


def _refuse_foreign(dest: Path) -> None:
    """Never write among files that are not ours."""
    if not dest.exists() or (dest / MANIFEST_NAME).exists() or (dest / STAGING_NAME).is_dir():
        return
    if not dest.is_dir():
        raise PackError("the destination is no folder", where=dest)
    names = sorted(os.listdir(dest))
    if names:
        raise PackError(
            "the folder holds other files",
            expected="no folder, an empty one, or one of an interrupted pack",
            found=", ".join(names[:4]) + (", ..." if len(names) > 4 else ""),
            where=dest,
            remedy="choose another folder",
        )


@contextmanager
def _bar(progress: bool, given: Any) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields what to call with rows that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("packing", total=len(given) if isinstance(given, Source) else None)
        yield lambda rows: bar.update(task, advance=rows)
