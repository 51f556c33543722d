"""The little of FlatBuffers that Arrow's messages need: tables, numbers and vectors of structs, all checked.

See https://flatbuffers.dev/internals. What is read is untrusted: no place outside the buffer is looked at.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
#: Formats of the numbers that occur.
_NUMBERS = {"i16": struct.Struct("<h"), "u8": struct.Struct("<B"), "i64": struct.Struct("<q")}


class Table:
    """A table: numbered fields, any of which may be left out.

    Args:
        data: the buffer.
        place: of the table in it.

    Raises:
        ValueError: it does not lie in the buffer; so do all methods.
    """

    __slots__ = ("_data", "_fields", "_place")

    def __init__(self, data: memoryview, place: int) -> None:
        self._data = data
        self._place = place
        vtable = place - _at(_I32, data, place)
        size = _at(_U16, data, vtable)
        if size < 4 or size % 2 or vtable + size > len(data):
            raise ValueError(f"a table without fields at byte {place}")
        self._fields = struct.unpack_from(f"<{size // 2 - 2}H", data, vtable + 4)

    @classmethod
    def root(cls, data: memoryview) -> Table:
        """The table that a buffer holds."""
        return cls(data, _at(_U32, data, 0))

    def number(self, field: int, kind: str) -> int:
        """A number; 0 where it is left out."""
        offset = self._offset(field)
        return _at(_NUMBERS[kind], self._data, self._place + offset) if offset else 0

    def table(self, field: int) -> Table | None:
        """A table; None where it is left out."""
        place = self._indirect(field)
        return None if place is None else Table(self._data, place)

    def structs(self, field: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A vector of structs; empty where it is left out."""
        place = self._indirect(field)
        if place is None:
            return np.empty(0, dtype)
        count = _at(_U32, self._data, place)
        if place + 4 + count * dtype.itemsize > len(self._data):
            raise ValueError(f"{count} structs at byte {place} of {len(self._data)}")
        return np.frombuffer(self._data, dtype, count, place + 4)

    def _offset(self, field: int) -> int:
        return self._fields[field] if field < len(self._fields) else 0

    def _indirect(self, field: int) -> int | None:
        offset = self._offset(field)
        if not offset:
            return None
        place = self._place + offset
        return place + _at(_U32, self._data, place)


def _at(kind: struct.Struct, data: memoryview, place: int) -> int:
    if not 0 <= place <= len(data) - kind.size:
        raise ValueError(f"byte {place} of {len(data)}")
    value: int = kind.unpack_from(data, place)[0]
    return value
