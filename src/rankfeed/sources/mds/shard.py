"""The bytes of an MDS shard, decompressed if necessary, and the offsets of its columns.

A shard is ``samples: uint32``, ``offsets: uint32[samples + 1]``, its configuration as JSON, then the samples. A
sample is the sizes of its columns that vary (uint32 each), then all columns, in the order of their names.
"""

import hashlib
from typing import Any

import msgspec
import numpy as np
import xxhash

from rankfeed.columns.columns import ColumnBuffer
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.mds.mds_index import MdsShard
from rankfeed.sources.scattered import Bytes, rows_at
from rankfeed.sources.source import Int64

#: Names of codecs in an index, and in pyarrow.
_CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


def read_shard(data: Bytes, shard: MdsShard, *, check: bool = False) -> ColumnBuffer:
    """The bytes of a shard, and the offsets of its samples; compared with checksums if compressed or ``check``."""
    if len(data) != shard.bytes:
        raise damaged(shard, f"{shard.bytes} bytes", f"{len(data)} bytes")
    if shard.compression is not None:
        data = _decompressed(data, shard)
    if check or shard.compression is not None:
        for name, expected in shard.hashes.items():
            hasher = _hasher(name)
            if hasher is not None and (digest := hasher(data.data).hexdigest()) != expected:
                raise damaged(shard, f"{name} {expected}", digest)
    if len(data) < 4 * (shard.samples + 2) or int(data[:4].view("<u4")[0]) != shard.samples:
        raise damaged(shard, f"{shard.samples} samples", "another number")
    _check_header(data, shard)
    return ColumnBuffer(data, data[4 : 4 * (shard.samples + 2)].view("<u4"))


def _check_header(data: Bytes, shard: MdsShard) -> None:
    """Compare the columns in the header of the shard, which may be empty, with the index."""
    first = 4 * (shard.samples + 2)
    end = int(data[4:8].view("<u4")[0])  # start of the first sample
    if not first <= end <= len(data):
        raise damaged(shard, f"a header that ends between {first} and {len(data)}", end)
    if end == first:
        return
    try:
        header = msgspec.json.decode(data[first:end].tobytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(shard, "a header of JSON that describes the columns", error) from error
    expected = {
        "column_names": list(shard.columns),
        "column_encodings": [encoding for encoding, _ in shard.columns.values()],
        "column_sizes": [size or None for _, size in shard.columns.values()],
    }
    for name, indexed in expected.items():
        if header.get(name) not in (None, indexed):
            raise CorruptError(
                "a shard's header contradicts the index",
                expected=f"{name} {indexed}, as in the index",
                found=header[name],
                where=shard.path,
            )


def _decompressed(data: Bytes, shard: MdsShard) -> Bytes:
    """Decompress a shard, never to more bytes than the index says."""
    import pyarrow as pa

    name = (shard.compression or "").split(":")[0]  # "zstd:7" is level 7
    if name not in _CODECS:
        raise SourceError(
            "a shard has an unknown compression",
            expected=" or ".join(_CODECS),
            found=repr(name[:40]),
            where=shard.path,
        )
    out = np.empty(shard.raw_bytes, np.uint8)
    try:
        if name == "snappy":  # pyarrow does not fill a larger buffer: check the size, a varint at the start
            digits = data[: 1 + int(np.argmax(data[:5] < 0x80))].tolist()  # of 7 bits; the last is below 128
            size = sum((digit & 0x7F) << (7 * place) for place, digit in enumerate(digits))
            if size != len(out):
                raise ValueError(f"{size} bytes")
            content = pa.Codec("snappy").decompress(pa.py_buffer(data), decompressed_size=size)
            out[:] = np.frombuffer(content, np.uint8)
        else:
            with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), _CODECS[name]) as stream:
                num_read = 0
                while count := stream.readinto(out[num_read:].data):
                    num_read += count
                if num_read < len(out) or stream.read(1):
                    raise ValueError(f"{num_read} bytes" if num_read < len(out) else "more")
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise damaged(shard, f"{len(out)} bytes decompressed", error) from error
    return out


def is_hashed(shard: MdsShard) -> bool:
    """Whether a shard has a checksum of a known algorithm."""
    return any(_hasher(name) for name in shard.hashes)


def _hasher(name: str) -> Any:
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return getattr(hashlib, name, None)
    return getattr(xxhash, name, None) if name in xxhash.algorithms_available else None


def locate(content: ColumnBuffer, rows: Int64, shard: MdsShard) -> dict[str, tuple[Int64, Int64]]:
    """Start and length in bytes of each column in some samples: int64 [m] each, checked to be inside the shard."""
    data, offsets = content.values, content.offsets
    assert offsets is not None
    begin, end = offsets.take(rows).astype(np.int64), offsets.take(rows + 1).astype(np.int64)
    varying = [name for name, (_, size) in shard.columns.items() if not size]
    head = 4 * len(varying)
    first = 4 * (shard.samples + 2)
    bad = (begin < first) | (end > len(data)) | (begin + head > end)
    if bad.any():
        row = int(np.argmax(bad))
        raise damaged(shard, f"offsets from {first} to {len(data)}", f"{begin[row]} to {end[row]}", rows[row])
    sizes = rows_at(data, begin, head).view("<u4").astype(np.int64) if head else np.empty((len(rows), 0), np.int64)
    places: dict[str, tuple[Int64, Int64]] = {}
    start = begin + head
    for name, (_, size) in shard.columns.items():
        length = np.full(len(rows), size, np.int64) if size else sizes[:, varying.index(name)]
        places[name] = start, length
        start = start + length  # at most 2^32 per column: no overflow
    if (start != end).any():
        row = int(np.argmax(start != end))
        raise damaged(
            shard, f"columns of {end[row] - begin[row]} bytes", f"{start[row] - begin[row]} bytes", rows[row]
        )
    return places


def damaged(shard: MdsShard, expected: object, found: object, row: object = None) -> CorruptError:
    """The error for a damaged shard or sample."""
    where = shard.path if row is None else f"{shard.path}, sample {row}"
    return CorruptError("a shard is damaged", expected=expected, found=found, where=where)
