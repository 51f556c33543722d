"""One Arrow IPC file or stream: its record batches, and the columns that are read in place.

pyarrow reads the metadata; the content of record batches is not accessed when a file is opened, unless it is
compressed and has gaps between its messages: then one record batch is decoded to find out.

Numbers, text, bytes, and (nested) lists of numbers, without nulls, are read in place. pyarrow needs several
microseconds to create a record batch. So the buffer addresses of all record batches are taken once into arrays,
and the rows of a batch are found by arithmetic on them. The offsets of lists and text are checked when they are
used: damaged ones must not lead out of their buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rankfeed.columns.field import Field
from rankfeed.columns.pointers import Array, Memory, Place, RowPointers
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.arrow_columns import shape_error
from rankfeed.sources.arrow.types import (
    ArrayShape,
    field_of,
    leaves_of,
    roots_of,
    shaped_field,
    storage_type,
    tensor_axes,
    type_name,
)
from rankfeed.sources.source import BLOCK_BYTES, Int64, even_blocks, starts_of
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import arrow_errors
from rankfeed.storage.mapped import Bytes, map_file

MAGIC = b"ARROW1"
#: Limit of the rows that a file may claim: columns of nulls take no space.
_MAX_ROWS = 1 << 48
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


class _Ipc:
    """The schema and record batches of a file, or of a stream, whose messages are scanned once."""

    def __init__(self, data: Bytes, where: str, *, unended: bool) -> None:
        self._data, self._buffer = data, pa.py_buffer(data)
        self.is_file = data[: len(MAGIC)].tobytes() == MAGIC
        messages: list[_Message] = []
        if self.is_file:
            self._reader = pa.ipc.open_file(self._buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
            with suppress(pa.ArrowException, OSError, ValueError):  # polars leaves gaps between the messages
                messages += _scan(data, 8, self._reader.num_record_batches)
        else:
            messages += _scan(data, 0)
        self.rows = [message.rows for message in messages if message.rows is not None]
        self.is_compressed = any(message.is_compressed for message in messages)
        if self.is_file:
            self.schema, count = self._reader.schema, self._reader.num_record_batches
            if len(self.rows) != count:
                self.rows = [self._reader.get_batch(index).num_rows for index in range(count)]
            return
        self._batches = [message for message in messages if message.rows is not None]
        self._others = [message for message in messages if message.rows is None]  # schema and dictionaries
        end = messages[-1].end if messages else 0
        tail = data[end : end + 8].tobytes()
        if not unended and tail[:4] != bytes(4) and tail != _END_OF_STREAM:
            raise CorruptError(
                "a stream of Arrow data has no end marker",
                expected="the end-of-stream marker (four bytes 0xFF, four 0)",
                found=f"the end of the file at byte {len(data)}",
                where=f"{where}, after {len(self.rows)} record batches",
                remedy="the file was truncated or is unfinished: write it again, or pass unended=True to read it",
            )
        content = data[: messages[0].end].tobytes() if messages else b""
        self.schema = pa.ipc.open_stream(content + _END_OF_STREAM).schema

    def batches(self) -> Iterator[Any]:
        """All record batches, in order."""
        if self.is_file:
            return (self._reader.get_batch(index) for index in range(len(self.rows)))
        stream = pa.ipc.open_stream(self._buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
        return (stream.read_next_batch() for _ in self.rows)

    def read(self, index: int, columns: Sequence[int], *, is_compressed: bool) -> Any:
        """A record batch; other columns than the given ones are not decoded."""
        if self.is_file and not is_compressed:
            return self._reader.get_batch(index)
        options = pa.ipc.IpcReadOptions(included_fields=list(columns), use_threads=False)
        if self.is_file:
            return pa.ipc.open_file(self._buffer, options=options).get_batch(index)
        batch = self._batches[index]
        # A record batch needs the schema and all dictionaries before it: later ones may extend earlier ones.
        messages = [*(message for message in self._others if message.start < batch.start), batch]
        pieces = _Pieces([self._data[message.start : message.end].data for message in messages])
        return pa.ipc.open_stream(pieces, options=options).read_next_batch()


class _Message(NamedTuple):
    """A message of a stream: its bytes in the file, and the rows if it is a record batch."""

    start: int
    end: int
    rows: int | None
    is_compressed: bool  # it, or a record batch before it; found at the first one with rows


def _scan(data: Bytes, start: int, max_batches: int = _MAX_ROWS) -> Iterator[_Message]:
    """The messages of a stream that begins at a byte of the file."""
    view = data.data
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(pa.py_buffer(data[start:])))
    no_columns = pa.schema([])
    is_compressed: bool | None = None
    while max_batches:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        prefix = 8 if view[start : start + 4] == _CONTINUATION else 4  # since Arrow 0.15, or before
        end = start + prefix + message.metadata.size + (0 if message.body is None else message.body.size)
        is_batch = message.type == "record batch"
        # Without decoding it.
        rows = pa.ipc.read_record_batch(message, no_columns).num_rows if is_batch else None
        if rows and is_compressed is None:
            is_compressed = _has_compression(message.metadata.to_pybytes())
        yield _Message(start, end, rows, bool(is_compressed))
        start = end
        max_batches -= is_batch


def _has_compression(metadata: bytes) -> bool:
    """Whether the metadata of a record batch have the field ``compression``.

    pyarrow shows it only by decoding the record batch, which may take any amount of memory. The metadata are a
    FlatBuffers table "Message", whose field 2 is a table "RecordBatch", whose field 3 it is.
    """

    def integer(offset: int, size: int) -> int:
        return int.from_bytes(metadata[offset : offset + size], "little", signed=size == 4)

    def offset_of(table: int, field: int) -> int:
        vtable = table - integer(table, 4)
        slot = 4 + 2 * field
        offset = integer(vtable + slot, 2) if slot < integer(vtable, 2) else 0
        return table + offset if offset else 0

    batch = offset_of(integer(0, 4), 2)
    return offset_of(batch + integer(batch, 4), 3) > 0


class _Pieces:
    """Separate messages as a stream that pyarrow reads without copying them."""

    closed = False

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces

    def read(self, size: int) -> memoryview:
        while len(self._pieces) > 1 and not len(self._pieces[0]):
            del self._pieces[0]
        piece, self._pieces[0] = self._pieces[0][:size], self._pieces[0][size:]
        return piece  # never more than one message: reads beyond it mean that it is damaged


class ArrowFile:
    """An open, mapped file; a CorruptError if it is damaged."""

    def __init__(self, data: Bytes, path: str, shapes: Mapping[str, ArrayShape], *, unended: bool = False) -> None:
        self.path = path
        self.data = data
        with arrow_errors(path):
            self._ipc = _Ipc(self.data, path, unended=unended)
            self.schema, rows = self._ipc.schema, self._ipc.rows
            if min(rows, default=0) < 0 or sum(rows) > _MAX_ROWS:
                raise CorruptError("an Arrow file is damaged", found=f"{sum(rows)} rows")
            # The columns that are read in place; whether others are decoded into memory as whole record batches:
            # they are compressed, or of the other byte order.
            self.plain, self.is_compressed = _find_plain(self._ipc, self.data, shapes, path)
            # Names inside of types may be invalid text, which raises here.
            types = [(field.name, type_name(field.type)) for field in self.schema]
        self.starts = starts_of(rows)  # int64 [batches + 1], the first row of each record batch
        self.digest = digest_of(repr((len(self.data), types)).encode(), self.starts.tobytes())

    def read(self, index: int, names: Sequence[str], first: int, rows: int) -> Any:
        """Rows of a record batch, with the top-level columns that contain some fields."""
        roots = roots_of(self.schema, names)
        columns = [column for column, name in enumerate(self.schema.names) if name in roots]
        batch = self._ipc.read(index, columns, is_compressed=self.is_compressed).select(roots)
        if batch.num_rows != self.starts[index + 1] - self.starts[index]:
            raise CorruptError("a record batch has another length than its metadata", found=batch.num_rows)
        batch = batch.slice(first, rows)
        batch.validate(full=True)  # offsets, indices and text: pyarrow itself does not check them
        return batch

    def decoded_row_bytes(self) -> int:
        """Decoded bytes of a row, of the first record batch that has rows."""
        first = int(np.flatnonzero(np.diff(self.starts))[0])
        with arrow_errors(self.path):
            batch = self._ipc.read(first, range(len(self.schema)), is_compressed=self.is_compressed)
            return int(-(-batch.nbytes // batch.num_rows))

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Rows that are decoded together: record batch, first row and number of rows."""
        step = _MAX_ROWS if self.is_compressed else self._block_rows
        for batch, rows in enumerate(np.diff(self.starts).tolist()):
            yield from ((batch, first, min(step, rows - first)) for first in range(0, rows, step))

    def blocks(self) -> Int64:
        """Rows of each block: of a compressed record batch, or of about 4 MiB."""
        rows = np.diff(self.starts)
        return rows[rows > 0] if self.is_compressed else even_blocks(int(self.starts[-1]), self._block_rows)

    @property
    def _block_rows(self) -> int:
        return max(1, BLOCK_BYTES * int(self.starts[-1]) // len(self.data))


def read_schema(path: str) -> Any:
    """The `pyarrow.Schema` of a file."""
    data = map_file(path)
    with arrow_errors(path):
        return _Ipc(data, path, unended=True).schema


@dataclass(frozen=True)
class PlainLayout:
    """The buffers of a column that can be read in place, numbered as ``Array.buffers()`` lists them."""

    field: Field
    validity: tuple[int, ...]  # all must be absent
    #: For each level of lists (text and bytes have one): its offsets, their width in bytes, and the length that
    #: its lists are declared to have; empty if all rows have one size.
    offsets: tuple[tuple[int, int, int | None], ...]
    data: int  # the elements

    def problem(self, rows: Int64, sizes: Int64) -> str | None:
        """Why buffers of these sizes, int64 [batches, buffers], cannot hold the rows of a record batch."""
        row_bytes = self.field.row_bytes()
        if self.offsets:
            short = (rows > 0) & (sizes[:, 0] // self.offsets[0][1] <= rows)
        else:
            short = (sizes[:, -1] // max(1, row_bytes) < rows) & (row_bytes > 0)
        return f"record batch {int(np.argmax(short))} has a buffer that is too short" if short.any() else None


def _plain_layout(kind: Any, shape: ArrayShape | None) -> PlainLayout | None:
    """The layout of a column of an Arrow type; None if it cannot be read in place."""
    types = pa.types
    if _is_permuted(kind):
        return None
    field = field_of(kind) if shape is None else shaped_field(kind, shape)
    kind = storage_type(kind)
    if field.kind in ("bytes", "str"):
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        if not (wide or types.is_string(kind) or types.is_binary(kind)):
            return None
        return PlainLayout(field, (0,), ((1, 8 if wide else 4, None),), 2)
    validity: list[int] = []
    offsets: list[tuple[int, int, int | None]] = []
    buffer = 0
    for length in shape or (None,):
        if types.is_list(kind) or types.is_large_list(kind):
            validity.append(buffer)
            offsets.append((buffer + 1, 8 if types.is_large_list(kind) else 4, length))
            kind, buffer = storage_type(kind.value_type), buffer + 2
    while types.is_fixed_size_list(kind):
        validity.append(buffer)
        kind, buffer = storage_type(kind.value_type), buffer + 1
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
    same = is_number and field.kind in ("dense", "ragged") and kind.bit_width == 8 * np.dtype(field.dtype).itemsize
    # No buffer tells the number of elements without bytes.
    is_countable = not offsets or field.row_bytes() > 0
    if not (same and is_countable):
        return None
    return PlainLayout(field, (*validity, buffer), tuple(offsets), buffer + 1)


def _is_permuted(kind: Any) -> bool:
    """Whether the axes of a tensor, or of tensors in lists, are stored in another order than the logical one."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tensor_axes(kind) != sorted(tensor_axes(kind)) or _is_permuted(kind.value_type)
    return hasattr(kind, "value_type") and _is_permuted(kind.value_type)


class PlainColumn:
    """The rows of a column that is read in place, in one file."""

    def __init__(self, layout: PlainLayout, data: Bytes, buffers: Int64) -> None:
        # int64 [batches, buffers, 2]: start in the file and size of the buffers of offsets, then of the data.
        field = layout.field
        self._memory = Memory(data)
        self._begin = buffers[:, -1, 0].copy()
        #: Bytes of an element, and those that an innermost offset counts (of a row, without offsets).
        self._width = self._step = field.row_bytes()
        if layout.offsets and field.kind in ("dense", "ragged"):
            lists = len(layout.offsets) - (field.kind == "ragged")
            # Several elements for fixed-size lists.
            self._step = Field("dense", field.dtype, field.shape[lists:]).row_bytes()
        # An offset counts elements, or lists, which have one offset more.
        units = [*((width, 1) for _, width, _ in layout.offsets[1:]), (self._step, 0)]
        #: By level of lists: int64 [batches], number of the first offset in the words; the file as words of the
        #: width of the offsets; int64 [batches], limit of the offsets; the length of all lists, if it is fixed.
        self._levels: list[tuple[Int64, Array, Int64, int | None]] = []
        for level, ((_, width, length), (size, more)) in enumerate(zip(layout.offsets, units, strict=False)):
            top = np.maximum(0, buffers[:, level + 1, 1] // max(1, size) - more)
            words = data[: len(data) // width * width].view(f"<i{width}")
            self._levels.append((buffers[:, level, 0] // width, words, top, length))

    def pointers(self, batch: Int64, row: Int64, where: Place) -> RowPointers:
        """Some rows by record batch and number in it; ``where`` names a row in errors."""
        begin = self._begin.take(batch)
        if not self._levels:
            starts, nbytes = begin + row * self._step, np.full_like(row, self._step)
            return RowPointers.into_bytes(self._memory, starts, nbytes, self._width, where)
        first, last = row, row + 1
        for depth, (bases, words, limits, length) in enumerate(self._levels):
            base, top = bases.take(batch), limits.take(batch)
            if depth and length is not None:
                _check_lengths(words, base, first, last, length, where)
            empty = first == last if depth else None
            first, last = (words.take(base + at, mode="clip").astype(np.int64) for at in (first, last))
            if empty is not None and empty.any():  # rows without lists, whose offsets may not exist
                first[empty] = last[empty] = 0
            # Compared, not subtracted: the difference of two 64-bit numbers may overflow.
            bad = (first < 0) | (last < first) | (last > top)
            if depth == 0 and length is not None:
                bad |= last - first != length
            if bad.any():
                which = int(np.argmax(bad))
                raise CorruptError(
                    "the offsets of a column are damaged",
                    expected=f"ascending numbers from 0 to {top[which]}" + (f", {length} apart" if length else ""),
                    found=f"{first[which]} to {last[which]}",
                    where=where(which),
                )
        starts, nbytes = begin + first * self._step, (last - first) * self._step
        return RowPointers.into_bytes(self._memory, starts, nbytes, self._width, where)


def _check_lengths(offsets: Array, base: Int64, first: Int64, last: Int64, length: int, where: Place) -> None:
    """Check that all lists from ``first`` to ``last`` have one length; a CorruptError if one has another."""
    starts = starts_of(last - first)  # of the lists of each row
    indices = np.arange(starts[-1]) + np.repeat(base + first - starts[:-1], last - first)
    begins, ends = offsets.take(indices, mode="clip"), offsets.take(indices + 1, mode="clip")
    wrong = np.flatnonzero(ends != begins + length)
    if len(wrong):
        row = int(starts.searchsorted(wrong[0], side="right")) - 1
        raise shape_error(length, int(ends[wrong[0]]) - int(begins[wrong[0]]), where(row))


def _find_plain(
    ipc: _Ipc, data: Bytes, shapes: Mapping[str, ArrayShape], path: str
) -> tuple[dict[str, PlainColumn], bool]:
    """The columns that are read in place, and whether record batches are decoded into memory."""
    if ipc.is_compressed:
        return {}, True
    names = ipc.schema.names
    columns = {
        name: (column, layout)
        for name, column, kind in leaves_of(ipc.schema)
        if names.count(column[0]) == 1 and (layout := _plain_layout(kind, shapes.get(name))) is not None
    }
    #: Address and size of each buffer of each record batch.
    buffers: dict[str, list[int]] = {name: [] for name in columns}
    has_rows = False
    batches = ipc.batches()
    base = data.ctypes.data
    for index, count in enumerate(ipc.rows):
        with arrow_errors(f"{path}, record batch {index}"):
            batch = next(batches)
            if batch.num_rows != count:
                raise ValueError(f"{batch.num_rows} rows, but {count} in its metadata")
            if count and not has_rows:
                has_rows = True
                stored = [buffer for array in batch.columns for buffer in array.buffers() if buffer]
                if not all(base <= buffer.address <= base + len(data) - buffer.size for buffer in stored):
                    return {}, True  # decoded into memory
            for name in list(buffers):
                column, layout = columns[name]
                places = _column_buffers(batch, names.index(column[0]), column[1:], layout)
                if places is None:
                    del buffers[name]
                else:
                    buffers[name] += places
        if has_rows and not buffers:
            break
    if not has_rows:
        return {}, False
    plain = {}
    for name, places in buffers.items():
        layout = columns[name][1]
        table = np.array(places, np.int64).reshape(len(ipc.rows), -1, 2)
        starts, sizes = table[:, :, 0], table[:, :, 1]
        starts -= base
        starts[sizes == 0] = 0
        if (starts < 0).any() or (starts > len(data) - sizes).any():
            return {}, True  # not in the file
        if any((starts[:, level] % width).any() for level, (_, width, _) in enumerate(layout.offsets)):
            continue  # numpy cannot read these offsets as integers
        if (problem := layout.problem(np.array(ipc.rows, np.int64), sizes)) is not None:
            raise CorruptError("an Arrow file is damaged", found=problem, where=f"{path}, column {name!r}")
        plain[name] = PlainColumn(layout, data, table)
    return plain, False


def _column_buffers(batch: Any, index: int, inner: Sequence[int], layout: PlainLayout) -> list[int] | None:
    """Address and size of each buffer of a column, in structs by their numbers; None if the column has nulls."""
    array = batch.column(index)
    for field in inner:
        if array.buffers()[0] is not None:
            return None
        array = array.field(field)
        if len(array) != batch.num_rows:
            raise ValueError(f"a field has {len(array)} rows, its struct {batch.num_rows}")
    buffers = array.buffers()
    if any(buffers[position] is not None for position in layout.validity):
        return None
    places: list[int] = []
    for position in (*(buffer for buffer, _, _ in layout.offsets), layout.data):
        buffer = buffers[position]
        places += (0, 0) if buffer is None else (buffer.address, buffer.size)
    return places
