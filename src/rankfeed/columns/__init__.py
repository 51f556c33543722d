"""What a batch is made of: dense, ragged and bytes columns, and buffers that are used again."""

from rankfeed.columns.arrays import as_array, copied
from rankfeed.columns.buffers import BufferPool, keep_heap
from rankfeed.columns.column import Allocate, Bytes, Column, Dense, Objects, Ragged
from rankfeed.columns.columns import Columns, column_of
from rankfeed.columns.field import Field, Kind
from rankfeed.columns.layout import Branch, Layout, Leaf, Mismatch
from rankfeed.columns.parts import Rows, Runs
from rankfeed.columns.stored import Stored, Unreadable, column_of_parts

__all__ = [
    "Allocate",
    "Branch",
    "BufferPool",
    "Bytes",
    "Column",
    "Columns",
    "Dense",
    "Field",
    "Kind",
    "Layout",
    "Leaf",
    "Mismatch",
    "Objects",
    "Ragged",
    "Rows",
    "Runs",
    "Stored",
    "Unreadable",
    "as_array",
    "column_of",
    "column_of_parts",
    "copied",
    "keep_heap",
]
