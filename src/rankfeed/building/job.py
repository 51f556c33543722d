"""The work itself: a stretch of a source, packed by whichever process it falls to, and found if it was before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rankfeed.building.mapping import Mapped
from rankfeed.building.records import Part
from rankfeed.building.staging import forget_stretch, is_whole, read_stretch, write_part, write_stretch
from rankfeed.building.stretches import chunks_of_range, cut, no_step
from rankfeed.errors import PackError, RankfeedError, listed
from rankfeed.plan import Plan
from rankfeed.sources import Source

#: Number, start and stop of a stretch.
Task = tuple[int, int, int]


@dataclass(frozen=True)
class Job:
    """What a process needs to pack a stretch of a source.

    Args:
        name: of the job; what another job left is not its own.
        source: the input.
        staging: the folder that is written to.
        shard_bytes: size of a shard.
        batch: rows to read in one go.
        mapped: what is done to each sample.
        plan: the order of rows; None: as they lie.
        step: called whenever some of the work is done.
    """

    name: str
    source: Source
    staging: Path
    shard_bytes: int
    batch: int = 1
    mapped: Mapped | None = None
    plan: Plan | None = None
    step: Callable[[], object] = no_step


class Runner(Protocol):
    """Whoever has stretches packed: by this process, by others of this machine, by a cluster, by ranks."""

    @property
    def checks(self) -> bool:
        """Whether what was written is read again at the end: others than this machine wrote it."""

    def session(self, staging: Path) -> AbstractContextManager[Any]:
        """What goes on around the whole pack, in whose folder nobody else is."""

    def step(self) -> None:
        """Called whenever some of what the leading process does by itself is done."""

    def each(self, job: Job, tasks: list[Task]) -> Iterable[tuple[int, list[Part]]]:
        """Have each stretch packed: its number and its parts, in any order."""


def pack_stretch(job: Job, task: int, start: int, stop: int) -> tuple[int, list[Part]]:
    """Write the rows of a stretch, or find that this job has them.

    Raises:
        PackError: they cannot be stored or written.
    """
    found = read_stretch(job.staging, task, job.name)
    if found is not None and all(is_whole(job.staging, part) for part in found):
        return task, found
    try:
        chunks = chunks_of_range(
            job.source, (start, stop, job.batch), job.mapped, job.plan, job.shard_bytes, job.step
        )
        parts = [
            write_part(job.staging, task, number, chunk)
            for number, chunk in enumerate(cut(chunks, 2 * job.shard_bytes))
        ]
        write_stretch(job.staging, task, job.name, parts)
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError("a shard could not be written", found=error, where=job.staging.parent) from error
    return task, parts


def check_parts(staging: Path, name: str, done: dict[int, list[Part]]) -> None:
    """Read what was written, wherever that was, as this machine sees it now.

    Args:
        staging: the folder.
        name: of the job.
        done: the parts of each stretch.

    Raises:
        PackError: a part is not there, or not as it was written; called again, pack writes it anew.
    """

    def damaged(task: int) -> str | None:
        for part in done[task]:
            if not is_whole(staging, part):
                forget_stretch(staging, task, name)
                return part.shard.path
        return None

    # Reading and hashing release the GIL.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        bad = [name for name in pool.map(damaged, done) if name is not None]
    if bad:
        raise PackError(
            "shards are not as they were written",
            expected="the checksums that those who wrote them recorded",
            found=listed(bad),
            where=staging.parent,
            remedy="call pack again: it writes these anew. If it happens again, look at the file system",
        )
