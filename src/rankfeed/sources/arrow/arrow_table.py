"""An Arrow table in memory, or mapped by its owner, as a source."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankfeed.columns.columns import ColumnBuffer
from rankfeed.sources.arrow.arrow_columns import read_columns
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.types import ArrayShape, Nulls, fields_of, logical_types_of, masks_of, roots_of
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.source import check_columns
from rankfeed.storage.checksum import digest_of

#: Maximum rows per chunk.
_CHUNK_ROWS = 1 << 16


class ArrowTableSource(ChunkedSource):
    """The rows of a `pyarrow.Table`; its record batches are blocks.

    It is pickled as a whole to worker processes; ``name`` is for errors. The options are those of `ArrowSource`;
    columns that are views of the table take no bytes of the cache.
    """

    def __init__(
        self,
        table: Any,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        shapes: Mapping[str, ArrayShape] | None = None,
        name: str = "a table",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        all_fields = fields_of(table.schema, nulls=nulls, columns=columns, shapes=shapes)
        self.derived = masks_of(all_fields, nulls)
        self.logical_types = logical_types_of(table.schema)
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields, self.derived)}
        self._shapes = dict(shapes or {})
        self._nulls: Nulls = nulls
        columns = roots_of(table.schema, fields)
        self._batches = [
            batch for batch in table.select(columns).to_batches(max_chunksize=_CHUNK_ROWS) if len(batch)
        ]
        blocks = np.array([len(batch) for batch in self._batches], np.int64)
        self._init_samples(name, fields, blocks, digest_of(repr((fields, int(blocks.sum()))).encode()))
        self._init_chunks(blocks, cache_bytes)

    @property
    def identified(self) -> bool:
        """False: the fingerprint is of columns and number of rows, not of the content."""
        return False

    def _load_chunk(self, index: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        batch = self._batches[index]
        fields, first_row = {name: self._fields[name] for name in names}, int(self._chunk_starts[index])
        with arrow_errors(self._label):
            columns = read_columns(
                batch, fields, where=self._label, first_row=first_row, nulls=self._nulls, shapes=self._shapes
            )
        buffers = [
            buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size
        ]
        own = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        return {
            name: replace(
                column, borrowed=any(np.may_share_memory(column.values, buffer) for buffer in own), extra_bytes=0
            )
            for name, column in columns.items()
        }
