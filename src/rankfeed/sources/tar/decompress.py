"""Shards that are compressed as a whole: refused, or decompressed once into the cache folder when asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rankfeed.errors import CorruptError, SourceError, UnsafeError
from rankfeed.sources.paths import head
from rankfeed.sources.tar.descriptions import Described
from rankfeed.sources.tar.headers import BLOCK, compression_of, is_header
from rankfeed.sources.tar.index_cache import cache_folder, in_parallel, locked
from rankfeed.sources.tar.shards import renamed
from rankfeed.storage import atomic_file, digest_of
from rankfeed.storage.commit import TEMPORARY

#: Names of tar files, compressed or not.
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
#: A compressed shard may expand this much, and by so many bytes more.
_FOLD, _MORE = 200, 1 << 28
_CHUNK = 1 << 20


def looks_like_tar(path: str) -> bool:
    """Whether a file is a tar file, compressed or not, or is called one."""
    if path.endswith(SUFFIXES):
        return os.path.isfile(path)
    return is_header(head(path, BLOCK))


def decompressed(these: Described, cache_dir: str | os.PathLike[str] | None) -> Described:
    """The same shards, those that are compressed replaced by decompressed copies in the cache folder.

    Copies are made once, under a lock that all processes share; another version of a shard gets another copy.

    Raises:
        CorruptError: a shard is damaged.
        UnsafeError: it expands beyond all measure.
        SourceError: it cannot be read, or the copy not be written.
    """
    folder = cache_folder(cache_dir) / "decompressed"
    places: dict[str, Path] = {}
    for shard in these.shards:
        if compression_of(head(shard, 8)) is not None:
            places[shard] = _place(folder, shard)
    missing = [shard for shard, place in places.items() if not place.is_file()]
    if missing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        with locked(folder / ".lock", f"decompressed shards in {folder}"):
            for leftover in folder.glob(
                f"{TEMPORARY}*"
            ):  # of one that was killed: who makes copies holds the lock
                leftover.unlink(missing_ok=True)
            again = [shard for shard in missing if not places[shard].is_file()]
            in_parallel(lambda shard: _decompress(shard, places[shard]), again, "decompressing")
    return renamed(these, [os.fspath(places.get(shard, shard)) for shard in these.shards])


def _place(folder: Path, shard: str) -> Path:
    try:
        found = os.stat(shard)
    except OSError as error:
        raise SourceError("the shard cannot be read", found=error, where=shard) from error
    version = digest_of(os.fsencode(shard), f"{found.st_size}.{found.st_mtime_ns}".encode())[:16]
    return folder / f"{os.path.basename(shard)[:100]}-{version}.tar"


def _decompress(shard: str, place: Path) -> None:
    limit = _FOLD * os.path.getsize(shard) + _MORE
    size = 0
    try:
        with atomic_file(place) as out, _opened(shard) as file:
            while chunk := _read(file, shard):
                size += len(chunk)
                if size > limit:
                    raise UnsafeError(
                        "a compressed shard expands beyond all measure",
                        expected=f"up to {limit} bytes",
                        found="more",
                        where=shard,
                        remedy="if it is meant, decompress it yourself",
                    )
                out.write(chunk)
    except OSError as error:
        raise _unwritable(place, error) from error


def _opened(shard: str) -> IO[Any]:
    kind = compression_of(head(shard, 8))
    if kind == "zstd":
        import pyarrow as pa

        stream: IO[Any] = pa.input_stream(pa.OSFile(os.fsencode(shard)), compression="zstd")
        return stream
    import bz2
    import gzip
    import lzma

    openers: dict[str | None, Callable[..., Any]] = {"bzip2": bz2.open, "xz": lzma.open}
    opened: IO[Any] = openers.get(kind, gzip.open)(shard, "rb")
    return opened


def _read(file: IO[Any], shard: str) -> bytes:
    try:
        return bytes(file.read(_CHUNK))
    except Exception as error:  # each library has errors of its own, some of them OSErrors
        raise CorruptError(
            "a compressed shard is damaged", found=error, where=shard, remedy="fetch the shard anew"
        ) from error


def _unwritable(place: Path, error: OSError) -> SourceError:
    return SourceError(
        "a decompressed copy cannot be written",
        found=error.strerror or error,
        where=place,
        remedy="make room, or pass cache_dir= with a folder that has more",
    )
