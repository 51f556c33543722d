"""How an input is cut: a source into stretches of sample ids, rows into shards. Pure functions of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.building.chunk import (
    Chunk,
    chunk_of,
    columns_of,
    concatenated,
    join_fields,
    not_a_dict,
)
from rankfeed.building.mapping import Mapped
from rankfeed.columns import Columns, as_array
from rankfeed.errors import ArgumentError, PackError, RankfeedError
from rankfeed.plan import Plan
from rankfeed.sources import Source

Int64 = npt.NDArray[np.int64]

#: Rows looked at to learn how large a row is, and bytes after which no more are.
_LOOKS, _LOOK_BYTES = 256, 64 << 20
#: The same where a function is called for each.
_MAP_LOOKS = 32
#: Rows and bytes that are read in one go.
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 20


def no_step() -> None:
    """What is called whenever some of the work is done, where nobody wants to know."""


@dataclass(frozen=True)
class Cut:
    """How a source is shared out.

    Args:
        ranges: start and stop of each stretch: positions in the order of the pack.
        batch: rows to read in one go.
    """

    ranges: list[tuple[int, int]]
    batch: int


def stretches(
    source: Source,
    shard_bytes: int,
    mapped: Mapped | None = None,
    plan: Plan | None = None,
    step: Callable[[], object] = no_step,
) -> Cut:
    """Ranges with about a shard's bytes in each, and the rows to read in one go.

    Judged by rows evenly spaced over the data (and by what ``mapped`` makes of them), so that the same data are
    always cut alike. Where rows are read as they lie, a stretch ends with a block of the source if there is an end
    near by, so that no block is read for two of them. A function of batches never has one that is cut in two.
    """
    size = len(source)
    if not size:
        return Cut([], 1)
    unit = 1 if mapped is None else max(1, mapped.size)
    looks = _LOOKS if mapped is None else max(1, _MAP_LOOKS // unit)
    read = made = seen = 0
    for first in sorted({size * number // looks // unit * unit for number in range(looks)}):
        ids = np.arange(first, min(first + unit, size), dtype=np.int64)
        seen += len(ids)
        if mapped is None:
            read += _chunk(source, ids, f"row {first}").nbytes
            step()
            made = read
        else:
            columns = source.fetch(ids) if source.declared is None else Columns.of_objects(source.samples(ids))
            step()
            read += sum(int(getattr(column, "nbytes", 0)) for column in columns.values())
            rows = mapped.rows(_stepping(zip(ids.tolist(), columns.samples(), strict=True), step))
            for chunk in chunks_of_rows(rows, shard_bytes, "mapped sample"):
                made += chunk.nbytes
                if made > _LOOK_BYTES:
                    break  # one sample may become a whole data set
        if max(read, made) > _LOOK_BYTES:
            break
    row_bytes = max(1, read // seen)
    # What is left of little is still work to read: some stretches are better than one.
    count = max(1, min(-(-size // unit), -(-size * max(1, made // seen, row_bytes // 16) // shard_bytes)))
    bounds = np.array([size * number // count for number in range(count + 1)], np.int64)
    if plan is None:
        bounds = at_ends(bounds, np.asarray(source.blocks, np.int64))
        batch = min(_BATCH_ROWS, _batch_bytes(shard_bytes) // row_bytes)
    else:
        # Rows from everywhere: the more of them are asked for at once, the fewer blocks are read twice.
        batch = shard_bytes // row_bytes
    bounds[1:-1] = bounds[1:-1] // unit * unit
    ranges = [(start, stop) for start, stop in pairwise(bounds.tolist()) if start < stop]
    return Cut(ranges, max(1, -(-batch // unit)) * unit)


def at_ends(bounds: Int64, blocks: Int64) -> Int64:
    """Equally spaced bounds, each moved to the end of a block that is less than a quarter of a stretch away.

    Examples:
        >>> at_ends(np.array([0, 10, 20, 30]), np.array([11, 5, 14])).tolist()
        [0, 11, 20, 30]
    """
    ends = np.concatenate([[0], np.cumsum(blocks)])
    after = np.searchsorted(ends, bounds).clip(1, len(ends) - 1)
    nearest = np.where(bounds - ends[after - 1] <= ends[after] - bounds, ends[after - 1], ends[after])
    near = 4 * np.abs(nearest - bounds) < bounds[-1] // max(1, len(bounds) - 1)
    return np.where(near, nearest, bounds)


def chunks_of_range(
    source: Source,
    cut: tuple[int, int, int],
    mapped: Mapped | None,
    plan: Plan | None,
    shard_bytes: int,
    step: Callable[[], object] = no_step,
) -> Iterator[Chunk]:
    """The rows of a stretch of a source.

    Args:
        source: where they are.
        cut: its start, its stop and the rows to read in one go.
        mapped: what is done to them.
        plan: the order that its positions are of; None: as they lie.
        shard_bytes: of the shards that they go to.
        step: called whenever a sample, or some rows, are done.
    """
    if mapped is not None:
        samples = (
            pair for ids in _ids(*cut, plan) for pair in zip(ids.tolist(), source.samples(ids), strict=True)
        )
        for chunk in chunks_of_rows(mapped.rows(_stepping(samples, step)), shard_bytes, "mapped sample"):
            step()
            yield chunk
        return
    for ids in _ids(*cut, plan):
        if plan is not None:
            where = f"{len(ids)} rows in shuffled order"
        else:
            where = f"row {ids[0]}" if len(ids) == 1 else f"rows {ids[0]} to {ids[-1]}"
        yield _chunk(source, ids, where)
        step()


def _chunk(source: Source, ids: Int64, where: str) -> Chunk:
    """Some rows of a source. Those of a wrapped Dataset are laid out as they ask, not as a few of them do."""
    if source.declared is None:
        return chunk_of(source.fetch(ids), where)
    rows = zip(ids.tolist(), source.samples(ids), strict=True)
    return concatenated(list(chunks_of_rows(rows, _BATCH_BYTES * _BATCH_ROWS, "row")))


def _stepping(samples: Iterable[tuple[int, Any]], step: Callable[[], object]) -> Iterator[tuple[int, Any]]:
    for sample in samples:
        step()
        yield sample


def _ids(start: int, stop: int, batch: int, plan: Plan | None) -> Iterator[Int64]:
    for first in range(start, stop, batch):
        positions = np.arange(first, min(first + batch, stop), dtype=np.int64)
        yield positions if plan is None else plan.sample_ids(0, positions)


def chunks_of_iterable(samples: Iterable[Any], mapped: Mapped | None, shard_bytes: int) -> Iterator[Chunk]:
    """The rows of an iterable of dicts."""
    numbered = enumerate(_read(samples))
    if mapped is not None:
        return chunks_of_rows(mapped.rows(numbered), shard_bytes, "mapped sample")
    return chunks_of_rows(numbered, shard_bytes, "row")


def chunks_of_rows(samples: Iterable[tuple[int, Any]], shard_bytes: int, what: str) -> Iterator[Chunk]:
    """Dicts gathered into chunks.

    Args:
        samples: each with the number that errors give it.
        shard_bytes: of the shards that they go to.
        what: errors call them.
    """
    waiting: list[tuple[int, dict[str, Any]]] = []
    nbytes = 0
    for number, sample in samples:
        if not isinstance(sample, dict):
            raise not_a_dict([sample], f"{what} {number}")
        row = {name: _value(name, value, f"{what} {number}") for name, value in sample.items()}
        waiting.append((number, row))
        nbytes += sum(len(value) if isinstance(value, (bytes, str)) else value.nbytes for value in row.values())
        if len(waiting) == _BATCH_ROWS or nbytes >= _batch_bytes(shard_bytes):
            yield _batch(waiting, what)
            waiting, nbytes = [], 0
    if waiting:
        yield _batch(waiting, what)


def _read(samples: Iterable[Any]) -> Iterator[Any]:
    """The samples; an input that cannot be read is told from an output that cannot be written."""
    number = 0
    try:
        for sample in samples:
            yield sample
            number += 1
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise PackError("the input could not be read", found=error, where=f"row {number}") from error


def _batch_bytes(shard_bytes: int) -> int:
    return max(1, min(_BATCH_BYTES, shard_bytes // 8))


def _value(name: str, value: Any, where: str) -> Any:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PackError("text cannot be stored", found=error, where=f"{where}, field {name!r}") from error
    if isinstance(value, (bytes, str)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    try:
        array = np.array(as_array(name, value))  # a copy: an iterable may fill one array again and again
        # An empty list goes with any type: of all, bool gives way to every other.
        return array.astype(np.bool_) if isinstance(value, list) and not array.size else array
    except ArgumentError as error:
        raise PackError(
            f"cannot be packed: {error.summary}",
            found=error.found,
            where=f"{where}, field {name!r}",
            remedy=error.remedy,
        ) from error


def _batch(numbered: list[tuple[int, dict[str, Any]]], what: str) -> Chunk:
    samples = [sample for _, sample in numbered]
    where = f"{what}s {numbered[0][0]} to {numbered[-1][0]}"
    try:
        return chunk_of(columns_of(samples, where), where)
    except PackError:
        # Which row was it? The first that does not go with the first of all.
        fields = None
        for number, sample in numbered:
            one = chunk_of(columns_of([sample], f"{what} {number}"), f"{what} {number}")
            fields = one.fields if fields is None else join_fields(fields, one.fields, f"{what} {number}")
        raise


def cut(chunks: Iterable[Chunk], limit: int) -> Iterator[Chunk]:
    """Rows gathered into shards: one ends with the chunk that brings it to ``limit`` bytes.

    Raises:
        PackError: rows do not fit into one column; names the field.
    """
    gathered: list[Chunk] = []
    nbytes = 0
    fields = None
    row = 0
    for chunk in chunks:
        where = f"row {row} or one of the {chunk.rows - 1} after it"
        fields = chunk.fields if fields is None else join_fields(fields, chunk.fields, where)
        row += chunk.rows
        gathered.append(chunk)
        nbytes += chunk.nbytes
        del chunk
        if nbytes >= limit:
            joined = concatenated(gathered)
            gathered, nbytes = [], 0  # let go before a shard is written, which may take a while
            yield joined
            del joined
    if gathered:
        joined = concatenated(gathered)
        gathered.clear()
        yield joined
