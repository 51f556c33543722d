"""Shards of written datasets: Arrow IPC files of one record batch, so that each column is contiguous.

Dense rows are primitive values or (nested) fixed-size lists, ragged rows large lists of these, bytes and text
large binaries and strings. Nothing is compressed or null, so that each column is a numpy view of the mapped file.
Two dtypes have no Arrow type that numpy can view: booleans are stored as uint8, complex numbers as pairs of
floats.
"""

import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from rankfeed.columns.columns import Array, ColumnBuffer, Int64
from rankfeed.columns.field import Field
from rankfeed.errors import CorruptError
from rankfeed.storage.mapped import Bytes

#: Offsets checked at once when a shard is opened.
_CHECK_ROWS = 1 << 16

REMEDY = "fetch the shard again, or write the dataset again; `rankfeed verify` lists all damage"


def arrow_schema(fields: Mapping[str, Field]) -> Any:
    """The `pyarrow.Schema` of shards with these fields."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(name, _arrow_type(field), nullable=False, metadata={"rankfeed": str(field)})
            for name, field in fields.items()
        ]
    )


def _arrow_type(field: Field) -> Any:
    import pyarrow as pa

    if field.kind == "bytes":
        return pa.large_binary()
    if field.kind == "str":
        return pa.large_string()
    dtype, shape = np.dtype(field.dtype), field.shape
    if dtype.kind == "c":
        dtype, shape = np.empty(0, dtype).real.dtype, (*shape, 2)
    kind = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    for extent in reversed(shape):
        kind = pa.list_(pa.field("item", kind, nullable=False), extent)
    return pa.large_list(pa.field("item", kind, nullable=False)) if field.kind == "ragged" else kind


def write_shard(file: BinaryIO, columns: Mapping[str, ColumnBuffer], fields: Mapping[str, Field]) -> None:
    """Write a shard: the same bytes for the same columns."""
    import pyarrow as pa

    schema = arrow_schema(fields)
    arrays = []
    for name in fields:
        stored = columns[name]
        buffers = [] if stored.offsets is None else [pa.py_buffer(stored.offsets)]
        buffers.append(pa.py_buffer(np.ascontiguousarray(stored.values).reshape(-1).view(np.uint8)))
        arrays.append(_arrow_array(schema.field(name).type, buffers, stored.rows))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    options = pa.ipc.IpcWriteOptions(compression=None, use_threads=False)
    with pa.ipc.new_file(file, schema, options=options) as writer:
        writer.write_batch(batch)


def _arrow_array(kind: Any, buffers: list[Any], length: int) -> Any:
    """An array of a type, whose buffers are the offsets, if its rows have different lengths, and the values."""
    import pyarrow as pa

    if not kind.num_fields:
        return pa.Array.from_buffers(kind, length, [None, *buffers], null_count=0)
    offsets = buffers[:-1]
    count = int(np.frombuffer(offsets[0], np.int64)[-1]) if offsets else length * kind.list_size
    values = _arrow_array(kind.value_type, buffers[-1:], count)
    return pa.Array.from_buffers(kind, length, [None, *offsets], null_count=0, children=[values])


def read_shard(data: Bytes, fields: Mapping[str, Field], rows: int, where: str) -> dict[str, ColumnBuffer]:
    """The columns of a shard, as views of its bytes; raises CorruptError."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        expected = arrow_schema(fields)
        if not reader.schema.equals(expected):
            raise CorruptError(
                "a shard has other columns than its dataset",
                expected=_one_line(expected),
                found=_one_line(reader.schema),
                where=where,
                remedy=REMEDY,
            )
        if reader.num_record_batches != 1:
            raise _damaged(where, "one record batch", reader.num_record_batches)
        batch = reader.get_batch(0)
        if batch.num_rows != rows:
            raise _damaged(where, f"{rows} rows", f"{batch.num_rows} rows")
        return {
            name: _stored(data, batch.column(index).buffers(), field, rows, f"{where}, column {name!r}")
            for index, (name, field) in enumerate(fields.items())
        }
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise _damaged(where, "an Arrow IPC file", error) from error


def _stored(data: Bytes, buffers: list[Any], field: Field, rows: int, where: str) -> ColumnBuffer:
    # Arrow's order of buffers: validity, then offsets, for each level of nesting, and the values last.
    validity = buffers[:-1] if field.kind == "dense" else [buffers[0], *buffers[2:-1]]
    if any(buffer is not None for buffer in validity):
        raise _damaged(where, "no nulls", "nulls")
    offsets = None
    length = rows
    if field.kind != "dense":
        offsets = _view(data, buffers[1], np.dtype(np.int64), rows + 1, where)
        _check_offsets(offsets, where)
        length = int(offsets[-1])
    count = length * math.prod(field.shape)
    values = _view(data, buffers[-1], np.dtype(field.dtype or np.uint8), count, where)
    return ColumnBuffer(values.reshape(length, *field.shape), offsets, where)


def _check_offsets(offsets: Int64, where: str) -> None:
    if offsets[0] != 0:
        raise _damaged(where, "offsets from 0 upwards", f"the first is {offsets[0]}")
    for first in range(0, len(offsets) - 1, _CHECK_ROWS):
        piece = offsets[first : first + _CHECK_ROWS + 1]
        down = piece[1:] < piece[:-1]
        if down.any():
            bad = first + int(np.argmax(down))
            raise _damaged(where, "offsets from 0 upwards", f"{offsets[bad]} to {offsets[bad + 1]} for row {bad}")


def _view(data: Bytes, buffer: Any, dtype: np.dtype[Any], count: int, where: str) -> Array:
    """The elements of a buffer, as a view of the file, whose size is checked when they are copied."""
    size = 0 if buffer is None else buffer.size
    if size != count * dtype.itemsize:
        raise _damaged(where, f"{count * dtype.itemsize} bytes", f"{size} bytes")
    if not count:
        return np.empty(0, dtype)
    start = buffer.address - data.ctypes.data
    if not 0 <= start <= len(data) - size:
        raise _damaged(where, "uncompressed buffers", "compressed ones")
    return data[start : start + size].view(dtype)


def _damaged(where: str, expected: object, found: object) -> CorruptError:
    return CorruptError("a shard is damaged", expected=expected, found=found, where=where, remedy=REMEDY)


def _one_line(schema: Any) -> str:
    return ", ".join(f"{field.name!r}: {field.type}" for field in schema)[:500]
