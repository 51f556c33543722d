"""An Arrow table in memory, or mapped by its owner, as a source."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankfeed.columns.columns import ColumnBuffer
from rankfeed.sources.arrow.columns import read_columns
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
        known = fields_of(table.schema, nulls=nulls, columns=columns, shapes=shapes)
        self.derived = masks_of(known, nulls)
        self.logical_types = logical_types_of(table.schema)
        fields = {name: known[name] for name in check_columns(columns, known, self.derived)}
        self._shapes = dict(shapes or {})
        self._nulls: Nulls = nulls
        columns = roots_of(table.schema, fields)
        self._batches = [each for each in table.select(columns).to_batches(max_chunksize=_CHUNK_ROWS) if len(each)]
        blocks = np.array([len(each) for each in self._batches], np.int64)
        self._init_samples(name, fields, blocks, digest_of(repr((fields, int(blocks.sum()))).encode()))
        self._init_chunks(blocks, cache_bytes)

    @property
    def identified(self) -> bool:
        """False: the fingerprint is of columns and number of rows, not of the content."""
        return False

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        batch = self._batches[number]
        fields, first_row = {name: self._fields[name] for name in names}, int(self._chunk_starts[number])
        with arrow_errors(self._label):
            batch.validate(full=True)
            found = read_columns(
                batch, fields, where=self._label, first_row=first_row, nulls=self._nulls, shapes=self._shapes
            )
        buffers = [each for column in batch.columns for each in column.buffers() if each is not None and each.size]
        own = [np.frombuffer(each, np.uint8) for each in buffers]
        return {
            name: replace(
                column, borrowed=any(np.may_share_memory(column.values, each) for each in own), extra_bytes=0
            )
            for name, column in found.items()
        }
