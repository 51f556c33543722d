"""Whether a data set is as it was written: all of it is read, and compared with its checksums or decoded."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from rankfeed._util.validate import check_bool, check_callable, check_int, check_optional, check_path
from rankfeed.diagnostics.findings import Finding, Judged
from rankfeed.diagnostics.verify.formats import DataContents, contents_of
from rankfeed.diagnostics.verify.pieces import Damage, DataPiece, VerifiedPieces, file_stamp
from rankfeed.errors import RankfeedError, SourceError, UnsafeError
from rankfeed.sources import open as open_source
from rankfeed.sources.open import detect
from rankfeed.sources.paths import as_paths

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
    name = detect(place, format)
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
    verdict.nbytes = sum(max(0, file_stamp(each)[1]) for each in contents.files)
    paths = [os.path.abspath(each) for each in ([place] if isinstance(place, str | os.PathLike) else place)]
    verified = VerifiedPieces(repr((paths, opening)), cache_dir, resume=resume)
    todo = [piece for piece in contents.pieces if piece.key not in verified]
    verdict.pieces, verdict.resumed = len(contents.pieces), len(contents.pieces) - len(todo)
    seen = set[int]()  # two checks may find one damage
    for each in chain(contents.damage, _check(todo, verified, progress)):
        if hash(each) not in seen and len(seen) < limit:
            verdict.damage.append(each)
        seen.add(hash(each))
    verdict.count = len(seen)
    verified.clear()
    return verdict


def _check(
    pieces: Sequence[DataPiece], verified: VerifiedPieces, progress: Callable[[float], None]
) -> Iterator[Damage]:
    """Check pieces in threads: reading, hashing and decompressing release the GIL."""
    total, done = max(1, sum(piece.nbytes for piece in pieces)), 0
    lock, stop = threading.Lock(), threading.Event()

    def check(piece: DataPiece) -> list[Damage]:
        left = piece.nbytes

        def step(nbytes: int) -> None:
            nonlocal done, left
            if stop.is_set():
                raise CancelledError
            with lock:
                nbytes = min(nbytes, left)
                left -= nbytes
                done += nbytes
                progress(done / total)

        found: list[Damage] = []
        step(0)
        try:
            for each in piece.check(step) or ():
                found.append(each)
        except RankfeedError as error:
            found.append(Damage.of(error, piece.key[0]))
        except OSError as error:  # a failing disk, or no permission: the other pieces are still checked
            where = error.filename or piece.key[0]
            found.append(Damage("a file cannot be read", str(where), "", str(error)))
        if not found:
            verified.add(piece.key)
        step(left)
        return found

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for found in pool.map(check, pieces):
                yield from found
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress(1.0)
