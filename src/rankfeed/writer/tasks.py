"""Tasks: a source is partitioned into ranges of about one shard, and any process can write the shards of a range.

Partitioning and writing are pure functions of the data, so a task that is written twice gives the same files.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankfeed.columns.columns import Columns
from rankfeed.errors import WriteError, describe_error
from rankfeed.plan import Plan
from rankfeed.sources import Source
from rankfeed.sources.source import Int64
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import os_errors
from rankfeed.writer.chunk import (
    BATCH_BYTES,
    BATCH_ROWS,
    Chunk,
    batch_bytes,
    chunk_of,
    chunks_of_samples,
    concat_chunks,
    gather_shards,
)
from rankfeed.writer.sample_map import SampleMap
from rankfeed.writer.staging import Part, is_intact, read_task, write_part, write_task

#: Rows that are read to estimate the size of a row, and bytes after which no more are.
_PROBES, _PROBE_BYTES = 256, 64 << 20
#: The same if a function is called for each.
_MAP_PROBES = 32


class WriteTask(NamedTuple):
    """A range of positions to write: its number, first position, and the position after the last."""

    number: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"task {self.number} (positions {self.start} to {self.stop - 1})"


@dataclass(frozen=True)
class WriteJob:
    """What a process needs to run a task."""

    name: str  # hexadecimal digits; records of other jobs are not used
    source: Source
    staging: Path
    shard_bytes: int
    batch: int = 1  # rows to read at once
    sample_map: SampleMap | None = None
    plan: Plan | None = None  # order of the rows; None: as stored
    step: Callable[[], object] = int  # called after each sample or batch of rows; int does nothing


#: A task and the shards that were written.
WrittenTask = tuple[WriteTask, list[Part]]
#: A runner: has tasks of a job run; yields them in any order.
RunTasks = Callable[[WriteJob, list[WriteTask]], Iterable[WrittenTask]]


def run_task(job: WriteJob, task: WriteTask) -> list[Part]:
    """Write the shards of a task, or find that this job has written them."""
    parts = read_task(job.staging, task.number, job.name)
    if parts is not None and all(is_intact(job.staging, part) for part in parts):
        return parts
    with os_errors(WriteError, "cannot write a shard", job.staging.parent):
        shards = enumerate(shards_of_task(job, task))
        parts = [write_part(job.staging, task.number, index, shard) for index, shard in shards]
        write_task(job.staging, task.number, job.name, parts)
    return parts


def picklable_error(error: Exception) -> Exception:
    """An error that another process can unpickle and print, which not all can."""
    try:
        str(pickle.loads(pickle.dumps(error)))  # noqa: S301
    except Exception:
        return WriteError("writing failed", found=describe_error(error))
    return error


def partition(job: WriteJob) -> tuple[WriteJob, list[WriteTask]]:
    """The job, with the rows to read at once and a name that depends on its tasks, which have about a shard each.

    The size of a row is estimated from evenly spaced rows (and what the map function returns for them), so that
    the same data are always partitioned alike. If rows are read in stored order, a task ends with a block of the
    source if one ends nearby, so that no block is read twice. A batch of the map function is never divided.
    """
    size = len(job.source)
    if not size:
        return job, []
    unit = 1 if job.sample_map is None else max(1, job.sample_map.batch)
    read_bytes, written_bytes = _row_bytes(job, unit)
    # If the function leaves out most samples, the work is in reading: several tasks are better than one.
    row_bytes = max(1, written_bytes, read_bytes // 16)
    count = max(1, min(-(-size // unit), -(-size * row_bytes // job.shard_bytes)))
    bounds = np.array([size * index // count for index in range(count + 1)], np.int64)
    if job.plan is None:
        bounds = align_to_blocks(bounds, np.asarray(job.source.blocks, np.int64))
        batch = min(BATCH_ROWS, batch_bytes(job.shard_bytes) // read_bytes)
    else:
        # In random order, the more rows are read at once, the fewer blocks are read twice.
        batch = job.shard_bytes // read_bytes
    bounds[1:-1] = bounds[1:-1] // unit * unit
    ranges = [(start, stop) for start, stop in pairwise(bounds.tolist()) if start < stop]
    tasks = [WriteTask(index, start, stop) for index, (start, stop) in enumerate(ranges)]
    batch = max(1, -(-batch // unit)) * unit
    # Records of a run that partitioned the same rows otherwise are not used.
    name = digest_of(job.name.encode(), repr((tasks, batch)).encode())
    return replace(job, name=name, batch=batch), tasks


def _row_bytes(job: WriteJob, unit: int) -> tuple[int, int]:
    """Bytes of a row as it is read (at least 1) and as it is written, on average."""
    source, size, sample_map = job.source, len(job.source), job.sample_map
    probes = _PROBES if sample_map is None else max(1, _MAP_PROBES // unit)
    read = written = rows = 0
    for first in sorted({size * index // probes // unit * unit for index in range(probes)}):
        ids = np.arange(first, min(first + unit, size), dtype=np.int64)
        rows += len(ids)
        if sample_map is None:
            read += _read_chunk(source, ids, f"row {first}").nbytes
            job.step()
            written = read
        else:
            columns = source.fetch(ids) if source.declared is None else Columns.of_objects(source.samples(ids))
            job.step()
            read += sum(int(getattr(column, "nbytes", 0)) for column in columns.values())
            samples = _with_steps(zip(ids.tolist(), columns.samples(), strict=True), job.step)
            for chunk in chunks_of_samples(sample_map.apply(samples), job.shard_bytes, "mapped sample"):
                written += chunk.nbytes
                if written > _PROBE_BYTES:
                    break  # one sample may become a whole dataset
        if max(read, written) > _PROBE_BYTES:
            break
    return max(1, read // rows), written // rows


def align_to_blocks(bounds: Int64, blocks: Int64) -> Int64:
    """Move each of some equally spaced bounds to the end of a block within a quarter of their distance."""
    ends = np.concatenate([[0], np.cumsum(blocks)])
    after = np.searchsorted(ends, bounds).clip(1, len(ends) - 1)
    nearest = np.where(bounds - ends[after - 1] <= ends[after] - bounds, ends[after - 1], ends[after])
    near = 4 * np.abs(nearest - bounds) < bounds[-1] // max(1, len(bounds) - 1)
    return np.where(near, nearest, bounds)


def shards_of_task(job: WriteJob, task: WriteTask) -> Iterator[Chunk]:
    """The rows of a task as they are written: in one shard, unless rows are much larger than estimated."""
    return gather_shards(_chunks_of_task(job, task), 2 * job.shard_bytes)


def _chunks_of_task(job: WriteJob, task: WriteTask) -> Iterator[Chunk]:
    if job.sample_map is not None:
        samples = chain.from_iterable(_samples(job.source, ids) for ids in _ids(job, task))
        mapped = job.sample_map.apply(_with_steps(samples, job.step))
        for chunk in chunks_of_samples(mapped, job.shard_bytes, "mapped sample"):
            job.step()
            yield chunk
        return
    for ids in _ids(job, task):
        if job.plan is not None:
            where = f"{len(ids)} rows in shuffled order"
        else:
            where = f"row {ids[0]}" if len(ids) == 1 else f"rows {ids[0]} to {ids[-1]}"
        yield _read_chunk(job.source, ids, where)
        job.step()


def _read_chunk(source: Source, ids: Int64, where: str) -> Chunk:
    if source.declared is None:
        return chunk_of(source.fetch(ids), where)
    # Samples of a wrapped Dataset are laid out as they need, not as the few that were probed.
    return concat_chunks(list(chunks_of_samples(_samples(source, ids), BATCH_BYTES * BATCH_ROWS, "row")))


def _samples(source: Source, ids: Int64) -> Iterator[tuple[int, Any]]:
    return zip(ids.tolist(), source.samples(ids), strict=True)


def _with_steps(samples: Iterable[tuple[int, Any]], step: Callable[[], object]) -> Iterator[tuple[int, Any]]:
    for sample in samples:
        step()
        yield sample


def _ids(job: WriteJob, task: WriteTask) -> Iterator[Int64]:
    for first in range(task.start, task.stop, job.batch):
        positions = np.arange(first, min(first + job.batch, task.stop), dtype=np.int64)
        yield positions if job.plan is None else job.plan.sample_ids(0, positions)


def shards_of_iterable(samples: Iterable[Any], sample_map: SampleMap | None, shard_bytes: int) -> Iterator[Chunk]:
    """The rows of an iterable of dicts as they are written."""
    numbered, noun = _numbered(samples), "row"
    if sample_map is not None:
        numbered, noun = sample_map.apply(numbered), "mapped sample"
    return gather_shards(chunks_of_samples(numbered, shard_bytes, noun), shard_bytes)


def _numbered(samples: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The samples with the numbers of their rows; an OSError of the input is not one of the output."""
    row = 0
    try:
        for sample in samples:
            yield row, sample
            row += 1
    except OSError as error:
        raise WriteError("cannot read the input", found=error, where=f"row {row}") from error
