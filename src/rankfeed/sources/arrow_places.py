"""Which Arrow columns need no decoding, and in which of a record batch's buffers each lies.

Numbers, fixed-size lists of numbers, lists of these, text and bytes are read by arithmetic on the places of their
buffers (`arrow_rows`); everything else (bits, dictionaries, lists of text...) is left to Arrow to decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankfeed.columns import Field
from rankfeed.sources.arrow_messages import Messages
from rankfeed.sources.arrow_types import field_of, tensor_axes

#: Of arrays stored as lists of lists: how long the lists of each level are; None for any length.
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Leaf:
    """Where a column lies in each record batch.

    Args:
        field: what it holds.
        nodes: which may have nulls: those of the structs around it, its own, and those of the elements in it.
        around: how many of these belong to structs around it.
        offsets: for each level of lists (text and bytes are one), the buffer of its offsets, their width in bytes,
            and how long all lists of this level are, where that was declared; none where all rows have one size.
        data: the buffer of the elements.
    """

    field: Field
    nodes: tuple[int, ...]
    around: int
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
        leaf = _leaf(kind, nodes, len(around), buffer, self._shapes.get(name))
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
        elif kind.num_fields or types.is_struct(kind):  # a struct may be without fields
            has_offsets = types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind)
            self._node(2 if has_offsets else 1)
            for index in range(kind.num_fields):
                self._skip(kind.field(index).type)
        else:
            variable = types.is_string(kind) or types.is_binary(kind)
            variable |= types.is_large_string(kind) or types.is_large_binary(kind)
            self._node(3 if variable else 2)


def _leaf(kind: Any, nodes: tuple[int, ...], around: int, buffer: int, shape: Shape | None) -> Leaf | None:
    import pyarrow as pa

    types = pa.types
    if _is_permuted(kind):
        return None
    field = field_of(kind) if shape is None else shaped_field(kind, shape)
    kind = stored_type(kind)
    if field.kind in ("bytes", "str"):
        width = {True: 8, False: 4}[types.is_large_string(kind) or types.is_large_binary(kind)]
        known = types.is_string(kind) or types.is_binary(kind) or width == 8
        return Leaf(field, nodes, around, ((buffer + 1, width, None),), buffer + 2) if known else None
    offsets: tuple[tuple[int, int, int | None], ...] = ()
    for length in shape or (None,):
        if types.is_list(kind) or types.is_large_list(kind):
            offsets = (*offsets, (buffer + 1, 8 if types.is_large_list(kind) else 4, length))
            kind, buffer = stored_type(kind.value_type), buffer + 2
    while types.is_fixed_size_list(kind):
        kind, buffer = stored_type(kind.value_type), buffer + 1
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
    same = number and field.kind in ("dense", "ragged") and kind.bit_width == 8 * np.dtype(field.dtype).itemsize
    # How many elements of no bytes there are, no buffer tells.
    counted = not offsets or field.row_bytes() > 0
    return Leaf(field, nodes, around, offsets, buffer + 1) if same and counted else None


def _is_permuted(kind: Any) -> bool:
    """Whether the axes of a tensor, or of one in lists, are stored in another order than its own."""
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType):
        return tensor_axes(kind) != sorted(tensor_axes(kind)) or _is_permuted(kind.value_type)
    return hasattr(kind, "value_type") and _is_permuted(kind.value_type)


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


def without_nulls(found: Mapping[str, Leaf], messages: Messages) -> dict[str, Leaf]:
    """Those columns in which a file has no null; none where it is compressed, or of another byte order."""
    nulls = messages.nulls
    if nulls is None or messages.buffers is None or messages.compressed.any() or not messages.little:
        return {}
    has = np.asarray((nulls > 0).any(0))
    return {
        name: leaf
        for name, leaf in found.items()
        if max(leaf.nodes) < len(has) and not has[list(leaf.nodes)].any()
    }
