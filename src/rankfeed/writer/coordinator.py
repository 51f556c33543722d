"""Coordinates the write of a dataset from the request to the manifest, whichever runner executes the tasks."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rankfeed._util.progress import progress_bar
from rankfeed._util.threads import in_parallel
from rankfeed.errors import SourceError, WriteError, listed
from rankfeed.plan import Plan
from rankfeed.sources import Source
from rankfeed.sources.concat import check_logical_types
from rankfeed.sources.packed import PackedSource
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.lease import HeldLease
from rankfeed.storage.manifest import MANIFEST_NAME, STAGING_NAME, Manifest
from rankfeed.writer.chunk import Chunk, Fields, join_fields
from rankfeed.writer.journal import ORIGIN_SEPARATOR, commit, complete_commit
from rankfeed.writer.sample_map import SampleMap
from rankfeed.writer.staging import (
    TASKS,
    Part,
    begin_staging,
    clear,
    forget_part,
    is_intact,
    is_resumable,
    lock_staging,
    widened,
    write_part,
)
from rankfeed.writer.tasks import RunTasks, WriteJob, WriteTask, partition, shards_of_iterable, shards_of_task

#: Changes if the same input would be written as different bytes.
_LAYOUT = "3"
#: Between the digits of an origin for the rows and those for their order and shards.
_LAYOUT_SEPARATOR = "."
REMEDY = "free disk space or choose another directory; called again, write continues where it stopped"


@dataclass(frozen=True)
class WriteRequest:
    """The checked arguments of `write`."""

    given: Source | Iterable[dict[str, Any]]
    dest: Path
    shard_bytes: int
    progress: bool
    resume: bool
    sample_map: SampleMap | None
    plan: Plan | None
    append: bool
    key: str

    @cached_property
    def origin(self) -> str:
        """Digits that identify the rows and their layout; empty if only the rows themselves do."""
        identified = isinstance(self.given, Source) and self.given.identified and self.sample_map is None
        if not self.key and not identified:
            return ""
        plan = self.plan.fingerprint if self.plan else ""
        facts = [_LAYOUT, self.given.fingerprint if isinstance(self.given, Source) else "", self.key]
        if self.sample_map is not None:
            batch = self.sample_map.batch
            facts += ["map", str(batch), str(self.sample_map.seed), plan if batch else ""]
        layout = digest_of(str(self.shard_bytes).encode(), plan.encode())
        return digest_of(*(fact.encode() for fact in facts)) + _LAYOUT_SEPARATOR + layout[:16]

    @property
    def logical_types(self) -> Mapping[str, str]:
        """Those of the source; none if a function may change the values."""
        return self.given.logical_types if isinstance(self.given, Source) and self.sample_map is None else {}

    def is_in(self, manifest: Manifest) -> bool:
        """Whether a dataset contains the rows: appended in whatever layout, or as its first ones in this one."""
        origins = manifest.origin.split(ORIGIN_SEPARATOR)
        if not self.append:
            return bool(self.origin) and origins[0] == self.origin
        rows = self.origin.split(_LAYOUT_SEPARATOR)[0]
        return any(origin.split(_LAYOUT_SEPARATOR)[0] == rows for origin in origins)

    def partition(self, name: str, staging: Path) -> tuple[WriteJob, list[WriteTask]]:
        """The job for a source, and its tasks."""
        assert isinstance(self.given, Source)
        job = WriteJob(name, self.given, staging, self.shard_bytes, sample_map=self.sample_map, plan=self.plan)
        return partition(job)


def coordinate(
    request: WriteRequest, run: RunTasks, session: AbstractContextManager[Any] | None = None
) -> PackedSource:
    """Write the dataset, as the only process that does so in this directory.

    ``session`` is that of the cluster whose machines write the shards, which are read again before the commit.
    """
    dest = request.dest
    with os_errors(WriteError, "cannot write the dataset", dest, REMEDY):
        check_destination(dest, append=request.append)
        is_new = not dest.exists() or not any(path.name != STAGING_NAME for path in dest.iterdir())
        total = len(request.given) if isinstance(request.given, Source) else None
        bar = progress_bar("writing", total, enabled=request.progress)
        try:
            with lock_staging(dest) as (staging, held):
                try:
                    with session or nullcontext(), bar as advance:
                        write = StagedWrite(request, staging, held)
                        if write.begin(advance):
                            write.finish(write.run(run, advance), verify=session is not None)
                    return PackedSource(dest)
                finally:
                    # What a second call continues stays, and what ranks are writing.
                    is_ours = not is_resumable(staging) and not (staging / TASKS).exists()
                    with suppress(OSError):
                        if is_ours and (is_new or (dest / MANIFEST_NAME).exists()) and held.is_held():
                            clear(staging)
        except BaseException:
            if is_new:
                with suppress(OSError):  # not empty
                    dest.rmdir()
            raise


def check_destination(dest: Path, *, append: bool) -> None:
    """Raise WriteError if the destination contains other files, or no dataset to append to."""
    finished = (dest / MANIFEST_NAME).exists()
    if append and not finished:
        raise WriteError(
            "there is no finished dataset to append to",
            expected=f"a directory with a {MANIFEST_NAME}",
            where=dest,
            remedy="write the first data without append=True, and let an unfinished write finish first",
        )
    if not dest.exists() or finished or (dest / STAGING_NAME).is_dir():
        return
    if not dest.is_dir():
        raise WriteError("the destination is not a directory", where=dest)
    names = sorted(os.listdir(dest))
    if names:
        raise WriteError(
            "the destination contains other files",
            expected="no directory, an empty one, or one with an unfinished write",
            found=listed(names),
            where=dest,
            remedy="choose another directory",
        )


class StagedWrite:
    """A write in its staging directory, by a process that holds the lease except while tasks run on ranks."""

    def __init__(self, request: WriteRequest, staging: Path, held: HeldLease) -> None:
        self.request, self.staging, self.held = request, staging, held
        self.stamp = ""  # digits of the job that is staged
        self.base: Manifest | None = None  # of the dataset to append to

    def keep_lease(self) -> None:
        """Renew the lease of the staging directory; raises WriteError if another process has taken over."""
        self.held.renew()
        if not self.held.is_held():
            raise WriteError(
                "lost the lease of the staging directory (no heartbeat); another process took over",
                where=self.request.dest,
                remedy="call write again when that process has ended; a writer must not be stopped for long",
            )

    def begin(self, advance: Callable[[int], None], *, shared: bool = False) -> bool:
        """Prepare the staging directory; False if the dataset contains the rows already."""
        request = self.request
        complete_commit(self.staging, self.keep_lease)
        check_destination(request.dest, append=request.append)  # again, now that no other process writes
        self.stamp = request.origin
        if (request.dest / MANIFEST_NAME).exists():
            existing = PackedSource(request.dest)
            self.base = existing.manifest
            if (request.append or shared) and request.is_in(self.base):
                return False
            if not request.append:
                _compare(existing, request, advance)
                return False
            _check_appended_types(self.base.logical_types or {}, request)
            self.stamp = digest_of(b"append", self.base.fingerprint.encode(), request.origin.encode())
        begin_staging(self.staging, self.stamp, resume=request.resume, shared=shared)
        return True

    def run(self, run: RunTasks, advance: Callable[[int], None]) -> list[Part]:
        """Write all rows; the staged shards in order."""
        request, given, parts = self.request, self.request.given, []
        if not isinstance(given, Source):
            shards = shards_of_iterable(given, request.sample_map, request.shard_bytes)
            for index, chunk in enumerate(shards):
                parts.append(write_part(self.staging, 0, index, chunk))
                advance(chunk.rows)
            return parts
        # Records of an earlier run are used if they are certain to be of the same rows.
        job, tasks = request.partition(self.stamp if request.origin else secrets.token_hex(16), self.staging)
        done: dict[int, list[Part]] = {}
        for task, written in run(job, tasks):
            if task.number not in done:
                advance(task.stop - task.start)
            done[task.number] = written
        parts = [part for task in tasks for part in done[task.number]]
        rows = sum(part.shard.rows for part in parts)
        if request.sample_map is None and rows != len(given):
            raise WriteError(
                "the source returned a different number of rows than its length",
                expected=len(given),
                found=rows,
                where=request.dest,
                remedy="if it changed while it was read, call write again",
            )
        return parts

    def finish(self, parts: list[Part], *, verify: bool, keep: bool = False) -> None:
        """Commit the staged shards; ``verify`` reads them before, ``keep`` keeps rows that do not fit."""
        if verify:
            _check_parts(self.staging, parts, self.keep_lease)
        if not parts:
            problem = "map returned no samples" if self.request.sample_map else "there are no samples"
            raise WriteError(f"{problem} to write", where=self.request.dest)
        try:
            fields = _common_fields(parts, None if self.base is None else self.base.fields)
            wide = []
            for part in parts:
                self.keep_lease()
                wide.append(widened(self.staging, part, fields))
        except WriteError:
            if self.base is not None and not keep and self.held.is_held():
                clear(self.staging)  # the rows will never fit
            raise
        types = {name: kind for name, kind in self.request.logical_types.items() if name in fields}
        commit(self.staging, wide, fields, self.request.origin, self.base, types, self.keep_lease)


def _check_appended_types(types: Mapping[str, str], request: WriteRequest) -> None:
    """Raise WriteError if integers have other units or classes than those of the dataset."""
    try:
        check_logical_types([("the dataset", types), ("the rows to append", request.logical_types)], types)
    except SourceError as error:
        raise WriteError(
            f"cannot append: {error.summary}",
            expected=error.expected,
            found=error.found,
            where=request.dest,
            remedy="open the rows with the types or classes of the dataset (types=, labels=), convert them by "
            "map=, or write them into another directory",
        ) from None


def _check_parts(staging: Path, parts: list[Part], step: Callable[[], object]) -> None:
    """Read all shards; a damaged one is forgotten, so that the next call writes it."""

    def is_damaged(part: Part) -> bool:
        step()
        return not is_intact(staging, part)

    bad = [part for part, damaged in zip(parts, in_parallel(is_damaged, parts), strict=True) if damaged]
    for part in bad:
        forget_part(staging, part)
    if bad:
        raise WriteError(
            "shards differ from what was written",
            expected="the checksums recorded by the processes that wrote them",
            found=listed([part.shard.path for part in bad]),
            where=staging.parent,
            remedy="call write again, which replaces them; if it happens again, check the file system",
        )


def _common_fields(parts: list[Part], base: Fields | None) -> Fields:
    """The fields that hold all rows; those of the base, if there is one, stay as they are."""
    fields: Fields = parts[0].needed
    row = 0
    for part in parts:
        fields = join_fields(fields, part.needed, f"rows {row} to {row + part.shard.rows - 1}")
        row += part.shard.rows
    if base is None:
        return fields
    joined = join_fields(base, fields, "the rows to append")
    if joined != base:
        name = next(name for name in base if joined[name] != base[name])
        raise WriteError(
            "cannot append: the rows do not fit into the columns of the dataset",
            expected=f"{base[name]} in field {name!r}",
            found=fields[name],
            remedy="convert them (map=...), or write old and new data together into another directory",
        )
    return base


def _compare(existing: PackedSource, request: WriteRequest, advance: Callable[[int], None]) -> None:
    """Check that a finished dataset is what would be written."""
    problem = partial(
        WriteError,
        where=existing.path,
        remedy="remove the directory or choose another one: a finished dataset is never overwritten "
        "(append=True adds to it)",
    )
    if not request.resume:
        raise problem("the destination contains a finished dataset")
    if request.origin or existing.manifest.origin:
        if request.origin != existing.manifest.origin:
            raise problem("the destination contains a dataset of another input, or written with other arguments")
        return
    # Only the rows themselves identify this input.
    shards = existing.manifest.shards
    for index, (chunk, shard) in enumerate(zip_longest(_shards_to_write(request), shards)):
        if chunk is None or shard is None or chunk.digest != shard.content:
            raise problem(
                "the destination contains a dataset of other rows, or written with other arguments",
                found=f"the first difference is in shard {index}",
            )
        advance(chunk.rows)


def _shards_to_write(request: WriteRequest) -> Iterator[Chunk]:
    if not isinstance(request.given, Source):
        yield from shards_of_iterable(request.given, request.sample_map, request.shard_bytes)
        return
    job, tasks = request.partition("", Path())
    for task in tasks:
        yield from shards_of_task(job, task)
