"""Files made from tar shards, each once, under a lock of all processes: indexes, and decompressed copies."""

import bz2
import gzip
import logging
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankfeed._util.threads import in_parallel
from rankfeed.errors import SourceError, UnsafeError
from rankfeed.sources.paths import INDEX_SUFFIX, head
from rankfeed.sources.tar.headers import compression_of
from rankfeed.sources.tar.shard_list import ShardList
from rankfeed.sources.tar.tar_index import Summary, TarIndex, decode, encode, read_summary, scan
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import atomic_file, remove_temporaries, write_atomic
from rankfeed.storage.file_errors import file_errors
from rankfeed.storage.mapped import map_file

#: Seconds after which a waiting process says so.
_REPORT_SECONDS = 10.0
#: Indexes of a shard that is copied again meanwhile: its content and its time change one after another.
_ATTEMPTS = 4
#: A compressed shard may expand to this multiple of its size, and this many bytes more.
_RATIO, _MORE_BYTES = 200, 1 << 28
_CHUNK_BYTES = 1 << 20

_log = logging.getLogger("rankfeed")


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Directory for files that cannot be stored beside the data."""
    if cache_dir is not None:
        return Path(os.path.abspath(cache_dir))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rankfeed")


def index_places(tar: str, cache_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Possible paths of the index of a shard: beside it, and in the cache directory."""
    path = Path(os.path.abspath(tar))
    apart = cache_folder(cache_dir) / "tar" / digest_of(os.fsencode(path.parent))[:16]
    return [path.with_name(path.name + INDEX_SUFFIX), apart / (path.name + INDEX_SUFFIX)]


@dataclass(frozen=True)
class IndexCache:
    """Indexes of shards, created if they do not exist or are outdated."""

    cache_dir: str | os.PathLike[str] | None = None
    #: The directory of a description that names the shards: nothing is written through a link below it.
    within: str = ""
    progress: bool = True

    def summaries(self, tars: Sequence[str]) -> list[Summary]:
        """Summaries of shards; those without a current index are indexed now."""
        summaries = self.known(tars)
        summaries |= self._create([tar for tar in tars if tar not in summaries])
        return [summaries[tar] for tar in tars]

    def known(self, tars: Sequence[str]) -> dict[str, Summary]:
        """Summaries of the shards that have a current index."""

        def find(tar: str) -> Summary | None:
            summaries = (read_summary(place) for place in index_places(tar, self.cache_dir))
            return next((summary for summary in summaries if _is_current(summary, tar)), None)

        pairs = zip(tars, in_parallel(find, tars), strict=True)
        return {tar: summary for tar, summary in pairs if summary is not None}

    def load(self, tar: str) -> TarIndex:
        """The index of one shard, memory-mapped; created if there is no valid one."""
        for _ in range(_ATTEMPTS):
            for place in index_places(tar, self.cache_dir):
                if _is_current(read_summary(place), tar):
                    index = decode(map_file(place))
                    if index is not None and _is_current(index.summary, tar):
                        return index
            self._create([tar], replace=True)
        raise SourceError("a shard changes while it is read", where=tar, remedy="wait until it is written")

    def _create(self, tars: Sequence[str], *, replace: bool = False) -> dict[str, Summary]:
        """Index shards; a process that waited for the lock uses the other's indexes, unless ``replace``."""
        created: dict[str, Summary] = {}
        folders: dict[Path, list[str]] = {}
        for tar in tars:
            folders.setdefault(self._writable_places(tar)[0].parent, []).append(tar)
        for folder, shards in folders.items():
            with locked(folder / ".rankfeed-index.lock", f"the indexes in {folder}"):
                created |= {} if replace else self.known(shards)
                missing = [tar for tar in dict.fromkeys(shards) if tar not in created]
                indexed = in_parallel(self._create_one, missing, "indexing", progress=self.progress)
                created |= dict(zip(missing, indexed, strict=True))
        return created

    def _create_one(self, tar: str) -> Summary:
        indexes = (scan(tar) for _ in range(_ATTEMPTS))
        index = next((candidate for candidate in indexes if _is_current(candidate.summary, tar)), None)
        if index is None:
            raise SourceError("a shard changes while it is indexed", where=tar, remedy="wait until it is written")
        places = self._writable_places(tar)
        for place in places:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(place, encode(index))
                break
            except OSError as error:
                if place == places[-1]:
                    raise not_writable("an index", place, error) from error
        return index.summary

    def _writable_places(self, tar: str) -> list[Path]:
        places = index_places(tar, self.cache_dir)
        folder, within = places[0].parent, self.within
        # A symbolic link on the way from `within` leads elsewhere.
        straight = os.path.join(os.path.realpath(within), os.path.relpath(folder, within or "/"))
        is_through_link = bool(within) and os.path.realpath(folder) != os.path.normpath(straight)
        return places if os.access(folder, os.W_OK | os.X_OK) and not is_through_link else places[1:]


def _is_current(summary: Summary | None, tar: str) -> bool:
    """Whether size and time of the shard are still those of its summary."""
    with file_errors(tar):
        status = os.stat(tar)
    now = status.st_size, status.st_mtime_ns
    return summary is not None and (summary.tar_bytes, summary.tar_mtime_ns) == now


def not_writable(description: str, place: Path, error: OSError | NotImplementedError) -> SourceError:
    """The error for a file that cannot be stored."""
    return SourceError(
        f"{description} cannot be written",
        found=getattr(error, "strerror", None) or error,
        where=place,
        remedy="free disk space, or pass cache_dir= with a folder that can be written",
    )


@contextmanager
def locked(path: Path, description: str) -> Iterator[None]:
    """Hold a lock that all processes share; log a warning if it takes long."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=_REPORT_SECONDS)
        except Timeout:
            _log.warning("waiting for another process that creates %s (lock %s)", description, path)
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        raise not_writable(description, path, error) from error
    try:
        yield
    finally:
        lock.release()


def decompressed(listed: ShardList, cache_dir: str | os.PathLike[str] | None) -> ShardList:
    """The same shards, compressed ones replaced by copies: each version is decompressed once, under a lock."""
    folder = cache_folder(cache_dir) / ".rankfeed-decompressed"
    copies: dict[str, Path] = {}
    for shard in listed.paths:
        if compression_of(head(shard, 8)):
            status = os.stat(shard)
            version = digest_of(os.fsencode(shard), f"{status.st_size}.{status.st_mtime_ns}".encode())[:16]
            copies[shard] = folder / f"{os.path.basename(shard)[:100]}-{version}.tar"
    if not all(copy.is_file() for copy in copies.values()):
        with locked(folder / ".lock", f"decompressed shards in {folder}"):
            remove_temporaries(folder)  # only the owner of the lock writes copies
            missing = [shard for shard, copy in copies.items() if not copy.is_file()]
            in_parallel(lambda shard: _decompress(shard, copies[shard]), missing, "decompressing", progress=True)
    shards = [shard._replace(path=os.fspath(copies.get(shard.path, shard.path))) for shard in listed.shards]
    return replace(listed, shards=shards)


def _decompress(shard: str, copy: Path) -> None:
    limit = _RATIO * os.path.getsize(shard) + _MORE_BYTES
    openers: dict[str | None, Callable[[str], Any]] = {"bzip2": bz2.open, "xz": lzma.open, "zstd": _open_zstd}
    opener = openers.get(compression_of(head(shard, 8)), gzip.open)
    try:
        with atomic_file(copy) as out, opener(shard) as file:
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


def _open_zstd(shard: str) -> Any:
    import pyarrow as pa  # takes long, and opening other shards does not need it

    return pa.input_stream(pa.OSFile(os.fsencode(shard)), compression="zstd")
