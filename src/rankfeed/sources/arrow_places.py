"""Where the rows of an Arrow column lie in a file, worked out for many record batches at once.

Numbers, fixed-size lists of numbers, lists of these, text and bytes are found by arithmetic on the places of their
buffers; everything else (bits, dictionaries, lists of text...) is left to Arrow to decode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes as BytesColumn
from rankfeed.columns import Column, Field, Ragged, Runs
from rankfeed.errors import CorruptError
from rankfeed.sources.arrow_messages import REMEDY, Messages
from rankfeed.sources.arrow_types import field_of
from rankfeed.sources.placed import Placed, Places, compacted, rows_at, words

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
Where = Callable[[int], str]
#: Of arrays stored as lists of lists: how long the lists of each level are; None for any length.
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Leaf:
    """Where a column lies in each record batch.

    Args:
        field: what it holds.
        nodes: which nodes may have nulls: its own, those of the structs around it and of the elements in it.
        offsets: for each level of lists (text and bytes are one), the buffer of its offsets, their width in bytes,
            and how long all lists of this level are, where that was declared; none where all rows have one size.
        data: the buffer of the elements.
    """

    field: Field
    nodes: tuple[int, ...]
    offsets: tuple[tuple[int, int, int | None], ...]
    data: int


def leaves(schema: Any, shapes: Mapping[str, Shape]) -> dict[str, Leaf]:
    """The columns of a schema that need no decoding, named as `arrow_types.fields_of` names them.

    None at all where it has a type whose number of buffers varies.

    Args:
        schema: a `pyarrow.Schema`.
        shapes: columns of lists of lists that are arrays, and their shapes; None where a dimension varies.
    """
    walk = _Walk(shapes)
    for field in schema:
        walk.field(field.name, field.type, ())
    return walk.found if walk.countable else {}


class _Walk:
    """Goes through a schema depth first, as its nodes and buffers are numbered."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self.found: dict[str, Leaf] = {}
        self.countable = True
        self._nodes = 0
        self._buffers = 0

    def field(self, name: str, kind: Any, around: tuple[int, ...]) -> None:
        import pyarrow as pa

        if pa.types.is_struct(kind) and kind.num_fields:
            around = (*around, self._node(1))
            for index in range(kind.num_fields):
                inner = kind.field(index)
                self.field(f"{name}.{inner.name}", inner.type, around)
            return
        first, buffer = self._nodes, self._buffers
        self._skip(kind)
        nodes = (*around, *range(first, self._nodes))
        leaf = _leaf(kind, nodes, buffer, self._shapes.get(name))
        if leaf is not None:
            self.found[name] = leaf

    def _node(self, buffers: int) -> int:
        self._nodes += 1
        self._buffers += buffers
        return self._nodes - 1

    def _skip(self, kind: Any) -> None:
        """Count the nodes and buffers of a type."""
        import pyarrow as pa

        types = pa.types
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        if types.is_union(kind) or types.is_string_view(kind) or types.is_binary_view(kind):
            self.countable = False
        elif types.is_run_end_encoded(kind):
            self._node(0)
            self._skip(kind.run_end_type)
            self._skip(kind.value_type)
        elif types.is_null(kind):
            self._node(0)
        elif types.is_dictionary(kind):
            self._node(2)
        elif types.is_list_view(kind) or types.is_large_list_view(kind):
            self._node(3)
            self._skip(kind.value_type)
        elif kind.num_fields:
            has_offsets = types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind)
            self._node(2 if has_offsets else 1)
            for index in range(kind.num_fields):
                self._skip(kind.field(index).type)
        else:
            variable = types.is_string(kind) or types.is_binary(kind)
            variable |= types.is_large_string(kind) or types.is_large_binary(kind)
            self._node(3 if variable else 2)


def _leaf(kind: Any, nodes: tuple[int, ...], buffer: int, shape: Shape | None) -> Leaf | None:
    import pyarrow as pa

    types = pa.types
    field = field_of(kind) if shape is None else shaped_field(kind, shape)
    kind = stored_type(kind)
    if field.kind in ("bytes", "str"):
        width = {True: 8, False: 4}[types.is_large_string(kind) or types.is_large_binary(kind)]
        known = types.is_string(kind) or types.is_binary(kind) or width == 8
        return Leaf(field, nodes, ((buffer + 1, width, None),), buffer + 2) if known else None
    offsets: tuple[tuple[int, int, int | None], ...] = ()
    for length in shape or (None,):
        if types.is_list(kind) or types.is_large_list(kind):
            offsets = (*offsets, (buffer + 1, 8 if types.is_large_list(kind) else 4, length))
            kind, buffer = kind.value_type, buffer + 2
    while types.is_fixed_size_list(kind):
        kind, buffer = kind.value_type, buffer + 1
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
    same = number and field.kind in ("dense", "ragged") and kind.bit_width == 8 * np.dtype(field.dtype).itemsize
    return Leaf(field, nodes, offsets, buffer + 1) if same else None


def stored_type(kind: Any) -> Any:
    """What a type is stored as."""
    import pyarrow as pa

    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def shaped_field(kind: Any, shape: Shape) -> Field:
    """What a column of lists of lists is whose arrays have a shape, but perhaps for the first dimension.

    Args:
        kind: a `pyarrow.DataType`.
        shape: of its rows.

    Raises:
        ValueError: it has fewer dimensions.
    """
    kind = whole = stored_type(kind)
    for _ in shape:
        if not hasattr(kind, "value_type"):
            raise ValueError(f"arrays of {len(shape)} dimensions are stored as {whole}")
        kind = kind.value_type
    element = field_of(kind)
    if element.kind != "dense" or None in shape[1:]:
        return Field("object")
    inner = tuple(length for length in shape if length is not None)
    return Field("ragged" if shape[0] is None else "dense", element.dtype, (*inner, *element.shape))


def problem(leaf: Leaf, messages: Messages) -> str | None:
    """Why a column's buffers cannot hold its rows; None if they can.

    Rows of one size are known to lie in their buffers after that; lists are looked at when they are read.
    """
    buffers, rows = messages.buffers, messages.rows
    assert buffers is not None
    if max(leaf.data, *(number for number, _, _ in leaf.offsets), 0) >= buffers.shape[1]:
        return "there are fewer buffers than the columns need"
    if leaf.offsets:
        number, width, _ = leaf.offsets[0]
        short = (rows > 0) & (buffers[:, number, 1] // width <= rows)
    else:
        short = buffers[:, leaf.data, 1] // max(1, leaf.field.row_bytes()) < rows
        short &= leaf.field.row_bytes() > 0
    return f"record batch {int(np.argmax(short))} has too short a buffer" if short.any() else None


def part_of(
    leaf: Leaf, data: Bytes, messages: Messages, batch: Int64, row: Int64, slots: Int64 | None, where: Where
) -> Places | Runs:
    """Some rows of a column, as a part of a batch's.

    Args:
        leaf: the column, which :func:`fits`.
        data: uint8, the file.
        messages: of the file.
        batch: int64 [m], the record batch of each row.
        row: int64 [m], its number in there.
        slots: int64 [m], its row of the batch that is made; None for all, in order.
        where: names a row.

    Raises:
        CorruptError: a row does not lie in its buffer.
    """
    buffers = messages.buffers
    assert buffers is not None
    begin = buffers[batch, leaf.data, 0]
    if not leaf.offsets:
        return Places(data, begin + row * leaf.field.row_bytes(), slots)
    element = 1 if leaf.field.kind in ("bytes", "str") else np.dtype(leaf.field.dtype).itemsize
    inner = _fixed_elements(leaf)
    first, last = row, row + 1
    for level, (number, width, length) in enumerate(leaf.offsets):
        # What the numbers of this level count: lists of the next, or elements.
        below = leaf.offsets[level + 1][:2] if level + 1 < len(leaf.offsets) else (leaf.data, element * inner)
        top = np.maximum(0, buffers[batch, below[0], 1] // max(1, below[1]) - (level + 1 < len(leaf.offsets)))
        base = buffers[batch, number, 0]
        if level and length is not None:
            _check_even(data, base, width, first, last, length, where)
        first, last = _ends(data, base, width, first, last)
        bad = (first < 0) | (first > last) | (last > top)
        if level == 0 and length is not None:
            bad |= last - first != length
        if bad.any():
            which = int(np.argmax(bad))
            raise CorruptError(
                "the offsets of a column are damaged",
                expected=f"rising numbers from 0 to {top[which]}" + (f", {length} apart" if length else ""),
                found=f"{first[which]} to {last[which]}",
                where=where(which),
                remedy=REMEDY,
            )
    starts, nbytes = begin + first * element * inner, (last - first) * element * inner
    return (
        Places(data, starts, slots)
        if leaf.field.kind == "dense"
        else _runs(leaf, data, starts, nbytes, slots, where)
    )


def _fixed_elements(leaf: Leaf) -> int:
    """Elements in each of what the innermost offsets count: several where that are fixed-size lists."""
    if leaf.field.kind not in ("dense", "ragged"):
        return 1
    lists = len(leaf.offsets) - (leaf.field.kind == "ragged")
    return int(np.prod(leaf.field.shape[lists:], dtype=np.int64))


def _ends(data: Bytes, base: Int64, width: int, first: Int64, last: Int64) -> tuple[Int64, Int64]:
    """Offsets ``first`` and ``last`` of buffers at ``base``; 0 for rows without lists: there may be none."""
    empty = first == last
    if not empty.any() and not (base % width).any() and data.ctypes.data % width == 0:
        offsets, at = words(data, width).view(f"<i{width}"), base // width
        starts, stops = (offsets.take(at + each, mode="clip").astype(np.int64) for each in (first, last))
        return starts, stops
    pair = np.stack([np.where(empty, 0, base + first * width), np.where(empty, 0, base + last * width)], 1)
    ends = rows_at(data, pair.reshape(-1), width, width).view(f"<i{width}").reshape(-1, 2).astype(np.int64)
    ends[empty] = 0
    return ends[:, 0], ends[:, 1]


def _check_even(
    data: Bytes, base: Int64, width: int, first: Int64, last: Int64, length: int, where: Where
) -> None:
    """Look whether all lists from ``first`` to ``last`` are of one length.

    Raises:
        CorruptError: one is not.
    """
    counts = np.where(first == last, 0, last - first + 1)
    packed, targets = compacted(data, base + first * width, counts * width)
    offsets = packed.view(f"<i{width}").astype(np.int64)
    steps = np.append(np.diff(offsets), length)
    ends = (targets // width + counts - 1)[counts > 0]
    steps[ends] = length  # from one row's last offset to the next row's first
    if (steps != length).any():
        wrong = int(np.argmax(steps != length))
        which = int(np.searchsorted(targets // width, wrong, side="right")) - 1
        raise CorruptError(
            "an array has another shape than its column",
            expected=f"lists of {length}",
            found=f"one of {steps[wrong]}",
            where=where(which),
            remedy=REMEDY,
        )


def _runs(leaf: Leaf, data: Bytes, starts: Int64, nbytes: Int64, slots: Int64 | None, where: Where) -> Runs:
    """Runs of elements: as they lie where they are aligned to their own size, else copied."""
    if leaf.field.kind != "ragged":
        return Runs(data, starts, nbytes, slots, place=where)
    dtype, shape = np.dtype(leaf.field.dtype).newbyteorder("<"), leaf.field.shape
    if not shape and not (starts % dtype.itemsize).any():
        return Runs(
            words(data, dtype.itemsize).view(dtype), starts // dtype.itemsize, nbytes // dtype.itemsize, slots
        )
    packed, targets = compacted(data, starts, nbytes)
    size = max(1, leaf.field.row_bytes())
    return Runs(packed.view(dtype).reshape(-1, *shape), targets // size, nbytes // size, slots)


def column_of(field: Field, parts: Sequence[Any]) -> Column:
    """The column of a batch whose rows lie in these parts."""
    if field.kind == "dense":
        return Placed(parts, np.dtype(field.dtype), field.shape)
    return Ragged(parts) if field.kind == "ragged" else BytesColumn(parts, text=field.kind == "str")


def without_nulls(found: Mapping[str, Leaf], messages: Messages) -> dict[str, Leaf]:
    """Those columns in which a file has no null; none where it is compressed, or of another byte order."""
    nulls = messages.nulls
    if nulls is None or messages.buffers is None or messages.compressed.any() or not messages.little:
        return {}
    has: npt.NDArray[np.bool_] = np.asarray((nulls > 0).any(0))
    return {
        name: leaf
        for name, leaf in found.items()
        if max(leaf.nodes) < len(has) and not has[list(leaf.nodes)].any()
    }
