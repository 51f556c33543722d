"""Is a data set as it was written? All of it is read: by its checksums where it has some, else decoded."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rankfeed.diagnostics.verify.checked import Checked
from rankfeed.diagnostics.verify.damage import Damage, Piece
from rankfeed.diagnostics.verify.decoding import ROW_GROUP, archives, decoding, tables
from rankfeed.diagnostics.verify.shards import mds_pieces, packed_pieces, tar_pieces, tar_shards, wholly_described
from rankfeed.errors import RankfeedError, SourceError, UnsafeError
from rankfeed.sources import open as open_source
from rankfeed.sources.mds.detect import mds_folders
from rankfeed.sources.open import detect
from rankfeed.sources.paths import Paths, as_paths, expand

_THREADS = 8


@dataclass
class DataVerdict:
    """What is wrong with a data set.

    Attributes:
        format: its name.
        pieces: that it was cut into; each was checked.
        resumed: of them, those that an interrupted check had found whole.
        nbytes: in all files.
        checksums: what the content was compared with; "" where there was nothing but decoding it.
        count: of damages.
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
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.count

    @property
    def how(self) -> str:
        """What a sound verdict means."""
        if self.checksums:
            return f"compared with {self.checksums}"
        return "decoded only: the content has no checksums, so a value that changed into another one is not seen"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {**vars(self), "ok": self.ok, "how": self.how, "damaged": self.count}
        return {**told, "damage": [each.as_dict() for each in self.damage]}


def verify_data(
    where: str | os.PathLike[str] | Sequence[str],
    *,
    format: str | None = None,
    limit: int = 100,
    resume: bool = True,
    cache_dir: str | None = None,
    allow_pickle: bool = False,
    progress: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> DataVerdict:
    """Read a data set wholly, and list what is damaged.

    Checksums are used where the format has them: of packed shards, of MDS shards (``hashes``), of tar shards in a
    wids descriptor, of members of ``.npz``, of pages of Parquet. Counts, sizes, names and indexes are compared in
    any case, and what has no checksum is decoded.

    Args:
        where: as for :func:`rankfeed.open`.
        format: its name; found by looking if left out.
        limit: of damages that are listed; all are counted.
        resume: whether to go on where an interrupted check of the same data stopped.
        cache_dir: where it keeps that, and indexes.
        allow_pickle: whether pickled objects may be decoded.
        progress: called with the share that is done.
        options: of the format.

    Raises:
        SourceError: nothing is there, or it is of no known format.
        UnsafeError: decoding it could run code.

    Examples:
        >>> import tempfile, rankfeed as rf
        >>> folder = tempfile.mkdtemp() + "/packed"
        >>> _ = rf.write([{"x": 1}, {"x": 2}], folder, progress=False)
        >>> verify_data(folder).ok
        True
    """
    place = as_paths(where)
    name = detect(place, format)
    if name is None:
        open_source(place, format=format)  # which says why
        raise SourceError("unknown format", where=place)
    verdict = DataVerdict(name)
    opening = {"format": name, "cache_dir": cache_dir, "allow_pickle": allow_pickle, **options}
    try:
        pieces, damage = _pieces(place, verdict, opening)
    except UnsafeError:
        raise
    except SourceError as error:
        pieces, damage = [], [Damage.of(error, place)]
    _note(verdict, damage, limit)
    checked = Checked(repr((_absolute(place), opening)), cache_dir, resume=resume)
    _check(pieces, verdict, checked, limit, progress)
    checked.forget()
    return verdict


def _absolute(place: Paths) -> list[str]:
    """Where the data are, whatever folder this process stands in."""
    return [os.path.abspath(each) for each in ([place] if isinstance(place, (str, os.PathLike)) else place)]


def _pieces(place: Any, verdict: DataVerdict, opening: dict[str, Any]) -> tuple[list[Piece], list[Damage]]:
    """What to look at, and what is wrong at first sight."""
    if verdict.format == "packed":
        verdict.checksums = "the manifest's checksums"
        return packed_pieces(os.fspath(place))
    if verdict.format == "mds":
        return _mds(place, verdict, opening)
    if verdict.format == "webdataset":
        return _tar(place, verdict, opening)
    files = _files(expand(place))
    pieces = [*archives(files), *tables(files)]
    if verdict.format == "parquet":
        verdict.checksums = "the checksums of pages, where the files have them"
    elif pieces and all(each.endswith(".npz") for each in files):
        verdict.checksums = "the CRCs of archive members"
    damage = []
    try:
        pieces += decoding(open_source(place, **opening), files)
    except UnsafeError:
        raise
    except SourceError as error:
        damage.append(Damage.of(error, place))
    return pieces, damage


def _mds(place: Any, verdict: DataVerdict, opening: dict[str, Any]) -> tuple[list[Piece], list[Damage]]:
    pieces: list[Piece] = []
    damage: list[Damage] = []
    summed = True
    for folder in mds_folders(place):
        some, wrong, hashes = mds_pieces(folder)
        pieces += some
        damage += wrong
        summed = summed and hashes
    if summed:
        verdict.checksums = "the hashes of index.json"
    elif not damage:
        pieces += decoding(open_source(place, **opening), _files(mds_folders(place)))
    return pieces, damage


def _tar(place: Any, verdict: DataVerdict, opening: dict[str, Any]) -> tuple[list[Piece], list[Damage]]:
    these = tar_shards(place, opening.get("split"))
    pieces, damage = tar_pieces(these, opening["cache_dir"])
    if wholly_described(these):
        verdict.checksums = f"the md5 sums of {these.where}"
        return pieces, damage
    try:
        pieces += decoding(open_source(place, **opening), these.shards)
    except UnsafeError:
        raise
    except RankfeedError as error:  # the shards that are at fault are told of one by one
        damage.append(Damage.of(error, place))
    return pieces, damage


def _files(places: Sequence[str]) -> list[str]:
    """All files in these places, hidden ones left out."""
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
    pieces: Sequence[Piece], verdict: DataVerdict, checked: Checked, limit: int, progress: Callable[[float], None]
) -> None:
    """Look at all pieces, several at a time: reading, hashing and decompressing let other threads run."""
    todo = [piece for piece in pieces if piece.key not in checked]
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

    def look(piece: Piece) -> list[Damage]:
        if stop.is_set():
            raise _Stopped
        try:
            found = list(piece.check(step))
        except OSError as error:  # of a disk that fails, or nobody may read: the other pieces are still looked at
            found = [Damage("a file cannot be read", str(error.filename or piece.key[1]), "", str(error))]
        if not found:
            checked.add(piece.key)
        return found

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for found in pool.map(look, todo):
                _note(verdict, found, limit)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress(1.0)


def _note(verdict: DataVerdict, found: Sequence[Damage], limit: int) -> None:
    """Count damages, and list the first; one that two looks found is one, and so is all of a row group."""
    for each in found:
        groups = [f"{told.where}, " for told in verdict.damage if told.what == ROW_GROUP]
        if each not in verdict.damage and not f"{each.where}, ".startswith(tuple(groups)):
            verdict.count += 1
            if len(verdict.damage) < limit:
                verdict.damage.append(each)
