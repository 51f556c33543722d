"""Reading the footers of Parquet files, checked against the files themselves.

Nothing in a footer is used before it was compared with something else: its length with the file's, the lists in it
with its length (so that a short footer cannot ask for unbounded memory), its counts with each other. The metadata
of column chunks are left to Arrow's reader: pyarrow's accessor ends the process if a histogram has a wrong length
or a column is encrypted.
"""

import os
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.formats import PARQUET_ENCRYPTED, PARQUET_MAGIC, PARQUET_SUMMARIES
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import arrow_errors, file_errors

#: Bytes at the end of a file that are read at once: most footers are shorter.
_TAIL = 1 << 16
#: The footer of a file with some million column chunks.
_MOST_BYTES = 1 << 29
#: Elements of one list, as in Arrow.
_MOST_ELEMENTS = 1_000_000
#: Arrow counts the rows of a page with 31 bits.
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Footer:
    """What is kept of a footer."""

    digest: str  # of the footer
    rows: tuple[int, ...]  # of each row group
    schema: Any  # a `pyarrow.Schema`
    nbytes: tuple[int, ...]  # decompressed, of each row group


def read_footer(path: str) -> Footer:
    """The footer of a file; an error if it is not valid."""
    if os.path.basename(path) in PARQUET_SUMMARIES:
        raise SourceError(
            "the file describes the row groups of other files, and has no rows",
            where=path,
            remedy="open its folder instead",
        )
    with file_errors(path), pa.OSFile(os.fsencode(path)) as file:
        content = footer_bytes(file, path)
    reader = parse_footer(content, path)
    metadata = reader.metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if any(not 0 <= count <= _MOST_ROWS for count in rows) or sum(rows) != metadata.num_rows:
        raise _damaged(path, f"row groups of {metadata.num_rows} rows together", f"{list(rows[:4])} rows")
    nbytes = tuple(group.total_byte_size for group in groups)
    with arrow_errors(path):
        return Footer(digest_of(content), rows, reader.schema_arrow, nbytes)


def footer_bytes(file: Any, path: str) -> bytes:
    """The footer of an open `pyarrow.OSFile`."""
    size = file.size()
    first, tail = file.read_at(min(size, 4), 0), file.read_at(min(size, _TAIL), max(0, size - _TAIL))
    last = tail[-4:]
    if PARQUET_ENCRYPTED in (first, last) and size >= 12:
        raise SourceError(
            "the file is encrypted",
            where=path,
            remedy="decrypt it with the library and the keys that wrote it, and write it again without encryption",
        )
    if size < 12 or first != PARQUET_MAGIC or last != PARQUET_MAGIC:
        raise CorruptError(
            "the file is truncated: its end is missing"
            if first == PARQUET_MAGIC
            else "the file is damaged, or not a Parquet file",
            expected="'PAR1' as its first and its last four bytes",
            found=f"{first!r} and {last!r} in {size} bytes",
            where=path,
        )
    length = int.from_bytes(tail[-8:-4], "little")
    if not 0 < length <= min(size - 12, _MOST_BYTES):
        raise _damaged(path, f"a footer of up to {min(size - 12, _MOST_BYTES)} bytes", f"one of {length} bytes")
    if length + 8 > len(tail):
        tail = file.read_at(length + 8, size - 8 - length)
    content: bytes = tail[-8 - length : -8]
    if len(content) != length:
        raise _damaged(path, f"{length} bytes of footer", f"{len(content)} bytes: the file became shorter")
    return content


def parse_footer(content: bytes, path: str) -> Any:
    """A `pyarrow.parquet.ParquetFile` of a footer alone: it has the metadata, and no rows."""
    # No list has more elements, and no text more bytes, than the footer.
    most = len(content)
    alone = pa.py_buffer(b"".join((PARQUET_MAGIC, content, most.to_bytes(4, "little"), PARQUET_MAGIC)))
    with arrow_errors(path):
        return pq.ParquetFile(
            pa.BufferReader(alone),
            thrift_string_size_limit=most,
            thrift_container_size_limit=min(most, _MOST_ELEMENTS),
        )


def _damaged(where: str, expected: object, actual: object) -> CorruptError:
    return CorruptError(
        "the file is damaged: its footer contradicts it", expected=expected, found=actual, where=where
    )
