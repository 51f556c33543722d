"""Batch storage: dense, ragged, byte and object columns, sample layouts, and recycled buffers."""

from rankfeed.columns.buffers import BufferPool, retain_heap
from rankfeed.columns.columns import (
    Allocate,
    Bytes,
    Column,
    ColumnBuffer,
    Columns,
    Dense,
    Objects,
    Ragged,
    RowSlices,
    RowTake,
    Unreadable,
    column_from_parts,
    make_column,
)
from rankfeed.columns.field import Field, Kind
from rankfeed.columns.layout import Branch, Layout, Leaf, Mismatch, as_array, copy_sample

__all__ = [
    "Allocate",
    "Branch",
    "BufferPool",
    "Bytes",
    "Column",
    "ColumnBuffer",
    "Columns",
    "Dense",
    "Field",
    "Kind",
    "Layout",
    "Leaf",
    "Mismatch",
    "Objects",
    "Ragged",
    "RowSlices",
    "RowTake",
    "Unreadable",
    "as_array",
    "column_from_parts",
    "copy_sample",
    "make_column",
    "retain_heap",
]
