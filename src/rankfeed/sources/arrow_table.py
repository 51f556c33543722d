"""An Arrow table that is in memory, or that somebody else has mapped, as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from rankfeed.columns import ColumnBuffer, Field
from rankfeed.errors import SourceError
from rankfeed.sources.arrow_columns import fields_of
from rankfeed.sources.arrow_decode import decoded
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.arrow_places import Shape, shaped_field
from rankfeed.sources.arrow_types import Nulls, field_at, leaves_of, roots_of
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.source import Int64, check_columns
from rankfeed.storage import digest_of

#: Rows that are looked at in one go.
_ROWS = 1 << 16


class ArrowTableSource(ChunkedSource):
    """The rows of a `pyarrow.Table`: its record batches are blocks.

    Args:
        table: it. It travels to worker processes whole.
        columns: names of those to offer; None for all.
        nulls: as for `ArrowSource`.
        shapes: as for `ArrowSource`.
        name: what errors call it.
        cache_bytes: of what was decoded that is kept; what is read in the table itself takes none.

    Raises:
        SourceError: it is empty, or two columns have one name.
        ArgumentError: no such column.

    Examples:
        >>> import pyarrow as pa
        >>> ArrowTableSource(pa.table({"x": [[1], [2, 3]]}))[1]["x"]
        array([2, 3])
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "global"

    def __init__(
        self,
        table: Any,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        shapes: Mapping[str, Shape] | None = None,
        name: str = "a table",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        known = known_fields(table.schema, nulls, shapes or {}, columns)
        self._fields = {each: known[each] for each in check_columns(columns, known)}
        self._shapes = dict(shapes or {})
        self._nulls: Nulls = nulls
        self._name = name
        roots = roots_of(table.schema, list(self._fields), nulls=nulls)
        self._batches = [each for each in table.select(roots).to_batches(max_chunksize=_ROWS) if len(each)]
        if not self._batches:
            raise SourceError("there are no rows", where=name)
        self._init_chunks(np.array([len(each) for each in self._batches], np.int64), cache_bytes)

    def __repr__(self) -> str:
        return f"ArrowTableSource({len(self)} samples)"

    @property
    def identified(self) -> bool:
        """Its content is not looked at: another table of the same columns and length is the same."""
        return False

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @property
    def blocks(self) -> Int64:
        """Rows of each record batch: int64."""
        return np.diff(self._chunk_starts)

    @property
    def fingerprint(self) -> str:
        """Of columns and number of rows."""
        return digest_of(repr((self._fields, len(self))).encode())

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, ColumnBuffer]:
        first = int(self._chunk_starts[number])
        fields = {name: self._fields[name] for name in names}
        with arrow_errors(self._name):
            batch = self._batches[number]
            batch.validate(full=True)
            found = decoded(batch, fields, self._shapes, where=self._name, first_row=first, nulls=self._nulls)
        held = [
            np.frombuffer(buffer, np.uint8)
            for column in batch.columns
            for buffer in column.buffers()
            if buffer is not None and buffer.size
        ]
        return {
            name: replace(
                stored, borrowed=any(np.may_share_memory(stored.values, each) for each in held), extra_bytes=0
            )
            for name, stored in found.items()
        }


def known_fields(
    schema: Any, nulls: Nulls, shapes: Mapping[str, Shape], columns: Sequence[str] | None = None
) -> dict[str, Field]:
    """The fields of a schema, those columns that were declared to have a shape with it.

    Args:
        schema: a `pyarrow.Schema`.
        nulls: as for `arrow_types.fields_of`.
        shapes: columns of lists of lists that are arrays, and their shapes.
        columns: as for `arrow_types.fields_of`.

    Raises:
        SourceError: two columns have one name.
    """
    fields = fields_of(schema, nulls=nulls, columns=columns)
    for name, path in leaves_of(schema):
        if name in shapes and name in fields:
            fields[name] = shaped_field(field_at(schema, path).type, shapes[name])
    return fields
