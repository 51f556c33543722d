"""Where the indexes of tar shards are kept, and who makes them: once, under a lock that all processes share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankfeed.errors import SourceError
from rankfeed.sources.tar.index import Summary, TarIndex, from_bytes, read_summary, to_bytes
from rankfeed.sources.tar.scan import scan
from rankfeed.storage import digest_of, map_file, write_atomic

#: What is added to the name of a shard for the name of its index.
SUFFIX = ".rankfeed"
_LOCK = ".rankfeed-index.lock"
#: Seconds after which a process that waits for another says so.
_PATIENCE = 10.0

_log = logging.getLogger("rankfeed")


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where things are kept that cannot lie beside the data."""
    if cache_dir is not None:
        return Path(os.path.abspath(cache_dir))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "rankfeed")


def index_places(tar: str, cache_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Where the index of a shard may lie: beside it, and in the cache folder."""
    path = Path(os.path.abspath(tar))
    apart = cache_folder(cache_dir) / "tar" / digest_of(os.fsencode(path.parent))[:16]
    return [path.with_name(path.name + SUFFIX), apart / (path.name + SUFFIX)]


class IndexStore:
    """Indexes of shards: found where they are, made where they are not.

    Args:
        cache_dir: where to keep those that cannot lie beside their shards; None for ``~/.cache/rankfeed``.
        within: directory of a data set whose description names the shards; no link below it is written through.
        progress: whether to show how far indexing has come, where somebody sees it.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str] | None = None, *, within: str = "", progress: bool = True
    ) -> None:
        self._cache_dir = cache_dir
        self._within = within
        self._progress = progress

    def summaries(self, tars: Sequence[str]) -> list[Summary]:
        """What the shards hold; those without an index that fits are indexed now.

        Raises:
            SourceError, CorruptError, UnsafeError: a shard cannot be read, or an index be kept anywhere.
        """
        found = self.known(tars)
        missing = [tar for tar, summary in found.items() if summary is None]
        if missing:
            found.update(self._make(missing))
        return [summary for tar in tars if (summary := found[tar]) is not None]

    def known(self, tars: Sequence[str]) -> dict[str, Summary | None]:
        """What is known of the shards; None of those without an index that fits."""
        return dict(zip(tars, in_parallel(self._find, tars, "", progress=False), strict=True))

    def has(self, tar: str) -> bool:
        """Whether a shard is indexed."""
        return self._find(tar) is not None

    def load(self, tar: str) -> TarIndex:
        """The index of one shard, memory-mapped; made where there is none that can be believed.

        Raises:
            SourceError, CorruptError, UnsafeError: as above.
        """
        for attempt in range(2):
            damaged = False
            for place in index_places(tar, self._cache_dir):
                if _fits(read_summary(os.fspath(place)), tar) is None:
                    continue
                index = from_bytes(map_file(place))
                if index is not None and _fits(index.summary, tar) is not None:
                    return index
                damaged = True
            if attempt == 0:
                # One whose header looks right and the rest is not would be found for ever.
                self._make([tar], anew=damaged)
        raise SourceError("a shard changes while it is read", where=tar, remedy="wait until it is written")

    def _find(self, tar: str) -> Summary | None:
        for place in index_places(tar, self._cache_dir):
            summary = _fits(read_summary(os.fspath(place)), tar)
            if summary is not None:
                return summary
        return None

    def _make(self, tars: Sequence[str], anew: bool = False) -> dict[str, Summary]:
        """Index shards. Whoever comes second waits, and finds them indexed, unless they are to be made anew."""
        made: dict[str, Summary] = {}
        folders: dict[Path, list[str]] = {}
        for tar in tars:
            folders.setdefault(self._homes(tar)[0].parent, []).append(tar)
        for folder, some in folders.items():
            with locked(folder / _LOCK, f"the indexes in {folder}"):
                found = {} if anew else self.known(some)
                made.update({tar: summary for tar, summary in found.items() if summary is not None})
                missing = [tar for tar in dict.fromkeys(some) if tar not in made]
                indexed = in_parallel(self._make_one, missing, "indexing", self._progress)
                made.update(zip(missing, indexed, strict=True))
        return made

    def _make_one(self, tar: str) -> Summary:
        index = scan(tar)
        if _fits(index.summary, tar) is None:
            raise SourceError("a shard changes while it is indexed", where=tar, remedy="wait until it is written")
        content = to_bytes(index)
        for place in self._homes(tar):
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(place, content)
                return index.summary
            except OSError as error:  # no room there, or something else has its name
                failed = _nowhere(place, error)
        raise failed

    def _homes(self, tar: str) -> list[Path]:
        """Where to write the index of a shard: the first of these that can be written."""
        beside, apart = index_places(tar, self._cache_dir)
        folder = beside.parent
        if not os.access(folder, os.W_OK | os.X_OK) or _through_link(folder, self._within):
            return [apart]
        return [beside, apart]


def _fits(summary: Summary | None, tar: str) -> Summary | None:
    """The summary, if it is of the shard as it is now."""
    try:
        found = os.stat(tar)
    except OSError as error:
        raise SourceError("the shard cannot be read", found=error.strerror or error, where=tar) from error
    if summary is None or (summary.tar_bytes, summary.tar_mtime_ns) != (found.st_size, found.st_mtime_ns):
        return None
    return summary


def _through_link(folder: Path, within: str) -> bool:
    """Whether a symbolic link is on the way from one directory to another below it."""
    straight = os.path.join(os.path.realpath(within), os.path.relpath(folder, within or "/"))
    return bool(within) and os.path.realpath(folder) != os.path.normpath(straight)


def _nowhere(place: Path, error: OSError | NotImplementedError) -> SourceError:
    return SourceError(
        "an index cannot be written",
        found=getattr(error, "strerror", None) or error,
        where=place,
        remedy="make room, or pass cache_dir= with a folder that can be written",
    )


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock that all processes share; whoever waits long says for what.

    Raises:
        SourceError: the lock cannot be had.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            _log.warning("waiting for another process that makes %s (lock %s)", what, path)
            lock.acquire()
    except (OSError, NotImplementedError) as error:  # the second: a file system that has no locks
        raise _nowhere(path, error) from error
    try:
        yield
    finally:
        lock.release()


def in_parallel(work: Callable[[str], Any], tars: Sequence[str], what: str, progress: bool = True) -> list[Any]:
    """Do a piece of work for each shard and show how far it has come; the first error stops the rest.

    Threads are enough: most of the time goes into waiting for the disk.
    """
    stop = threading.Event()

    def one(tar: str) -> Any:
        if stop.is_set():
            return None
        try:
            return work(tar)
        except BaseException:
            stop.set()
            raise

    done = []
    if tars:
        with ThreadPoolExecutor(threads()) as pool, _bar(what, len(tars), progress) as advance:
            for found in pool.map(one, tars):
                advance()
                done.append(found)
    return done


@contextmanager
def _bar(what: str, total: int, progress: bool) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def threads() -> int:
    """How many threads read at once."""
    return min(16, 4 * (os.cpu_count() or 1))
