"""The columns of a Lance table: what they hold, and which are blobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rankfeed.columns import Field
from rankfeed.errors import SourceError
from rankfeed.sources.arrow.types import duplicate_name_error, fields_of
from rankfeed.sources.source import check_columns


def offered(
    schema: Any, columns: Sequence[str] | None, nulls: Literal["error", "mask"], where: str
) -> tuple[dict[str, str], set[str], dict[str, Field]]:
    """For each column its own column of the table; which of these are blobs; and what the columns hold.

    Args:
        schema: the table's `pyarrow.Schema`.
        columns: names of those to offer; None for all.
        nulls: "error" or "mask".
        where: the table, for errors.

    Raises:
        SourceError: a column that cannot be a tensor, or no columns.
        ArgumentError: no such column.
    """
    import pyarrow as pa

    tops: dict[str, str] = {}
    found: dict[str, Field] = {}
    blobs = {field.name for field in schema if is_blob(field)}
    for field in schema:
        if field.name not in blobs:
            here = dict(fields_of(pa.schema([field]), nulls=nulls, columns=columns))
        else:
            masks = {f"{field.name}_valid": Field("dense", "bool")} if nulls == "mask" else {}
            here = {field.name: Field("bytes"), **masks}
        for name in here:
            if name in found and (columns is None or name in columns):
                raise duplicate_name_error(name)
        found |= here
        tops |= dict.fromkeys(here, field.name)
    names = check_columns(columns, found)
    if any(tops[name] == "" for name in names):
        raise SourceError(
            "Lance cannot read a column without a name",
            where=where,
            remedy="leave the column out with columns=, or write the table again with a name for it",
        )
    if not names:
        raise SourceError("the table has no columns", where=where)
    return tops, blobs, {name: found[name] for name in names}


def is_blob(field: Any) -> bool:
    """Whether Lance keeps a column's bytes apart, to be read on demand: either of its two encodings."""
    extension = getattr(field.type, "extension_name", "")
    return extension == "lance.blob.v2" or (field.metadata or {}).get(b"lance-encoding:blob") == b"true"
