"""Whether a data set is as it was written: all of it is read, and compared with its checksums or decoded."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from rankfeed._util.validate import check_bool, check_callable, check_int
from rankfeed.diagnostics.findings import Finding, Judged
from rankfeed.diagnostics.verify.decoded import (
    ROW_GROUP,
    archive_pieces,
    decoded_pieces,
    has_page_checksums,
    table_pieces,
)
from rankfeed.diagnostics.verify.indexed import mds_pieces, packed_pieces, tar_pieces, tar_shards, wholly_described
from rankfeed.diagnostics.verify.pieces import Damage, DataPiece, VerifiedPieces
from rankfeed.errors import RankfeedError, SourceError, UnsafeError
from rankfeed.sources import open as open_source
from rankfeed.sources.mds.detect import mds_folders
from rankfeed.sources.open import detect
from rankfeed.sources.paths import Paths, as_paths, expand

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
    name = detect(place, format)
    if name is None:
        open_source(place, format=format)  # raises the reason
        raise SourceError("unknown format", where=place)
    verdict = DataVerdict(name)
    opening = {"format": name, "cache_dir": cache_dir, "allow_pickle": allow_pickle, **options}
    try:
        pieces, damage = _pieces(place, verdict, opening)
    except UnsafeError:
        raise
    except SourceError as error:
        pieces, damage = [], [Damage.of(error, place)]
    _add(verdict, damage, limit)
    verified = VerifiedPieces(repr((_absolute(place), opening)), cache_dir, resume=resume)
    _check(pieces, verdict, verified, limit, progress)
    verified.clear()
    return verdict


def _absolute(place: Paths) -> list[str]:
    return [os.path.abspath(each) for each in ([place] if isinstance(place, (str, os.PathLike)) else place)]


def _pieces(place: Any, verdict: DataVerdict, opening: dict[str, Any]) -> tuple[list[DataPiece], list[Damage]]:
    """The pieces of a data set, and what is wrong without reading them; sets the checksums of the verdict."""
    if verdict.format == "packed":
        verdict.checksums = "the manifest's checksums"
        return packed_pieces(os.fspath(place))
    if verdict.format == "mds":
        found = [mds_pieces(folder) for folder in mds_folders(place)]
        pieces, damage = (
            [each for some, _, _ in found for each in some],
            [each for _, some, _ in found for each in some],
        )
        files = _files(mds_folders(place))
        if all(hashed for _, _, hashed in found):
            verdict.checksums = "the hashes of index.json"
    elif verdict.format == "webdataset":
        shards = tar_shards(place, opening.get("split"))
        pieces, damage = tar_pieces(shards, opening["cache_dir"])
        files = [*shards.shards]
        if wholly_described(shards):
            verdict.checksums = f"the md5 sums of {shards.where}"
    else:
        files = _files(expand(place))
        pieces, damage = [*archive_pieces(files), *table_pieces(files)], []
        if verdict.format == "parquet" and all(map(has_page_checksums, files)):
            verdict.checksums = "the checksums of pages"
        if pieces and all(each.endswith(".npz") for each in files):
            verdict.checksums = "the CRCs of archive members"
    if verdict.format not in ("mds", "webdataset") or not (
        verdict.checksums or (damage and verdict.format == "mds")
    ):
        try:
            pieces += decoded_pieces(open_source(place, **opening), files)
        except UnsafeError:
            raise
        except RankfeedError as error:  # damaged files are reported one by one
            damage.append(Damage.of(error, place))
    return pieces, damage


def _files(places: Sequence[str]) -> list[str]:
    """All files in these places without hidden ones."""
    found = []
    for place in places:
        if not os.path.isdir(place):
            found.append(place)
        for folder, folders, names in os.walk(place):
            folders[:] = sorted(each for each in folders if not each.startswith("."))
            found += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
    return found


class _Stopped(Exception):
    """The check was interrupted."""


def _check(
    pieces: Sequence[DataPiece],
    verdict: DataVerdict,
    verified: VerifiedPieces,
    limit: int,
    progress: Callable[[float], None],
) -> None:
    """Check all pieces in threads: reading, hashing and decompressing release the GIL."""
    todo = [piece for piece in pieces if piece.key not in verified]
    verdict.pieces, verdict.resumed = len(pieces), len(pieces) - len(todo)
    verdict.nbytes = sum(piece.nbytes for piece in pieces)
    total = max(1, verdict.nbytes)
    done = total - sum(piece.nbytes for piece in todo)
    lock, stop = threading.Lock(), threading.Event()

    def step(nbytes: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _Stopped
        with lock:
            done += nbytes
            progress(min(1.0, done / total))

    def check(piece: DataPiece) -> list[Damage]:
        if stop.is_set():
            raise _Stopped
        try:
            found = list(piece.check(step))
        except OSError as error:  # a failing disk, or no permission: the other pieces are still checked
            found = [Damage("a file cannot be read", str(error.filename or piece.key[1]), "", str(error))]
        if not found:
            verified.add(piece.key)
        return found

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for found in pool.map(check, todo):
                _add(verdict, found, limit)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress(1.0)


def _add(verdict: DataVerdict, found: Sequence[Damage], limit: int) -> None:
    """Count damages and list the first; one that two checks found is one, and so is all of a row group."""
    for each in found:
        groups = [f"{known.where}, " for known in verdict.damage if known.what == ROW_GROUP]
        if each not in verdict.damage and not f"{each.where}, ".startswith(tuple(groups)):
            verdict.count += 1
            if len(verdict.damage) < limit:
                verdict.damage.append(each)
