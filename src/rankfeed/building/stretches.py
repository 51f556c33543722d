"""How an input is cut: a source into stretches of sample ids, rows into shards. Pure functions of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from rankfeed.building.chunk import Chunk, chunk_of, columns_of, concatenated, join_fields, not_a_dict
from rankfeed.columns import as_array
from rankfeed.errors import ArgumentError, PackError, RankfeedError
from rankfeed.sources import Source

#: Rows looked at to learn how large a row is, and bytes after which no more are.
_LOOKS, _LOOK_BYTES = 256, 64 << 20
#: Rows and bytes that are read in one go.
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 20


def stretches(source: Source, shard_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Equal ranges of sample ids with about a shard's bytes in each, and the rows to read in one go.

    Judged by rows evenly spaced over the data, so that the same data are always cut alike.
    """
    size = len(source)
    looks = sorted({size * number // _LOOKS for number in range(_LOOKS)})
    seen = total = 0
    for each in looks:
        total += chunk_of(source.fetch([each]), f"row {each}").nbytes
        seen += 1
        if total > _LOOK_BYTES:
            break
    row_bytes = max(1, total // seen)
    count = max(1, min(size, -(-size * row_bytes // shard_bytes)))
    bounds = [size * number // count for number in range(count + 1)]
    ranges = list(pairwise(bounds))
    return ranges, max(1, min(_BATCH_ROWS, _batch_bytes(shard_bytes) // row_bytes))


def chunks_of_range(source: Source, start: int, stop: int, batch: int) -> Iterator[Chunk]:
    """The rows of a stretch of a source."""
    for first in range(start, stop, batch):
        ids = np.arange(first, min(first + batch, stop), dtype=np.int64)
        where = f"row {first}" if len(ids) == 1 else f"rows {first} to {int(ids[-1])}"
        yield chunk_of(source.fetch(ids), where)


def chunks_of_iterable(samples: Iterable[Any], shard_bytes: int) -> Iterator[Chunk]:
    """The rows of an iterable of dicts."""
    waiting: list[dict[str, Any]] = []
    first = nbytes = 0
    for number, sample in enumerate(_read(samples)):
        if not isinstance(sample, dict):
            raise not_a_dict([sample], f"row {number}")
        row = {name: _value(name, value, number) for name, value in sample.items()}
        waiting.append(row)
        nbytes += sum(len(value) if isinstance(value, (bytes, str)) else value.nbytes for value in row.values())
        if len(waiting) == _BATCH_ROWS or nbytes >= _batch_bytes(shard_bytes):
            yield _batch(waiting, first)
            waiting, first, nbytes = [], number + 1, 0
    if waiting:
        yield _batch(waiting, first)


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


def _value(name: str, value: Any, number: int) -> Any:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PackError("text cannot be stored", found=error, where=f"row {number}, field {name!r}") from error
    if isinstance(value, (bytes, str)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    try:
        return as_array(name, value)
    except ArgumentError as error:
        raise PackError(
            f"cannot be packed: {error.summary}",
            found=error.found,
            where=f"row {number}, field {name!r}",
            remedy=error.remedy,
        ) from error


def _batch(samples: list[dict[str, Any]], first: int) -> Chunk:
    where = f"rows {first} to {first + len(samples) - 1}"
    try:
        for name in samples[0]:
            # numpy would let int64 and uint64 meet in float64, where digits are lost.
            kinds = {sample[name].dtype for sample in samples if hasattr(sample.get(name), "dtype")}
            if len(kinds) > 1 and np.result_type(*kinds).kind == "f" and all(kind.kind in "iu" for kind in kinds):
                raise PackError("signed and unsigned 64-bit numbers do not fit into one column", where=where)
        return chunk_of(columns_of(samples, where), where)
    except PackError:
        # Which row was it? The first that does not go with the first of all.
        fields = chunk_of(columns_of(samples[:1], f"row {first}"), f"row {first}").fields
        for number, sample in enumerate(samples[1:], first + 1):
            one = chunk_of(columns_of([sample], f"row {number}"), f"row {number}")
            fields = join_fields(fields, one.fields, f"row {number}")
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
        if nbytes >= limit:
            yield concatenated(gathered)
            gathered, nbytes = [], 0
    if gathered:
        yield concatenated(gathered)
