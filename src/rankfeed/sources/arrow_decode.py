"""Record batches decoded by Arrow: compressed ones, and columns that are no plain numbers, lists or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import ColumnBuffer, Field
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow_columns import array_at, stored_of
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.arrow_messages import Messages
from rankfeed.sources.arrow_places import Shape, shaped_field
from rankfeed.sources.arrow_shaped import shaped
from rankfeed.sources.arrow_types import VALID, Nulls, field_at, leaves_of, roots_of

Bytes = npt.NDArray[np.uint8]
#: An end of stream.
_END = b"\xff\xff\xff\xff\0\0\0\0"


def read_batch(
    data: Bytes, messages: Messages, number: int, names: Sequence[str], nulls: Nulls, rows: slice = slice(None)
) -> Any:
    """A record batch, or rows of it, with the columns that are needed for some fields.

    Args:
        data: uint8, the file.
        messages: of the file.
        number: of the record batch.
        names: of the fields.
        nulls: as for `arrow_types.fields_of`.
        rows: which; the others are not looked at.

    Raises:
        pyarrow.ArrowException, OSError: it is damaged.
        CorruptError: it is damaged.
    """
    import pyarrow as pa

    schema = read_schema(data, messages)
    wanted = roots_of(schema, names, nulls=nulls)
    start, _, end = messages.batches[number].tolist()
    # A schema in memory is of this machine's byte order, whatever the file's: by it nothing would be swapped.
    if messages.little and not messages.dictionaries and not messages.compressed[number]:
        message = pa.ipc.read_message(pa.py_buffer(data[start:end]))
        batch = pa.ipc.read_record_batch(message, schema).select(wanted)
    else:
        fields = [index for index, name in enumerate(schema.names) if name in wanted]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        if messages.schema is None:
            batch = pa.ipc.open_file(pa.py_buffer(data), options=options).get_batch(number)
        else:  # a stream can only be read from its beginning, so one is made of what this record batch needs
            head = data[messages.schema.start : messages.schema.end]
            needed = _Pieces([head, *_dictionaries(data, messages, number), data[start:end]])
            batch = pa.ipc.open_stream(needed, options=options).read_next_batch()
        batch = batch.select(wanted)
    if batch.num_rows != messages.rows[number]:
        raise CorruptError("a record batch has another length than its head says", found=batch.num_rows)
    batch = batch[rows]
    # All offsets, indices and texts: a view outside the buffers must be impossible.
    batch.validate(full=True)
    return batch


def copied(batch: Any) -> Any:
    """A record batch of the same rows, in memory of its own and no more than they take."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


class _Pieces:
    """Messages that lie apart, as a file of which Arrow copies nothing: what it keeps are views of them."""

    closed = False

    def __init__(self, pieces: Sequence[Bytes]) -> None:
        self._pieces = [piece.data for piece in pieces]

    def read(self, size: int) -> memoryview:
        while len(self._pieces) > 1 and not len(self._pieces[0]):
            del self._pieces[0]
        found, self._pieces[0] = self._pieces[0][:size], self._pieces[0][size:]
        return found  # never over the end of a message, which would be damaged


def read_schema(data: Bytes, messages: Messages) -> Any:
    """The columns of a file, as a `pyarrow.Schema`."""
    import pyarrow as pa

    if messages.schema is None:
        schema = pa.ipc.open_file(pa.py_buffer(data)).schema
    else:
        content = data[messages.schema.start : messages.schema.end].tobytes()
        schema = pa.ipc.open_stream(pa.py_buffer(content + _END)).schema
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
) -> dict[str, ColumnBuffer]:
    """The columns of a record batch or table.

    Args:
        batch: with the columns that are needed, which was validated.
        fields: those wanted.
        shapes: columns of lists of lists that are arrays, and their shapes; others are not looked at.
        where: the file and record batch, for errors.
        first_row: number of the first row in the file, for errors.
        nulls: as for `arrow_columns.stored_of`.

    Raises:
        CorruptError: a column is not of the type that it should be.
    """
    made: dict[str, ColumnBuffer] = {}
    for name, path in leaves_of(batch.schema):
        if name not in shapes or not (name in fields or (nulls == "mask" and name + VALID in fields)):
            continue
        field = shaped_field(field_at(batch.schema, path).type, shapes[name])
        if field.kind == "object" or fields.get(name, field) != field:
            continue  # read as it is, or told that it is of another type
        array = array_at(batch, path, where)
        with arrow_errors(f"{where}, column {name!r}"):
            made[name], valid = shaped(
                array, field, shapes[name], where=where, column=name, first_row=first_row, nulls=nulls
            )
        if nulls == "mask":
            made[name + VALID] = ColumnBuffer(np.ones(len(array), np.bool_) if valid is None else valid)
    rest = {name: field for name, field in fields.items() if name not in made}
    made |= stored_of(batch, rest, where=where, first_row=first_row, nulls=nulls)
    return {name: made[name] for name in fields}
