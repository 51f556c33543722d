"""Data without checksums: every sample is read and decoded, which finds what cannot be decoded, and no more."""

import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rankfeed.diagnostics.verify.damage import Damage, Piece, Step, stamp
from rankfeed.errors import RankfeedError, safe_str
from rankfeed.sources import Source

#: Samples that are decoded in one go, and pieces that a data set is cut into at least.
_TOGETHER, _PIECES = 256, 64
_CHUNK = 1 << 20
#: Rows of a Parquet file that are decoded in one go while its pages are checked.
_PAGE_ROWS = 64
#: What is said of a row group that cannot be read, whatever finds it.
ROW_GROUP = "a row group is damaged"


def decoding(source: Source, files: Sequence[str], first: int = 0) -> Iterator[Piece]:
    """Pieces that decode all samples of a source.

    Args:
        source: to read.
        files: that it lies in: their sizes and times stand for the content.
        first: number of its first sample, for those who are told.
    """
    stamps = tuple(stamp(each) for each in files)
    nbytes = sum(max(0, each[1]) for each in stamps)
    count = len(source)
    size = max(_TOGETHER, -(-count // _PIECES))
    for low in range(0, count, size):
        high = min(low + size, count)
        share = nbytes * (high - low) // count

        def check(step: Step, low: int = low, high: int = high, share: int = share) -> Iterator[Damage]:
            for start in range(low, high, _TOGETHER):
                stop = min(start + _TOGETHER, high)
                yield from _decode(source, start, stop, first)
                step(share * (stop - start) // (high - low))

        yield Piece(("decoded", source.fingerprint, low, high, stamps), share, check)


def _decode(source: Source, low: int, high: int, first: int) -> Iterator[Damage]:
    """Halves what fails until the samples are found that do."""
    try:
        for value in source.fetch(np.arange(low, high)).samples():
            _touch(value)
    except Exception as error:  # decoders of others raise what they like
        if high - low > 1:
            if (place := _row_group(source, low, high, error)) is not None:
                yield place
                return
            yield from _decode(source, low, (low + high) // 2, first)
            yield from _decode(source, (low + high) // 2, high, first)
            return
        where = f"sample {first + low}"
        if isinstance(error, RankfeedError):
            damage = Damage.of(error)
            yield Damage(damage.what, f"{damage.where}, {where}".lstrip(", "), damage.expected, damage.found)
        else:
            found = f"{type(error).__name__}: {safe_str(error)}"[:500]
            yield Damage("a sample cannot be decoded", where, "", found)


def _row_group(source: Source, low: int, high: int, error: Exception) -> Damage | None:
    """What is wrong with the row group that all of a stretch lies in: both of its ends fail in the same words."""
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
    """Look at all of a sample: a view of a mapped file has not been read before."""
    for value in sample.values() if isinstance(sample, dict) else [sample]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
            value.max()


def archives(files: Sequence[str]) -> Iterator[Piece]:
    """Pieces that compare the CRC of each member of zip files (``.npz``)."""
    for path in files:
        if path.endswith(".npz"):
            yield Piece(("crc", *stamp(path)), max(0, stamp(path)[1]), partial(_crc, path))


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


def tables(files: Sequence[str]) -> Iterator[Piece]:
    """Pieces that read Parquet files whole, with the checksums of their pages where these have some."""
    for path in files:
        if path.endswith((".parquet", ".pq")):
            yield Piece(("pages", *stamp(path)), max(0, stamp(path)[1]), partial(_pages, path))


def _pages(path: str, step: Step) -> Iterator[Damage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            groups = file.metadata.num_row_groups
            for group in range(groups):
                try:
                    # Few rows at once: values that come again and again take next to nothing in the file.
                    for batch in file.iter_batches(_PAGE_ROWS, row_groups=[group], use_threads=False):
                        batch.validate(full=True)
                except (pa.ArrowException, OSError, ValueError) as error:
                    yield Damage(ROW_GROUP, f"{path}, row group {group}", "", str(error)[:500])
                step(os.path.getsize(path) // groups)
    except (pa.ArrowException, OSError) as error:
        yield Damage("a Parquet file cannot be read", path, "", str(error)[:500])
