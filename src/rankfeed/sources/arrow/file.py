"""One Arrow IPC file or stream: its record batches, and the columns that are read in place.

pyarrow reads the metadata; the content of record batches is not accessed when a file is opened, unless it is
compressed: then one record batch is decoded to find out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow.errors import REMEDY, arrow_errors
from rankfeed.sources.arrow.plain import PlainColumn, PlainLayout, plain_layout
from rankfeed.sources.arrow.types import ArrayShape, Nulls, field_at, leaves_of, roots_of, storage_type
from rankfeed.storage import digest_of, map_file

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

MAGIC = b"ARROW1"
#: Approximate size of a block of an uncompressed file.
_BLOCK_BYTES = 4 << 20
#: Rows decoded at once if there are dictionaries, whose values may be much longer than their indices.
_DICTIONARY_ROWS = 1 << 16
#: Limit of the rows that a file may claim: columns of nulls take no space.
_MAX_ROWS = 1 << 48
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)


class _IpcFile:
    """The file format: record batches in any order."""

    def __init__(self, data: Bytes) -> None:
        import pyarrow as pa

        self._buffer = pa.py_buffer(data)
        self._reader = pa.ipc.open_file(self._buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
        self._data = data
        self.schema = self._reader.schema

    def batches(self) -> Iterator[Any]:
        """All record batches, in order."""
        return (self._reader.get_batch(number) for number in range(self._reader.num_record_batches))

    def count_rows(self) -> list[int]:
        """Rows of each record batch, without decoding it."""
        import pyarrow as pa

        try:
            # By the specification, the messages of a stream follow the magic.
            messages = list(_scan(self._data, 8, self._reader.num_record_batches))
        except (pa.ArrowException, OSError, ValueError):
            messages = []
        rows = [message.rows for message in messages if message.kind == "record batch"]
        if len(rows) == self._reader.num_record_batches:
            return rows
        return [batch.num_rows for batch in self.batches()]

    def read(self, number: int, columns: Sequence[int], *, is_compressed: bool) -> Any:
        """A record batch; if it is compressed, with these columns only."""
        import pyarrow as pa

        if not is_compressed:
            return self._reader.get_batch(number)
        options = pa.ipc.IpcReadOptions(included_fields=list(columns), use_threads=False)
        return pa.ipc.open_file(self._buffer, options=options).get_batch(number)


class _IpcStream:
    """The stream format: messages in sequence, which is scanned once."""

    def __init__(self, data: Bytes, where: str, *, unended: bool) -> None:
        import pyarrow as pa

        self._data = data
        messages = list(_scan(data, 0))
        end = messages[-1].end if messages else 0
        tail = data[end : end + 8].tobytes()
        self._batches = [message for message in messages if message.kind == "record batch"]
        if not unended and tail[:4] != bytes(4) and tail != _END_OF_STREAM:
            raise CorruptError(
                "a stream of Arrow data has no end",
                expected="the end-of-stream marker (four bytes 0xFF, four 0)",
                found=f"the end of the file at byte {len(data)}",
                where=f"{where}, after {len(self._batches)} record batches",
                remedy="the file was truncated or is unfinished: write it again, or pass unended=True to read it",
            )
        content = data[: messages[0].end].tobytes() if messages else b""
        self.schema = pa.ipc.open_stream(content + _END_OF_STREAM).schema
        # A batch needs the schema and all dictionaries before it: later ones may extend earlier ones.
        self._head = messages[:1]
        self._dictionaries = [message for message in messages if message.kind == "dictionary"]

    def batches(self) -> Iterator[Any]:
        """All record batches, in order."""
        import pyarrow as pa

        reader = pa.ipc.open_stream(pa.py_buffer(self._data), options=pa.ipc.IpcReadOptions(use_threads=False))
        return (reader.read_next_batch() for _ in self._batches)

    def count_rows(self) -> list[int]:
        """Rows of each record batch, without decoding it."""
        return [message.rows for message in self._batches]

    def read(self, number: int, columns: Sequence[int], *, is_compressed: bool) -> Any:
        """A record batch; if it is compressed or there are dictionaries, with these columns only."""
        import pyarrow as pa

        message = self._batches[number]
        if not is_compressed and not self._dictionaries:
            content = pa.ipc.read_message(pa.py_buffer(self._data[message.start : message.end]))
            return pa.ipc.read_record_batch(content, self.schema)
        needed = [*self._head, *(each for each in self._dictionaries if each.start < message.start), message]
        pieces = _Pieces([self._data[each.start : each.end].data for each in needed])
        options = pa.ipc.IpcReadOptions(included_fields=list(columns), use_threads=False)
        return pa.ipc.open_stream(pieces, options=options).read_next_batch()


@dataclass(frozen=True)
class _Message:
    """A message: its kind as pyarrow names it, its bytes in the file, and the rows of a record batch."""

    kind: str
    start: int
    end: int
    rows: int


def _scan(data: Bytes, start: int, max_batches: int = _MAX_ROWS) -> Iterator[_Message]:
    """The messages of a stream that begins at a byte of the file."""
    import pyarrow as pa

    view = data.data
    reader = pa.ipc.MessageReader.open_stream(pa.BufferReader(pa.py_buffer(data[start:])))
    no_columns = pa.schema([])
    while max_batches:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        kind, body = message.type, message.body
        prefix = 8 if view[start : start + 4] == _CONTINUATION else 4  # since Arrow 0.15, or before
        end = start + prefix + message.metadata.size + (0 if body is None else body.size)
        rows = 0
        if kind == "record batch":
            rows = pa.ipc.read_record_batch(message, no_columns).num_rows
            max_batches -= 1
        yield _Message(kind, start, end, rows)
        start = end


class _Pieces:
    """Separate messages as a stream that pyarrow reads without copying them."""

    closed = False

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces

    def read(self, size: int) -> memoryview:
        while len(self._pieces) > 1 and not len(self._pieces[0]):
            del self._pieces[0]
        found, self._pieces[0] = self._pieces[0][:size], self._pieces[0][size:]
        return found  # never more than one message: reads beyond it mean that it is damaged


@dataclass(frozen=True)
class ArrowFile:
    """An open file.

    Args:
        path: of the file.
        data: its bytes, mapped.
        schema: a `pyarrow.Schema`.
        starts: int64 [batches + 1], the first row of each record batch.
        plain: the columns that are read in place.
        is_compressed: whether record batches are decoded into memory: compressed, or of the other byte order.
        digest: changes with columns and the rows of record batches.
    """

    path: str
    data: Bytes
    schema: Any
    starts: Int64
    plain: Mapping[str, PlainColumn]
    is_compressed: bool
    digest: str
    _ipc: _IpcFile | _IpcStream

    def read(self, number: int, names: Sequence[str], nulls: Nulls, first: int, rows: int) -> Any:
        """Rows of a record batch, with the top-level columns that contain some fields.

        Raises:
            pyarrow.ArrowException, OSError: the record batch is damaged.
            CorruptError: the record batch has another number of rows than its metadata.
        """
        wanted = roots_of(self.schema, names, nulls=nulls)
        columns = [index for index, name in enumerate(self.schema.names) if name in wanted]
        batch = self._ipc.read(number, columns, is_compressed=self.is_compressed).select(wanted)
        if batch.num_rows != self.starts[number + 1] - self.starts[number]:
            raise CorruptError("a record batch has another length than its metadata", found=batch.num_rows)
        batch = batch.slice(first, rows)
        batch.validate(full=True)  # offsets, indices and text: pyarrow itself does not check them
        return batch

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """Rows that are decoded together: record batch, first row and number of rows."""
        has_dictionaries = any(_contains_dictionary(field.type) for field in self.schema)
        step = _DICTIONARY_ROWS if has_dictionaries and not self.is_compressed else _MAX_ROWS
        for batch, edges in self._edges():
            for low, high in pairwise(edges):
                yield from ((batch, first, min(step, high - first)) for first in range(low, high, step))

    def blocks(self) -> list[int]:
        """Rows of each block: of a compressed record batch, or of about 4 MiB."""
        blocks: list[int] = []
        limit = 0 if self.is_compressed else _BLOCK_BYTES / self._row_bytes
        filled = 0
        for _, edges in self._edges():
            rows = edges[-1]
            if blocks and filled + rows <= limit and len(edges) == 2:  # small record batches share a block
                blocks[-1] += rows
                filled += rows
            else:
                blocks += [high - low for low, high in pairwise(edges)]
                filled = rows
        return blocks

    @property
    def _row_bytes(self) -> float:
        return len(self.data) / max(1, int(self.starts[-1]))

    def _edges(self) -> Iterator[tuple[int, list[int]]]:
        """For each record batch with rows, the rows at which it is divided."""
        row_bytes = 0 if self.is_compressed else self._row_bytes
        for batch, rows in enumerate(np.diff(self.starts).tolist()):
            if rows:
                parts = min(rows, max(1, math.ceil(rows * row_bytes / _BLOCK_BYTES)))
                yield batch, [rows * part // parts for part in range(parts + 1)]


def open_arrow(path: str, shapes: Mapping[str, ArrayShape], *, unended: bool = False) -> ArrowFile:
    """Open a file.

    Raises:
        SourceError: the file cannot be read.
        CorruptError: the file is damaged.
    """
    data = map_file(path)
    with arrow_errors(path):
        ipc = _open_ipc(data, path, unended=unended)
        rows = ipc.count_rows()
        if min(rows, default=0) < 0 or sum(rows) > _MAX_ROWS:
            raise _damaged(f"{sum(rows)} rows", path)
        plain, is_compressed = _find_plain(ipc, data, rows, shapes, path)
        # Names inside of types may be invalid text, which raises here.
        types = [(field.name, _type_text(field.type)) for field in ipc.schema]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    digest = digest_of(repr((len(data), types)).encode(), starts.tobytes())
    return ArrowFile(path, data, ipc.schema, starts, plain, is_compressed, digest, ipc)


def read_schema(path: str) -> Any:
    """The `pyarrow.Schema` of a file."""
    data = map_file(path)
    with arrow_errors(path):
        return _open_ipc(data, path, unended=True).schema


def _open_ipc(data: Bytes, path: str, *, unended: bool) -> _IpcFile | _IpcStream:
    is_file = data[: len(MAGIC)].tobytes() == MAGIC
    return _IpcFile(data) if is_file else _IpcStream(data, path, unended=unended)


def _find_plain(
    ipc: _IpcFile | _IpcStream, data: Bytes, rows: list[int], shapes: Mapping[str, ArrayShape], path: str
) -> tuple[dict[str, PlainColumn], bool]:
    """The columns that are read in place, and whether record batches are decoded into memory."""
    names = ipc.schema.names
    columns = {
        name: _BufferTable(names.index(column[0]), column[1:], layout)
        for name, column in leaves_of(ipc.schema)
        if names.count(column[0]) == 1
        and (layout := plain_layout(field_at(ipc.schema, column).type, shapes.get(name))) is not None
    }
    first = next((number for number, count in enumerate(rows) if count), None)
    if first is None:
        return {}, False
    batches = ipc.batches()
    for number, count in enumerate(rows):
        with arrow_errors(f"{path}, record batch {number}"):
            batch = next(batches)
            if batch.num_rows != count:
                raise ValueError(f"{batch.num_rows} rows, but {count} in its metadata")
            if number == first and not _is_stored(batch, data):
                return {}, True
            columns = {name: table for name, table in columns.items() if table.add(batch)}
        if not columns and number >= first:
            break
    found = {}
    for name, table in columns.items():
        buffers = table.in_file(data, len(rows))
        if buffers is None:
            return {}, True
        if (problem := table.layout.problem(np.array(rows, np.int64), buffers[:, :, 1])) is not None:
            raise _damaged(problem, f"{path}, column {name!r}")
        found[name] = PlainColumn(table.layout, data, buffers)
    return found, False


class _BufferTable:
    """Addresses and sizes of the buffers of a column in all record batches.

    Args:
        index: of the top-level column.
        inner: field numbers in structs.
        layout: of the column.
    """

    def __init__(self, index: int, inner: Sequence[int], layout: PlainLayout) -> None:
        self.layout = layout
        self._index = index
        self._inner = inner
        self._numbers = layout.buffers
        self._values: list[int] = []

    def add(self, batch: Any) -> bool:
        """Add the buffers of a record batch; False if the column has nulls."""
        array = batch.column(self._index)
        for field in self._inner:
            if array.buffers()[0] is not None:
                return False
            array = array.field(field)
            if len(array) != batch.num_rows:
                raise ValueError(f"a field has {len(array)} rows, its struct {batch.num_rows}")
        buffers = array.buffers()
        for number in self.layout.validity:
            if buffers[number] is not None:
                return False
        for number in self._numbers:
            buffer = buffers[number]
            self._values += (0, 0) if buffer is None else (buffer.address, buffer.size)
        return True

    def in_file(self, data: Bytes, batches: int) -> Int64 | None:
        """int64 [batches, buffers, 2], start in the file and size; None if a buffer is not in the file."""
        buffers = np.array(self._values, np.int64).reshape(batches, -1, 2)
        starts, sizes = buffers[:, :, 0], buffers[:, :, 1]
        starts -= data.ctypes.data
        starts[sizes == 0] = 0
        is_inside = (starts >= 0) & (starts <= len(data) - sizes)
        return buffers if is_inside.all() else None


def _is_stored(batch: Any, data: Bytes) -> bool:
    """Whether the buffers of a record batch are parts of the file, and not decoded."""
    base = data.ctypes.data
    buffers = [
        buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size
    ]
    return all(base <= each.address <= base + len(data) - each.size for each in buffers)


def _damaged(found: str, where: str) -> CorruptError:
    return CorruptError("an Arrow file is damaged", found=found, where=where, remedy=REMEDY)


def _contains_dictionary(kind: Any) -> bool:
    import pyarrow as pa

    kind = storage_type(kind)
    return pa.types.is_dictionary(kind) or any(
        _contains_dictionary(kind.field(index).type) for index in range(kind.num_fields)
    )


def _type_text(kind: Any) -> str:
    """A type as text, independent of whether the library of an extension type is imported."""
    kind = storage_type(kind)
    inner = [kind.field(index) for index in range(kind.num_fields)]
    if not inner:
        return str(kind)
    fields = ", ".join(f"{field.name}: {_type_text(field.type)}" for field in inner)
    return f"{kind.id}{getattr(kind, 'list_size', '')}<{fields}>"


def check_same_schema(first: Any, other: Any, first_path: str, path: str) -> None:
    """Compare the schemas of two files.

    Raises:
        SourceError: they differ; names the column.
    """
    if not first.equals(other, check_metadata=False):
        differing = [
            name
            for name in dict.fromkeys([*first.names, *other.names])
            if [each for each in first if each.name == name] != [each for each in other if each.name == name]
        ]
        raise SourceError(
            "files differ in their columns",
            expected=f"{first_path}: " + ", ".join(f"{each.name!r}: {each.type}" for each in first)[:300],
            found=", ".join(f"{each.name!r}: {each.type}" for each in other)[:300],
            where=f"{path}, column {(differing or ['(their order)'])[0]!r}",
            remedy="write them with one schema, or open them one by one",
        )
