"""Decompressed copies of compressed shards, kept in the cache directory."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankfeed._util.threads import in_parallel
from rankfeed.errors import UnsafeError
from rankfeed.sources.paths import head
from rankfeed.sources.tar.headers import compression_of
from rankfeed.sources.tar.index_cache import cache_folder, locked, not_writable
from rankfeed.sources.tar.shard_list import ShardList
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import atomic_file, remove_temporaries
from rankfeed.storage.file_errors import file_errors

#: A compressed shard may expand to this multiple of its size, and this many bytes more.
_RATIO, _MORE_BYTES = 200, 1 << 28
_CHUNK_BYTES = 1 << 20


def decompressed(listed: ShardList, cache_dir: str | os.PathLike[str] | None) -> ShardList:
    """The same shards, compressed ones replaced by copies: each version is decompressed once, under a lock."""
    folder = cache_folder(cache_dir) / ".rankfeed-decompressed"
    copies: dict[str, Path] = {}
    for shard in listed.shards:
        if compression_of(head(shard, 8)):
            status = os.stat(shard)
            version = digest_of(os.fsencode(shard), f"{status.st_size}.{status.st_mtime_ns}".encode())[:16]
            copies[shard] = folder / f"{os.path.basename(shard)[:100]}-{version}.tar"
    if not all(copy.is_file() for copy in copies.values()):
        with locked(folder / ".lock", f"decompressed shards in {folder}"):
            remove_temporaries(folder)  # only the owner of the lock writes copies
            missing = [shard for shard, copy in copies.items() if not copy.is_file()]
            in_parallel(lambda shard: _decompress(shard, copies[shard]), missing, "decompressing", progress=True)
    return replace(listed, shards=[os.fspath(copies.get(shard, shard)) for shard in listed.shards])


def _decompress(shard: str, copy: Path) -> None:
    limit = _RATIO * os.path.getsize(shard) + _MORE_BYTES
    try:
        with atomic_file(copy) as out, _open(shard) as file:
            while True:
                # The libraries have errors of their own, some of them OSErrors.
                with file_errors(shard, Exception):
                    chunk = bytes(file.read(_CHUNK_BYTES))
                if not chunk:
                    break
                if out.tell() + len(chunk) > limit:
                    raise UnsafeError(
                        "a compressed shard expands too much",
                        expected=f"up to {limit} bytes",
                        found="more",
                        where=shard,
                        remedy="if this is intended, decompress it yourself",
                    )
                out.write(chunk)
    except OSError as error:
        raise not_writable("a decompressed copy", copy, error) from error


def _open(shard: str) -> Any:
    kind = compression_of(head(shard, 8))
    if kind == "zstd":
        import pyarrow as pa

        return pa.input_stream(pa.OSFile(os.fsencode(shard)), compression=kind)
    openers: dict[str | None, Callable[[str], Any]] = {"bzip2": bz2.open, "xz": lzma.open}
    return openers.get(kind, gzip.open)(shard)  # all open for reading
