"""Record batches decoded by Arrow: compressed ones, and columns that are no plain numbers, lists or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Field, Stored
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow_columns import stored_of
from rankfeed.sources.arrow_messages import Messages
from rankfeed.sources.arrow_places import Shape, stored_type
from rankfeed.sources.arrow_types import Nulls, leaves_of, roots_of

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: An end of stream.
_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_batch(data: Bytes, messages: Messages, number: int, names: Sequence[str], nulls: Nulls) -> Any:
    """A record batch with the columns that are needed for some fields.

    Args:
        data: uint8, the file.
        messages: of the file.
        number: of the record batch.
        names: of the fields.
        nulls: as for `arrow_types.fields_of`.

    Raises:
        pyarrow.ArrowException, OSError: it is damaged.
        CorruptError: it is damaged.
    """
    import pyarrow as pa

    schema = read_schema(data, messages)
    wanted = roots_of(schema, names, nulls=nulls)
    start, _, end = messages.batches[number].tolist()
    if not messages.dictionaries and not messages.compressed[number]:
        message = pa.ipc.read_message(pa.py_buffer(data[start:end]))
        batch = pa.ipc.read_record_batch(message, schema).select(wanted)
    else:
        fields = [index for index, name in enumerate(schema.names) if name in wanted]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        if messages.schema is None:
            batch = pa.ipc.open_file(pa.py_buffer(data), options=options).get_batch(number)
        else:  # a stream can only be read from its beginning, so one is made of what this record batch needs
            before = [data[messages.schema.start : messages.schema.end], *_dictionaries(data, messages, number)]
            content = b"".join([*(piece.data for piece in (*before, data[start:end])), _END])
            batch = pa.ipc.open_stream(pa.py_buffer(content), options=options).read_next_batch()
        batch = batch.select(wanted)
    if batch.num_rows != messages.rows[number]:
        raise CorruptError("a record batch has another length than its head says", found=batch.num_rows)
    # All offsets, indices and texts: a view outside the buffers must be impossible.
    batch.validate(full=True)
    return batch


def read_schema(data: Bytes, messages: Messages) -> Any:
    """The columns of a file, as a `pyarrow.Schema`."""
    import pyarrow as pa

    if messages.schema is None:
        schema = pa.ipc.open_file(pa.py_buffer(data)).schema
    else:
        content = data[messages.schema.start : messages.schema.end].tobytes()
        schema = pa.ipc.open_stream(pa.py_buffer(content + _END)).schema
    if len(set(schema.names)) != len(schema.names):
        raise SourceError("two columns have one name", found=", ".join(schema.names)[:500])
    return schema


def _dictionaries(data: Bytes, messages: Messages, number: int) -> list[Bytes]:
    """The dictionaries in force for a record batch: of each the last whole one, and what was added since."""
    in_force: dict[int, list[Bytes]] = {}
    for each in messages.dictionaries:
        if each.before <= number:
            piece = data[each.message.start : each.message.end]
            in_force[each.id] = [*in_force.get(each.id, []), piece] if each.delta else [piece]
    return [piece for pieces in in_force.values() for piece in pieces]


def decoded(
    batch: Any,
    fields: Mapping[str, Field],
    shapes: Mapping[str, Shape],
    *,
    where: str,
    first_row: int,
    nulls: Nulls,
) -> dict[str, Stored]:
    """The columns of a record batch or table.

    Args:
        batch: with the columns that are needed, which was validated.
        fields: those wanted.
        shapes: columns of lists of lists that are arrays, and their shapes.
        where: the file and record batch, for errors.
        first_row: number of the first row in the file, for errors.
        nulls: as for `arrow_types.fields_of`.

    Raises:
        SourceError: a null; names the row.
        CorruptError: a column is not of the type that it should be.
    """
    plain = {name: field for name, field in fields.items() if name not in shapes or field.kind == "object"}
    stored = stored_of(batch, plain, where=where, first_row=first_row, nulls=nulls)
    paths = dict(leaves_of(batch.schema))
    for name, field in fields.items():
        if name not in plain:
            array = batch.column(paths[name][0]) if name in paths else None
            if array is None or len(paths[name]) > 1:
                raise CorruptError("a column is missing", expected=name, where=where)
            stored[name] = _shaped(array, field, shapes[name], f"{where}, column {name!r}", first_row)
    return {name: stored[name] for name in fields}


def _shaped(array: Any, field: Field, shape: Shape, where: str, first_row: int) -> Stored:
    """Lists of lists as arrays."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    rows = len(array)
    ends = np.arange(rows + 1)
    for level, length in enumerate(shape):
        array = _storage(array)
        if array.null_count:
            row = first_row + (int(np.searchsorted(ends, np.argmax(array.is_null().to_numpy(False)), "right")) - 1)
            raise SourceError("a value is null", expected=field, where=f"{where}, row {row}", remedy=_NULL)
        if pa.types.is_fixed_size_list(array.type):
            offsets = np.arange(len(array) + 1) * array.type.list_size
        else:
            offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            offsets = offsets - offsets[0]
        wrong = np.diff(offsets) != length
        if length is not None and wrong.any():
            at = int(np.argmax(wrong))
            row = first_row + int(np.searchsorted(ends, at, "right")) - 1
            raise CorruptError(
                "an array has another shape than its column",
                expected=f"lists of {length}",
                found=f"one of {int(offsets[at + 1] - offsets[at])}",
                where=f"{where}, row {row}",
            )
        ends = offsets[ends] if level == 0 else ends
        array = array.flatten()
    element = stored_of(pa.table({"x": array}), {"x": Field("dense", field.dtype)}, where=where)["x"]
    first = ends if field.kind == "ragged" else None
    return Stored(element.values.reshape(-1 if first is not None else rows, *field.shape), first)


def _storage(array: Any) -> Any:
    return array.storage if stored_type(array.type) is not array.type else array


_NULL = "leave the column out with columns="
