"""A pack from its beginning to its manifest, whoever packs the stretches."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rankfeed.building.chunk import Chunk, Fields, join_fields
from rankfeed.building.destination import bar, nothing_to_append_to, refuse_foreign
from rankfeed.building.job import Job, Runner, check_parts
from rankfeed.building.last_moves import AND, awaits, commit, finish, forget, recall, remember
from rankfeed.building.mapping import Mapped
from rankfeed.building.records import Part
from rankfeed.building.staging import (
    JOB,
    MADE,
    begin,
    clear,
    empty,
    has_parts,
    is_begun,
    locked,
    widened,
    write_part,
)
from rankfeed.building.stretches import chunks_of_iterable, chunks_of_range, cut, stretches
from rankfeed.errors import PackError, RankfeedError
from rankfeed.plan import Plan
from rankfeed.sources import PackedSource, Source
from rankfeed.sources.open import STAGING_NAME
from rankfeed.storage import MANIFEST_NAME, Manifest, digest_of

#: Changes when the same input would be packed into other bytes.
_LAYOUT = "3"
#: Between the digits for the input and those for how it is laid out.
_LAID_OUT = "."


@dataclass(frozen=True)
class Request:
    """What was asked for, its arguments checked; see `pack`."""

    given: Source | Iterable[dict[str, Any]]
    dest: Path
    shard_bytes: int
    progress: bool
    resume: bool
    mapped: Mapped | None
    plan: Plan | None
    append: bool
    key: str

    @cached_property
    def origin(self) -> str:
        """Digits that stand for the rows that are to be written; empty where nothing but the rows can."""
        return self.digest if self.key or (self._identified and self.mapped is None) else ""

    @cached_property
    def digest(self) -> str:
        """Digits of all that can be told of the request; two requests for other rows may share them.

        Those before the point are of the rows, those after it of their order and their shards.
        """
        plan = self.plan.fingerprint if self.plan else ""
        facts = [_LAYOUT, self.given.fingerprint if isinstance(self.given, Source) else "", self.key]
        if self.mapped is not None:
            facts += ["map", str(self.mapped.size), str(self.mapped.seed), plan if self.mapped.size else ""]
        layout = digest_of(str(self.shard_bytes).encode(), plan.encode())
        return digest_of(*(fact.encode() for fact in facts)) + _LAID_OUT + layout[:16]

    def is_in(self, manifest: Manifest) -> bool:
        """Whether a data set has the rows already, as far as that can be told."""
        rows = self.origin.split(_LAID_OUT)[0]
        return bool(rows) and any(each.split(_LAID_OUT)[0] == rows for each in manifest.origin.split(AND))

    @property
    def _identified(self) -> bool:
        return isinstance(self.given, Source) and self.given.identified

    def job(self, name: str, staging: Path, batch: int) -> Job:
        """The work on the stretches of the source that is given."""
        assert isinstance(self.given, Source)
        return Job(name, self.given, staging, self.shard_bytes, batch, self.mapped, self.plan)


def lead(request: Request, runner: Runner) -> PackedSource:
    """Pack, as the one process that does so in this folder; the packed data set, opened.

    Raises:
        PackError: see `pack`.
    """
    dest = request.dest
    try:
        refuse_foreign(dest, append=request.append)
        created = not dest.exists() or not any(path.name != STAGING_NAME for path in dest.iterdir())
        with locked(dest) as staging:
            over = False
            try:
                with runner.session(staging), bar(request.progress, request.given) as advance:
                    _pack(request, runner, staging, advance)
                packed = PackedSource(dest)
                forget(staging)
                over = True
                return packed
            except (RankfeedError, OSError):
                # Still under the lock: what is there is ours, and nobody else's beginnings.
                if created and not is_begun(staging):
                    clear(dest)
                    with suppress(OSError):  # not empty
                        dest.rmdir()
                raise
            finally:
                going_on = (staging / JOB).exists() and has_parts(staging)  # of an append, this one or another
                if (dest / MANIFEST_NAME).exists() and not going_on and (over or not awaits(staging)):
                    _leave(dest, staging)
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError(
            "the data set could not be written",
            found=error,
            where=dest,
            remedy="make room or choose another folder; called again, pack goes on where it stopped",
        ) from error


def _leave(dest: Path, staging: Path) -> None:
    """Remove what no call goes on with; what is remembered of appends stays."""
    if any(staging.glob(f"{MADE}*")):
        with suppress(OSError):
            forget(staging)
            empty(staging)
    else:
        clear(dest)


def _pack(request: Request, runner: Runner, staging: Path, advance: Callable[[int], None]) -> None:
    origin = request.origin
    finish(staging, runner.step)
    remember(staging)
    base: Manifest | None = None
    if (request.dest / MANIFEST_NAME).exists():
        packed = PackedSource(request.dest)
        if not request.append:
            _compare(packed, request, runner, advance)
            return
        base = packed.manifest
        if request.is_in(base):
            empty(staging)
            return
    elif request.append:
        raise nothing_to_append_to(request.dest)
    stamp = origin if base is None else digest_of(b"append", base.fingerprint.encode(), origin.encode())
    begin(staging, stamp, resume=request.resume)
    # What another run left is as good as new if it is certain to be of the same rows.
    parts = _parts(request, runner, stamp if origin else secrets.token_hex(16), staging, advance)
    if not parts:
        summary = "there are no samples to pack" if request.mapped is None else "map left no samples to pack"
        raise PackError(summary, where=request.dest)
    if base is not None and recall(staging, parts, origin, base):  # it was this very append that was interrupted
        return
    try:
        fields = _joined(parts, None if base is None else base.fields)
        parts = [_widened(staging, part, fields, runner) for part in parts]
    except PackError:
        if base is not None:
            empty(staging)  # they will never fit: nothing is left to go on with
        raise
    commit(staging, parts, fields, origin, base, runner.step)


def _widened(staging: Path, part: Part, fields: Fields, runner: Runner) -> Part:
    runner.step()
    return widened(staging, part, fields)


def _parts(
    request: Request, runner: Runner, name: str, staging: Path, advance: Callable[[int], None]
) -> list[Part]:
    """All rows, written, in order."""
    given, parts = request.given, []
    if not isinstance(given, Source):
        chunks = chunks_of_iterable(given, request.mapped, request.shard_bytes)
        for number, chunk in enumerate(cut(chunks, request.shard_bytes)):
            parts.append(write_part(staging, 0, number, chunk))
            advance(chunk.rows)
        return parts
    found = stretches(given, request.shard_bytes, request.mapped, request.plan, runner.step)
    # A stretch is known by its number: one of another cut, which a function that changed may lead to, is another.
    name = digest_of(name.encode(), repr(found).encode())
    done: dict[int, list[Part]] = {}
    tasks = [(task, start, stop) for task, (start, stop) in enumerate(found.ranges)]
    for task, made in runner.each(request.job(name, staging, found.batch), tasks):
        if task not in done:
            advance(found.ranges[task][1] - found.ranges[task][0])
        done[task] = made
    if runner.checks:
        check_parts(staging, name, done)
    parts = [part for task in range(len(tasks)) for part in done[task]]
    rows = sum(part.shard.rows for part in parts)
    if request.mapped is None and rows != len(given):
        raise PackError(
            "the source gave another number of rows than it has",
            expected=len(given),
            found=rows,
            where=request.dest,
            remedy="was it changed while it was packed? Call pack again",
        )
    return parts


def _joined(parts: list[Part], base: Fields | None) -> Fields:
    """The fields that all rows have room in; those of the base, if there is one, stay as they are."""
    fields, row = parts[0].own, 0
    for part in parts:
        fields = join_fields(fields, part.own, f"rows {row} to {row + part.shard.rows - 1}")
        row += part.shard.rows
    if base is None:
        return fields
    joined = join_fields(base, fields, "the rows to append")
    if joined != base:
        name = next(name for name in base if joined[name] != base[name])
        raise PackError(
            "the rows do not fit into the data set, whose shards stay as they are",
            expected=f"{base[name]} in field {name!r}",
            found=fields[name],
            remedy="convert them (map=...), or pack old and new data together into another folder",
        )
    return base


def _compare(packed: PackedSource, request: Request, runner: Runner, advance: Callable[[int], None]) -> None:
    """Find that a finished data set is what would be packed.

    Raises:
        PackError: it is not, or packing it anew was asked for.
    """
    problem = partial(
        PackError,
        where=packed.path,
        remedy="remove the folder or choose another one: a finished data set is never overwritten "
        "(append=True adds to it)",
    )
    if not request.resume:
        raise problem("the folder holds a finished data set")
    if request.origin or packed.manifest.origin:
        if request.origin != packed.manifest.origin:
            raise problem("the folder holds a data set of another input, or packed with other arguments")
        return
    # Nothing but the rows themselves tells this input from another.
    for number, (chunk, shard) in enumerate(zip_longest(_in_shards(request, runner), packed.manifest.shards)):
        if chunk is None or shard is None or chunk.digest != shard.content:
            raise problem(
                "the folder holds a data set of other rows, or packed with other arguments",
                found=f"the first difference in shard {number}",
            )
        advance(chunk.rows)


def _in_shards(request: Request, runner: Runner) -> Iterator[Chunk]:
    """The rows as they would be packed."""
    given, limit = request.given, request.shard_bytes
    if not isinstance(given, Source):
        yield from cut(chunks_of_iterable(given, request.mapped, limit), limit)
        return
    found = stretches(given, limit, request.mapped, request.plan, runner.step)
    for start, stop in found.ranges:
        where = (start, stop, found.batch)
        chunks = chunks_of_range(given, where, request.mapped, request.plan, limit, runner.step)
        yield from cut(chunks, 2 * limit)
