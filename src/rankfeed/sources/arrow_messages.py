"""The messages of an Arrow IPC file or stream: where each record batch lies, and where each buffer lies in it.

See https://arrow.apache.org/docs/format/Columnar.html. Only metadata are read, never a record batch's content, so
that a file of any size is known for the price of its messages' heads. Every place is checked against its size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow_flat import Table

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

MAGIC = b"ARROW1"
REMEDY = "fetch the file anew, or write it again"

#: Rows that a file may claim: columns of nulls take no space.
_MOST_ROWS = 1 << 48
_CONTINUES = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_BLOCK = np.dtype([("offset", "<i8"), ("head", "<i4"), ("pad", "<i4"), ("body", "<i8")])
_PAIR = np.dtype([("first", "<i8"), ("second", "<i8")])


@dataclass(frozen=True)
class Message:
    """A message: ``start`` to ``body`` is its head, ``body`` to ``end`` its content, in bytes of the file."""

    start: int
    body: int
    end: int


@dataclass(frozen=True)
class Dictionary:
    """Values that dictionary columns point to, in force for record batches from ``before`` on."""

    message: Message
    id: int
    delta: bool
    before: int


@dataclass(frozen=True)
class Messages:
    """What an Arrow file consists of.

    Args:
        schema: the message with the columns; None for a file, whose footer has them.
        little: whether numbers are little-endian.
        batches: int64 [batches, 3]: start, body and end of each record batch.
        rows: int64 [batches].
        compressed: bool [batches].
        nulls: int64 [batches, nodes]: nulls in each column and in each of its children, depth first.
        lengths: int64 [batches, nodes]: elements of each.
        buffers: int64 [batches, buffers, 2]: start in the file, and bytes; None where batches have not as many.
        dictionaries: in their order.
    """

    schema: Message | None
    little: bool
    batches: Int64
    rows: Int64
    compressed: npt.NDArray[np.bool_]
    nulls: Int64 | None
    lengths: Int64 | None
    buffers: Int64 | None
    dictionaries: list[Dictionary]


def read_messages(data: Bytes, where: str, *, unended: bool = False) -> Messages:
    """Find the messages of a file.

    Args:
        data: uint8, the whole file.
        where: its name, for errors.
        unended: whether a stream without the mark at its end is read for what is there.

    Raises:
        CorruptError: it is no Arrow file, or damaged; names the file and the record batch.
    """
    view = memoryview(data.data)
    is_file = bytes(view[: len(MAGIC)]) == MAGIC
    reader = _Reader(view)
    try:
        if is_file:
            _read_file(view, reader)
        else:
            _read_stream(view, reader)
        return reader.result()
    except _Unended as error:
        if unended:
            return reader.result()
        raise CorruptError(
            "a stream of Arrow data has no end",
            expected="the mark of its end (four bytes 0xFF, four 0)",
            found=f"the end of the file at byte {len(data)}",
            where=f"{where}, after {reader.seen} record batches",
            remedy="it was cut, or is not finished: write it again, or pass unended=True to read what is there",
        ) from error
    except (ValueError, struct.error, OverflowError) as error:
        place = f"{where}, after {reader.seen} record batches"
        raise CorruptError("an Arrow file is damaged", found=error, where=place, remedy=REMEDY) from error


class _Unended(Exception):
    """A stream that ends between two messages."""


def _read_stream(view: memoryview, reader: _Reader) -> None:
    place = 0
    while place < len(view):
        message = _message(view, place)
        if message is None:
            return
        reader.add(message)
        place = message.end
    raise _Unended


def _read_file(view: memoryview, reader: _Reader) -> None:
    """Only what the footer names counts: not all writers put the schema at the beginning too."""
    tail = len(MAGIC) + 4
    if len(view) < 8 + tail or bytes(view[-len(MAGIC) :]) != MAGIC:
        raise ValueError(f"no {MAGIC.decode()} at the end: the file was cut, or is not finished")
    size = int.from_bytes(view[-tail : -tail + 4], "little", signed=True)
    start = len(view) - tail - size
    if size < 4 or start < 8:
        raise ValueError(f"a footer of {size} bytes")
    footer = Table.root(view[start : start + size])
    schema = footer.table(1)
    if schema is None:
        raise ValueError("no schema")
    reader.add_schema(None, schema)
    for field, kind in ((2, _DICTIONARY), (3, _BATCH)):
        for block in footer.structs(field, _BLOCK):
            first, head, body = int(block["offset"]), int(block["head"]), int(block["body"])
            if first < 8 or head < 8 or body < 0 or first + head + body > start:
                raise ValueError(f"a block of {head} and {body} bytes at byte {first} of {start}")
            message = _message(view[:start], first)
            if message is None or message.body != first + head or message.end != first + head + body:
                raise ValueError(f"footer and message at byte {first} contradict each other")
            reader.add(message, kind)


def _message(view: memoryview, place: int) -> Message | None:
    """The message at a place; None where the stream ends there."""
    size, head = _u32(view, place), place + 4
    if size == _CONTINUES:  # since Arrow 0.15
        size, head = _u32(view, head), head + 4
    if size == 0:
        return None
    if size > len(view) - head:
        raise ValueError(f"{size} bytes of metadata at byte {head} of {len(view)}")
    body = Table.root(view[head : head + size]).number(3, "i64")
    if not 0 <= body <= len(view) - head - size:
        raise ValueError(f"a body of {body} bytes at byte {head + size} of {len(view)}")
    return Message(place, head + size, head + size + body)


def _u32(view: memoryview, place: int) -> int:
    if place + 4 > len(view):
        raise ValueError(f"the file ends at byte {len(view)}, within a message")
    return int.from_bytes(view[place : place + 4], "little")


class _Reader:
    """Collects what messages say."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._schema: Message | None = None
        self._little: bool | None = None
        self._batches: list[tuple[int, int, int]] = []
        self._rows: list[int] = []
        self._compressed: list[bool] = []
        self._nodes: list[npt.NDArray[Any]] = []
        self._buffers: list[npt.NDArray[Any]] = []
        self._dictionaries: list[Dictionary] = []

    @property
    def seen(self) -> int:
        """Record batches so far."""
        return len(self._rows)

    def add_schema(self, message: Message | None, content: Table) -> None:
        self._schema = message
        self._little = content.number(0, "i16") == 0

    def add(self, message: Message, expected: int | None = None) -> None:
        skip = 8 if _u32(self._view, message.start) == _CONTINUES else 4
        head = Table.root(self._view[message.start + skip : message.body])
        kind, content = head.number(1, "u8"), head.table(2)
        if (
            content is None
            or (expected is not None and kind != expected)
            or (self._little is None) != (kind == _SCHEMA)
        ):
            raise ValueError(f"a message of kind {kind}")
        if kind == _SCHEMA:
            self.add_schema(message, content)
        elif kind == _DICTIONARY:
            found = content.number(0, "i64"), bool(content.number(2, "u8"))
            self._dictionaries.append(Dictionary(message, *found, len(self._batches)))
        elif kind == _BATCH:
            self._add_batch(message, content)
        else:
            raise ValueError(f"a message of kind {kind}")

    def _add_batch(self, message: Message, content: Table) -> None:
        rows = content.number(0, "i64")
        size = message.end - message.body
        nodes, buffers = content.structs(1, _PAIR), content.structs(2, _PAIR)
        first, length = buffers["first"], buffers["second"]
        if rows < 0 or (len(nodes) and (int(nodes["first"].min()) < 0 or int(nodes["second"].min()) < 0)):
            raise ValueError(f"{rows} rows")
        # Each at most the body's size before they are added up: no overflow.
        if len(buffers) and not (
            min(int(first.min()), int(length.min())) >= 0
            and max(int(first.max()), int(length.max())) <= size
            and int((first + length).max()) <= size
        ):
            raise ValueError(f"a buffer outside the record batch's {size} bytes")
        self._batches.append((message.start, message.body, message.end))
        self._rows.append(rows)
        self._compressed.append(content.table(3) is not None)
        self._nodes.append(nodes)
        self._buffers.append(buffers)

    def result(self) -> Messages:
        if self._little is None:
            raise ValueError("no schema")
        if sum(self._rows) > _MOST_ROWS:
            raise ValueError(f"{sum(self._rows)} rows")
        count = len(self._batches)
        batches = np.array(self._batches, np.int64).reshape(count, 3)
        even = count > 0 and all(len({len(each) for each in of}) == 1 for of in (self._nodes, self._buffers))
        nodes = np.stack(self._nodes) if even else None
        buffers = None
        if even:
            pairs = np.stack(self._buffers)
            buffers = np.stack([pairs["first"] + batches[:, 1:2], pairs["second"]], axis=-1)
        return Messages(
            schema=self._schema,
            little=self._little,
            batches=batches,
            rows=np.array(self._rows, np.int64),
            compressed=np.array(self._compressed, np.bool_),
            nulls=None if nodes is None else nodes["second"].copy(),
            lengths=None if nodes is None else nodes["first"].copy(),
            buffers=buffers,
            dictionaries=self._dictionaries,
        )
