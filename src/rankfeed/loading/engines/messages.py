"""Messages between the rank and its workers: small arrays are in the message, large ones in shared memory."""

import marshal
import pickle
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rankfeed._util.native import address_of
from rankfeed._util.pickling import dumps
from rankfeed._util.workers import Channel
from rankfeed.columns.columns import Allocate, Array, Bytes
from rankfeed.loading.batch_builder import BatchResult, StageSeconds
from rankfeed.loading.engines.regions import BorrowedRegions, RegionPool, RegionSlice

#: Number of buffers of a message, and the place of each; a region of -1 means that it is in the message.
_COUNT, _PLACE = struct.Struct("<16xQ8x"), struct.Struct("<4q")
_ALIGNMENT = 16
#: How the content is encoded.
_PICKLE, _MARSHAL = b"p", b"m"
#: What a batch without pickle consists of, by type; and the types of what such a list may contain.
_KINDS = {torch.Tensor: "tensor", np.ndarray: "array", list: "list"}
_SIMPLE = {str, int, float, bool, type(None)}
#: Bytes up to which an array is sent as a whole for some views of it.
_MIN_BASE = 1 << 16


class SerializedBatch(NamedTuple):
    """What is not an array, and the arrays: small ones, and where the large ones are in shared memory."""

    content: bytes
    buffers: list[memoryview | RegionSlice]

    def send(self, channel: Channel) -> None:
        table: list[bytes] = []
        small: list[bytes | memoryview] = []
        for part in self.buffers:
            if isinstance(part, RegionSlice):
                table.append(_PLACE.pack(*part))
            else:  # aligned, since arrays will be views of the message
                table.append(_PLACE.pack(-1, 0, 0, part.nbytes))
                small += [part, bytes(-part.nbytes % _ALIGNMENT)]
        channel.send(b"".join([_COUNT.pack(len(table)), *table, *small, self.content]))


def serialize(value: Any, by_name: Collection[str] = (), regions: RegionPool | None = None) -> SerializedBatch:
    """Serialize a value without sending it, so that a failure can still be reported."""
    plain = _plain(value, np.empty if regions is None else regions.allocate)
    if plain is None:
        content, buffers = dumps(value, by_name)
        content = _PICKLE + content
    else:
        content, buffers = plain
    if regions is None:
        return SerializedBatch(content, list(buffers))
    empty = memoryview(b"")  # an empty array may be a view of a region, too
    return SerializedBatch(content, [regions.lend(part) or part if part.nbytes else empty for part in buffers])


def receive(message: bytearray, regions: BorrowedRegions | None = None) -> Any:
    """The value of a message that `SerializedBatch.send` sent; its arrays are views of the message and regions."""
    view, offset = memoryview(message), _COUNT.size
    (count,) = _COUNT.unpack_from(message)
    table = [RegionSlice(*place) for place in _PLACE.iter_unpack(view[offset : offset + count * _PLACE.size])]
    offset += count * _PLACE.size
    shared = {} if regions is None else regions.borrow([place for place in table if place.region >= 0])
    buffers = []
    for place in table:
        if place.region >= 0:
            buffers.append(shared[place])
        else:
            buffers.append(view[offset : offset + place.nbytes])
            offset += place.nbytes + -place.nbytes % _ALIGNMENT
    content = view[offset + 1 :]
    if view[offset : offset + 1] == _PICKLE:
        return pickle.loads(content, buffers=buffers)  # noqa: S301  (of our own worker)
    left = iter(buffers)
    return [_batch_of(facts, entries, left) for facts, entries in marshal.loads(content)]


def _plain(results: Any, allocate: Allocate) -> tuple[bytes, list[memoryview]] | None:
    """Batches of named tensors, arrays and lists without pickle, which takes ten times as long; else None."""
    if type(results) is not list:
        return None
    content, buffers = [], list[memoryview]()
    for result in results:
        entries = _entries(result, allocate, buffers) if isinstance(result, BatchResult) else None
        if entries is None:
            return None
        facts = result.step, tuple(result.seconds), result.padding, result.lookups, result.unproven
        content.append((facts, entries))
    try:
        return _MARSHAL + marshal.dumps(content), buffers
    except ValueError:  # more than 2 GiB
        return None


def _entries(
    result: BatchResult, allocate: Allocate, buffers: list[memoryview]
) -> list[tuple[str, str, Any]] | None:
    """The fields of a batch, whose arrays are added to ``buffers``; None if they need pickle."""
    batch, entries = result.batch, list[tuple[str, str, Any]]()
    if type(batch) is not dict or len({*map(id, batch.values())}) < len(batch):
        return None  # what is one object in the worker stays one

    def add(name: str, kind: str, array: Array, *facts: Any) -> None:
        entries.append((name, kind, (array.dtype.str, array.shape, *facts)))
        buffers.append(pickle.PickleBuffer(array.data).raw())

    for name, column in batch.items():
        kind, types = _KINDS.get(type(column)), {*map(type, column)} if type(column) is list else ()
        if type(name) is not str or not name or kind is None:  # "" has the sample ids
            return None
        if types == {bytes} or types == {np.ndarray}:
            rows = Bytes.views_of(column, allocate) if types == {bytes} else column
            base = _common_base(rows)
            if base is None:
                return None
            first, width = address_of(base), rows[0].itemsize
            places = [((address_of(row) - first) // width, len(row)) for row in rows]
            add(name, "bytes" if types == {bytes} else "views", base.view(rows[0].dtype), places)
        elif kind == "list":
            if not _SIMPLE.issuperset(types):
                return None
            entries.append((name, kind, column))
        else:
            try:
                array = column.contiguous().numpy() if kind == "tensor" else column
            except (TypeError, RuntimeError):  # bfloat16, sparse, conjugated, with a gradient
                return None
            if array.dtype.kind not in "biufc" or not array.flags.c_contiguous:
                return None
            add(name, kind, array)
    add("", "array", result.sample_ids)
    return entries


def _common_base(rows: Sequence[Array]) -> Array | None:
    """The array that all these are views of, if they are of one dtype and dimension and make up most of it."""
    base, dtype = rows[0].base, rows[0].dtype
    if type(base) is not np.ndarray or not base.flags.c_contiguous or base.nbytes % dtype.itemsize:
        return None
    for row in rows:
        if row.base is not base or row.ndim != 1 or row.dtype != dtype or not row.flags.c_contiguous:
            return None
    first, is_small = address_of(base), base.nbytes <= max(_MIN_BASE, 2 * sum(row.nbytes for row in rows))
    is_aligned = not any((address_of(row) - first) % dtype.itemsize for row in rows)
    return base.reshape(-1) if is_small and is_aligned and dtype.kind in "biufc" else None


def _batch_of(facts: Any, entries: Any, left: Iterator[memoryview]) -> BatchResult:
    batch: dict[str, Any] = {}
    for name, kind, content in entries:
        if kind == "list":
            batch[name] = content
            continue
        dtype, shape, *places = content
        buffer = next(left)
        array: Any = np.ndarray(shape, dtype, buffer) if buffer.nbytes else np.empty(shape, dtype)
        if kind == "tensor":
            array = torch.from_numpy(array)
        for rows in places:
            array = [array[first : first + length] for first, length in rows]
            array = [*map(bytes, array)] if kind == "bytes" else array
        batch[name] = array
    step, seconds, padding, lookups, unproven = facts
    return BatchResult(step, batch, batch.pop(""), StageSeconds(*seconds), padding, lookups, unproven)
