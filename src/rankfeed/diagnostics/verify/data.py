"""Verifies a dataset: reads all of it, and compares it with its checksums, or decodes it if it has none."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_bool, check_callable, check_int, check_optional, check_path
from rankfeed.diagnostics.findings import Finding, Judged
from rankfeed.diagnostics.verify.formats import Damage, DataContents, DataPiece, contents_of, file_stamp
from rankfeed.errors import RankfeedError, SourceError, UnsafeError
from rankfeed.sources import open as open_source
from rankfeed.sources.formats import detect_format
from rankfeed.sources.paths import as_paths
from rankfeed.sources.tar.index_cache import cache_folder
from rankfeed.storage.checksum import digest_of

_THREADS = 8


@dataclass
class DataVerdict(Judged):
    """What is wrong with a data set.

    Attributes:
        format: its name.
        pieces: that it was divided into; each was checked.
        resumed: of them, those that an interrupted check had verified.
        nbytes: in all files.
        checksums: that all content was compared with; "" if some of it could only be decoded.
        count: number of damages.
        damage: the first of them.
    """

    format: str
    pieces: int = 0
    resumed: int = 0
    nbytes: int = 0
    checksums: str = ""
    count: int = 0
    damage: list[Damage] = field(default_factory=list)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, or could not be shown."""
        found = []
        if self.count:
            what = f"the data are damaged in {self.count} place{'s' * (self.count > 1)}"
            evidence = tuple(map(str, self.damage))
            found.append(Finding("damaged-data", "error", what, evidence, "restore these files from a copy"))
        if not self.checksums:
            what = "the content has no checksums: it was decoded, but changed values are not seen"
            remedy = "rankfeed write makes a copy with checksums"
            found.append(Finding("no-checksums", "unproven", what, (), remedy))
        return tuple(found)

    @property
    def how(self) -> str:
        """How the content was verified."""
        return f"compared with {self.checksums}" if self.checksums else "decoded only: it has no checksums"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), **self.verdict_as_dict(), "how": self.how, "damaged": self.count}

    def __str__(self) -> str:
        lines = [f"{self.format}: {self.nbytes:,} bytes in {self.pieces:,} pieces, {self.how}"]
        return "\n".join([*lines, *map(str, self.findings), f"verdict: {self.verdict}"])


def verify_data(
    path: str | os.PathLike[str] | Sequence[str],
    *,
    format: str | None = None,
    limit: int = 100,
    resume: bool = True,
    cache_dir: str | None = None,
    allow_pickle: bool = False,
    progress: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> DataVerdict:
    """Read a whole data set and list what is damaged.

    Content is compared with the checksums of the format: of packed shards, of MDS shards (``hashes``), of tar
    shards in a wids descriptor, of members of ``.npz``, of pages of Parquet. Counts, sizes, names and indexes are
    compared in any case. Content without checksums is decoded, and the verdict is "not proven" then.

    Args:
        path: as for :func:`rankfeed.open`.
        format: its name; detected if left out.
        limit: of damages that are listed; all are counted.
        resume: continue an interrupted check of the same data.
        cache_dir: for its state, and for indexes.
        allow_pickle: whether pickled objects may be decoded.
        progress: called with the share that is done.
        options: of the format.

    Raises:
        SourceError: there are no data, or of no known format.
        UnsafeError: decoding them could run code.
        ArgumentError: an invalid argument.

    Examples:
        >>> import tempfile
        >>> import rankfeed as rf
        >>> folder = tempfile.mkdtemp() + "/packed"
        >>> _ = rf.write([{"x": 1}, {"x": 2}], folder, progress=False)
        >>> rf.verify_data(folder).sound
        True
    """
    place, limit = as_paths(path), check_int("limit", limit, at_least=0)
    resume, progress = check_bool("resume", resume), check_callable("progress", progress)
    allow_pickle = check_bool("allow_pickle", allow_pickle)
    cache_dir = check_optional(check_path, "cache_dir", cache_dir)
    name = detect_format(place, format)
    if name is None:
        open_source(place, format=format)  # raises the reason
        raise SourceError("unknown format", where=place)
    verdict = DataVerdict(name)
    opening = {"format": name, "cache_dir": cache_dir, "allow_pickle": allow_pickle, **options}
    try:
        contents = contents_of(name, place, opening)
    except UnsafeError:
        raise
    except SourceError as error:
        contents = DataContents([], damage=[Damage.of(error, place)])
    verdict.checksums = contents.checksums
    verdict.nbytes = sum(file_stamp(file)[1] for file in contents.files)
    paths = [os.path.abspath(path) for path in ([place] if isinstance(place, str | os.PathLike) else place)]
    verified = VerifiedPieces(repr((paths, opening)), cache_dir, resume=resume)
    todo = [piece for piece in contents.pieces if piece.key not in verified]
    verdict.pieces, verdict.resumed = len(contents.pieces), len(contents.pieces) - len(todo)
    total, done, seen = max(1, sum(piece.nbytes for piece in todo)), 0, set[int]()

    def add(damage: Iterable[Damage]) -> None:
        for item in damage:
            if hash(item) not in seen and len(seen) < limit:
                verdict.damage.append(item)
            seen.add(hash(item))  # two checks may find one damage

    add(contents.damage)
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:  # reading, hashing and decompressing release the GIL
        for piece, damage in zip(todo, pool.map(_check, todo), strict=True):
            add(damage)
            if not damage:
                verified.add(piece.key)
            done += piece.nbytes
            progress(done / total)
    finally:
        pool.shutdown(cancel_futures=True)
    progress(1.0)
    verdict.count = len(seen)
    verified.clear()
    return verdict


def _check(piece: DataPiece) -> list[Damage]:
    found: list[Damage] = []
    try:
        found += piece.check() or ()
    except RankfeedError as error:
        found.append(Damage.of(error, piece.key[0]))
    except OSError as error:  # a failing disk, or no permission: the other pieces are still checked
        found.append(Damage("a file cannot be read", str(error.filename or piece.key[0]), "", str(error)))
    return found


class VerifiedPieces:
    """Keys of the pieces that an interrupted check found intact, a line each in the user's cache."""

    def __init__(self, name: str, cache_dir: str | None, *, resume: bool) -> None:
        self._path = Path(cache_folder(cache_dir), "verify", digest_of(os.fsencode(name))[:16])
        self._known: frozenset[str] = frozenset()
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not resume:
                self._path.unlink()
            self._known = frozenset(self._path.read_text(errors="replace").splitlines())

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return digest_of(repr(key).encode()) in self._known

    def add(self, key: tuple[object, ...]) -> None:
        """Remember a piece; if nothing can be written, the next check starts from the beginning."""
        with suppress(OSError), self._path.open("a") as file:
            file.write(digest_of(repr(key).encode()) + "\n")

    def clear(self) -> None:
        """A finished check remembers nothing: the next one reads everything."""
        with suppress(OSError):
            self._path.unlink()
