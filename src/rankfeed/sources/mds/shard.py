"""The bytes of an MDS shard: decompressed if need be, and where in them each column of a sample lies.

A shard is ``samples: uint32``, ``offsets: uint32[samples + 1]``, the configuration as JSON, then the samples. A
sample is the sizes of its columns that vary (uint32 each), then all columns, in the order of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.mds.index import REMEDY, MdsShard
from rankfeed.sources.scattered import rows_at
from rankfeed.storage import map_file
from rankfeed.storage.decodable import decodable

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

#: Names in an index -> pyarrow's.
_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


def read_shard(shard: MdsShard) -> Bytes:
    """The bytes of a shard: a view of the file, or decompressed and compared with the index's checksums.

    Raises:
        SourceError: it cannot be read, or is compressed in a way that nobody knows.
        CorruptError: it is damaged, or its header describes other columns than the index.
    """
    data = map_file(shard.path)
    if len(data) != shard.bytes:
        raise damaged(shard, f"{shard.bytes} bytes", f"{len(data)} bytes")
    if shard.compression is not None:
        data = _decompressed(data, shard)
        check_hashes(data, shard)
    if len(data) < 4 * (shard.samples + 2) or int(data[:4].view("<u4")[0]) != shard.samples:
        raise damaged(shard, f"{shard.samples} samples", "another number")
    _check_header(data, shard)
    return data


@decodable
class _Header(msgspec.Struct, frozen=True):
    column_names: list[str] | None = None
    column_encodings: list[str] | None = None
    column_sizes: list[int | None] | None = None


def _check_header(data: Bytes, shard: MdsShard) -> None:
    """Compare the shard's own description of its columns with the index. An empty description says nothing."""
    first = 4 * (shard.samples + 2)
    end = int(data[4:8].view("<u4")[0])  # where the first sample starts
    if not first <= end <= len(data):
        raise damaged(shard, f"a header that ends between {first} and {len(data)}", end)
    if end == first:
        return
    expected = _Header(
        list(shard.columns),
        [encoding for encoding, _ in shard.columns.values()],
        [size or None for _, size in shard.columns.values()],
    )
    try:
        found = msgspec.json.decode(data[first:end].tobytes(), type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(shard, "a header of JSON that describes the columns", error) from error
    for name in _Header.__struct_fields__:
        given = getattr(found, name)
        if name == "column_sizes" and given is not None:
            given = [size or None for size in given]
        if given is not None and given != getattr(expected, name):
            raise CorruptError(
                "a shard's header contradicts the index",
                expected=f"{name} {getattr(expected, name)}, as in the index",
                found=given,
                where=shard.path,
                remedy=REMEDY,
            )


def _decompressed(data: Bytes, shard: MdsShard) -> Bytes:
    """Never more than the index says, however much the file would give."""
    import pyarrow as pa

    name = (shard.compression or "").split(":")[0]  # "zstd:7" was compressed at level 7
    if name not in _CODECS:
        raise SourceError(
            "a shard is compressed in an unknown way",
            expected=" or ".join(_CODECS),
            found=repr(name[:40]),
            where=shard.path,
        )
    out = np.empty(shard.raw_bytes, np.uint8)
    try:
        if name == "snappy":
            _unsnap(data, out)
        else:
            with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), _CODECS[name]) as stream:
                done = 0
                while done < len(out) and (got := stream.readinto(out[done:].data)):
                    done += got
                more = len(stream.read(1))
            if done < len(out) or more:
                raise damaged(shard, f"{len(out)} bytes decompressed", "more" if more else f"{done} bytes")
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise damaged(shard, f"{len(out)} bytes decompressed", error) from error
    return out


def _unsnap(data: Bytes, out: Bytes) -> None:
    """Snappy puts the size in front, seven bits a byte; pyarrow leaves bytes unset where it is less than asked."""
    import pyarrow as pa

    size = 0
    for place, byte in enumerate(data[:5].tolist()):
        size |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    if size != len(out):
        raise ValueError(f"{size} bytes")
    out[:] = np.frombuffer(pa.Codec("snappy").decompress(pa.py_buffer(data), decompressed_size=size), np.uint8)


def check_hashes(data: Bytes, shard: MdsShard) -> None:
    """Compare a shard with those of its checksums whose algorithm is known.

    Raises:
        CorruptError: they differ.
    """
    for name, expected in shard.hashes.items():
        make = _algorithm(name)
        if make is not None and (found := make(data.data).hexdigest()) != expected:
            raise damaged(shard, f"{name} {expected}", found)


def is_hashed(shard: MdsShard) -> bool:
    """Whether a shard has a checksum whose algorithm is known."""
    return any(_algorithm(name) for name in shard.hashes)


def _algorithm(name: str) -> Any:
    """What makes a checksum; None where nobody knows."""
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return getattr(hashlib, name, None)
    return getattr(xxhash, name, None) if name in xxhash.algorithms_available else None


def locate(
    data: Bytes, rows: Int64, columns: Mapping[str, tuple[str, int]], shard: MdsShard
) -> dict[str, tuple[Int64, Int64]]:
    """Where the columns of some samples lie.

    Args:
        data: uint8, the shard.
        rows: int64 [m], samples in it.
        columns: all of them, with encoding and size, as the index has them.
        shard: it, for errors.

    Returns:
        for each column its starts and lengths in bytes, int64 [m]; all of them inside the shard.

    Raises:
        CorruptError: a sample's sizes contradict each other; names it.
    """
    offsets = data[4 : 4 * (shard.samples + 2)].view("<u4")
    begin, end = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
    varying = [name for name, (_, size) in columns.items() if not size]
    head = 4 * len(varying)
    first = 4 * (shard.samples + 2)
    bad = (begin < first) | (end > len(data)) | (begin + head > end)
    if bad.any():
        row = int(np.argmax(bad))
        raise damaged(shard, f"a place from {first} to {len(data)}", f"{begin[row]} to {end[row]}", rows[row])
    sizes = rows_at(data, begin, head).view("<u4").astype(np.int64) if head else np.empty((len(rows), 0), np.int64)
    places: dict[str, tuple[Int64, Int64]] = {}
    start = begin + head
    for name, (_, size) in columns.items():
        length = np.full(len(rows), size, np.int64) if size else sizes[:, varying.index(name)]
        places[name] = start, length
        start = start + length  # at most 2^32 a column: no overflow
    if (start != end).any():
        row = int(np.argmax(start != end))
        raise damaged(
            shard, f"columns of {end[row] - begin[row]} bytes", f"{start[row] - begin[row]} bytes", rows[row]
        )
    return places


def damaged(shard: MdsShard, expected: object, found: object, row: object = None) -> CorruptError:
    """What is wrong with a shard, or with a sample of it."""
    where = shard.path if row is None else f"{shard.path}, sample {row}"
    return CorruptError("a shard is damaged", expected=expected, found=found, where=where, remedy=REMEDY)
