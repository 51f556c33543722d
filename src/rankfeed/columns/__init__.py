"""What a batch is made of: dense, ragged and bytes columns, and buffers that are used again."""

from rankfeed.columns.buffers import BufferPool, keep_heap
from rankfeed.columns.column import Allocate, Bytes, Column, Dense, Objects, Ragged
from rankfeed.columns.columns import Columns, as_array, column_of
from rankfeed.columns.field import Field, Kind
from rankfeed.columns.parts import Rows, Runs
from rankfeed.columns.stored import Stored, Unreadable, column_of_parts

__all__ = [
    "Allocate",
    "BufferPool",
    "Bytes",
    "Column",
    "Columns",
    "Dense",
    "Field",
    "Kind",
    "Objects",
    "Ragged",
    "Rows",
    "Runs",
    "Stored",
    "Unreadable",
    "as_array",
    "column_of",
    "column_of_parts",
    "keep_heap",
]
