"""The footer of a Parquet file, which says what lies where: read by itself, and held to the file's own size.

Nothing in a footer is believed before it was compared with something else: its length with the file's, the lists
in it with its length (so that a short footer cannot ask for memory without bound), its counts with each other.
What it says of a single column chunk is left to Arrow's reader: pyarrow's own accessor of it ends the process
where a histogram has a wrong length, or a column is encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.storage import digest_of

MAGIC, ENCRYPTED = b"PAR1", b"PARE"

#: Bytes at a file's end that are read in one go: most footers are shorter.
_TAIL = 1 << 16
#: The longest footer that is read: that of a file of some million column chunks.
_LONGEST = 1 << 29
#: Elements of one list in a footer, as Arrow limits them too.
_MOST_ELEMENTS = 1_000_000
#: Rows of one row group: Arrow numbers them with 31 bits in a page, and writers stop far below.
_MOST_ROWS = 2**31 - 1
#: Files from which on a bar shows how far reading their footers is.
_MANY = 2_000
#: Footers read at once: their reading waits for the disk or the network.
_AT_ONCE = 16

REMEDY = "fetch the file anew, or write it again"


@dataclass(frozen=True)
class Footer:
    """What is kept of a footer.

    Args:
        size: bytes of the whole file.
        digest: checksum of the footer's bytes.
        rows: of each row group.
        schema: the file's columns, a `pyarrow.Schema`.
        nbytes: of each row group, decompressed.
    """

    size: int
    digest: str
    rows: tuple[int, ...]
    schema: Any
    nbytes: tuple[int, ...]


def read_footers(paths: Sequence[str]) -> list[Footer]:
    """The footers of many files, read side by side.

    Raises:
        SourceError: a file cannot be read, is no Parquet, or is encrypted; the first of them is named.
        CorruptError: a file is damaged.
    """
    if len(paths) == 1:
        return [read_footer(paths[0])]
    with ThreadPoolExecutor(min(_AT_ONCE, len(paths))) as pool, _bar(len(paths)) as advance:
        footers = []
        for footer in pool.map(read_footer, paths):
            footers.append(footer)
            advance()
        return footers


def read_footer(path: str) -> Footer:
    """The footer of a file.

    Raises:
        SourceError, CorruptError: as with :func:`read_footers`.
    """
    import pyarrow as pa

    if os.path.basename(path) in ("_metadata", "_common_metadata"):
        raise SourceError(
            "the file lists the rows of others, and has none", where=path, remedy="open the folder that it lies in"
        )
    with reading(path), pa.OSFile(os.fsencode(path)) as file:
        content, size = footer_bytes(file, path)
    reader = parsed(content, path)
    metadata = reader.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    if any(not 0 <= each <= _MOST_ROWS for each in rows) or sum(rows) != metadata.num_rows:
        raise _damaged(path, f"row groups of {metadata.num_rows} rows together", f"{list(rows[:4])} rows")
    with arrow_errors(path):
        return Footer(
            size, digest_of(content), rows, reader.schema_arrow, tuple(group.total_byte_size for group in groups)
        )


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what the operating system says of a file into an error that names it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RankfeedError):
            raise
        raise SourceError("the file cannot be read", found=error.strerror or error, where=path) from error


def footer_bytes(file: Any, path: str) -> tuple[bytes, int]:
    """The footer as it lies in an open file (a `pyarrow.OSFile`), and the file's size.

    Raises:
        OSError: the file cannot be read.
        SourceError: it is encrypted.
        CorruptError: it is no Parquet, or cut.
    """
    size = file.size()
    first = file.read_at(min(size, 4), 0)
    tail = _read_at(file, max(0, size - _TAIL), min(size, _TAIL), path)
    last = tail[-4:]
    if ENCRYPTED in (first, last) and size >= 12:
        raise encrypted(path)
    if size < 12 or first != MAGIC or last != MAGIC:
        what = (
            "is cut or damaged: its end is missing"
            if first == MAGIC
            else "is no Parquet file, or its start is damaged"
        )
        raise CorruptError(
            f"the file {what}",
            expected="'PAR1' as its first and its last four bytes",
            found=f"{first!r} and {last!r} in {size} bytes",
            where=path,
            remedy=REMEDY,
        )
    length = int.from_bytes(tail[-8:-4], "little")
    if not 0 < length <= min(size - 12, _LONGEST):
        raise _damaged(path, f"a footer of up to {min(size - 12, _LONGEST)} bytes", f"one of {length} bytes")
    start = size - 8 - length
    content = tail[-8 - length : -8] if length + 8 <= len(tail) else _read_at(file, start, length, path)
    return content, size


def parsed(content: bytes, path: str) -> Any:
    """A reader (a `pyarrow.parquet.ParquetFile`) of a footer alone: it has the metadata, and no rows.

    Raises:
        SourceError: it is encrypted.
        CorruptError: it is no footer.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No list has more elements, no text more bytes than the footer itself.
    most = len(content)
    alone = pa.py_buffer(b"".join((MAGIC, content, most.to_bytes(4, "little"), MAGIC)))
    with arrow_errors(path):
        return pq.ParquetFile(
            pa.BufferReader(alone),
            thrift_string_size_limit=most,
            thrift_container_size_limit=min(most, _MOST_ELEMENTS),
        )


def encrypted(path: str) -> SourceError:
    """The error for files that only a key opens."""
    return SourceError(
        "the file is encrypted",
        where=path,
        remedy="decrypt it with the library and the keys that wrote it, and write it again in plain",
    )


def _read_at(file: Any, start: int, size: int, path: str) -> bytes:
    content: bytes = file.read_at(size, start)
    if len(content) != size:
        raise _damaged(path, f"{size} bytes at {start}", f"{len(content)} bytes: it became shorter")
    return content


def _damaged(where: str, expected: object, found: object) -> CorruptError:
    return CorruptError(
        "the file is damaged: its footer contradicts it",
        expected=expected,
        found=found,
        where=where,
        remedy=REMEDY,
    )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, where there are many files and somebody looks."""
    if total < _MANY:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading footers", total=total)
        yield lambda: bar.advance(task)
