"""Pieces of data without an index: decoded, or compared with the checksums of archives and tables."""

import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankfeed.diagnostics.verify.pieces import Damage, DataPiece, Step, file_stamp
from rankfeed.errors import RankfeedError, safe_str
from rankfeed.sources import Source

#: Samples that are decoded together, and pieces of a data set, at least.
_TOGETHER, _PIECES = 256, 64
_CHUNK = 1 << 20
#: Rows of a Parquet file that are decoded together.
_PAGE_ROWS = 64
#: Of a row group that cannot be read.
ROW_GROUP = "a row group is damaged"


def decoded_pieces(source: Source, files: Sequence[str]) -> Iterator[DataPiece]:
    """Pieces that decode all samples of a source; sizes and times of its files represent the content."""
    stamps = tuple(file_stamp(each) for each in files)
    nbytes = sum(max(0, each[1]) for each in stamps)
    count = len(source)
    size = max(_TOGETHER, -(-count // _PIECES))
    for low in range(0, count, size):
        high = min(low + size, count)
        share = nbytes * (high - low) // count

        def check(step: Step, low: int = low, high: int = high, share: int = share) -> Iterator[Damage]:
            for start in range(low, high, _TOGETHER):
                stop = min(start + _TOGETHER, high)
                yield from _decode(source, start, stop)
                step(share * (stop - start) // (high - low))

        yield DataPiece(("decoded", source.fingerprint, low, high, stamps), share, check)


def _decode(source: Source, low: int, high: int) -> Iterator[Damage]:
    """Bisects a range that fails down to the samples that do."""
    try:
        for value in source.fetch(np.arange(low, high)).samples():
            _touch(value)
    except Exception as error:  # third-party decoders raise anything
        if high - low > 1:
            if (place := _row_group(source, low, high, error)) is not None:
                yield place
                return
            yield from _decode(source, low, (low + high) // 2)
            yield from _decode(source, (low + high) // 2, high)
            return
        where = f"sample {low}"
        if isinstance(error, RankfeedError):
            damage = Damage.of(error)
            yield Damage(damage.what, f"{damage.where}, {where}".lstrip(", "), damage.expected, damage.found)
        else:
            found = f"{type(error).__name__}: {safe_str(error)}"[:500]
            yield Damage("a sample cannot be decoded", where, "", found)


def _row_group(source: Source, low: int, high: int, error: Exception) -> Damage | None:
    """The damage of a row group that contains a whole range: both of its ends fail with the same error."""
    if not (isinstance(error, RankfeedError) and re.search(r"row group \d+(, column .+)?$", str(error.where))):
        return None
    found = Damage.of(error)
    for row in (low, high - 1):
        try:
            source.fetch([row]).samples()
        except RankfeedError as other:
            if Damage.of(other) != found:
                return None
        except Exception:
            return None
        else:
            return None
    return found


def _touch(sample: Any) -> None:
    """Read all of a sample: a view of a mapped file has not been read before."""
    for value in sample.values() if isinstance(sample, dict) else [sample]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
            value.max()


def archive_pieces(files: Sequence[str]) -> Iterator[DataPiece]:
    """Pieces that compare the CRC of each member of zip files (``.npz``)."""
    for path in files:
        if path.endswith(".npz"):
            yield DataPiece(("crc", *file_stamp(path)), max(0, file_stamp(path)[1]), partial(_crc, path))


def _crc(path: str, step: Step) -> Iterator[Damage]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                try:
                    with archive.open(member) as file:
                        while piece := file.read(_CHUNK):
                            step(len(piece))
                except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
                    yield Damage(
                        "a member is damaged", f"{path}, {member.filename}", f"CRC {member.CRC:08x}", str(error)
                    )
    except (zipfile.BadZipFile, OSError) as error:
        yield Damage("an archive cannot be read", path, "a .npz file", str(error))


def table_pieces(files: Sequence[str]) -> Iterator[DataPiece]:
    """Pieces that read whole Parquet files and compare the checksums of pages that have some."""
    for path in files:
        if path.endswith((".parquet", ".pq")):
            yield DataPiece(("pages", *file_stamp(path)), max(0, file_stamp(path)[1]), partial(_pages, path))


def _pages(path: str, step: Step) -> Iterator[Damage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = file.metadata.num_row_groups
            for group in range(groups):
                try:
                    # Few rows at a time: equal values take almost no space in the file.
                    for batch in file.iter_batches(_PAGE_ROWS, row_groups=[group], use_threads=False):
                        batch.validate(full=True)
                except (pa.ArrowException, OSError, ValueError) as error:
                    yield Damage(ROW_GROUP, f"{path}, row group {group}", "", str(error)[:500])
                step(os.path.getsize(path) // groups)
    except (pa.ArrowException, OSError) as error:
        yield Damage("a Parquet file cannot be read", path, "", str(error)[:500])


def has_page_checksums(path: str) -> bool:
    """Whether the first page of each column chunk of a Parquet file has a checksum; writers give all pages one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        with open(path, "rb") as file:
            for group in range(metadata.num_row_groups):
                for column in range(metadata.num_columns):
                    chunk = metadata.row_group(group).column(column)
                    file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
                    if not _has_checksum(file.read(64)):
                        return False
    except (pa.ArrowException, OSError, IndexError):
        return False
    return True


def _has_checksum(header: bytes) -> bool:
    """Whether a page header (Thrift compact protocol) has field 4: fields 1 to 3, all i32, are required."""
    place = 0
    for _ in range(3):
        place += 1
        while header[place] & 0x80:
            place += 1
        place += 1
    return header[place] == 0x15
