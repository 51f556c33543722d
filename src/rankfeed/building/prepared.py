"""A prepared folder, and the marker inside that lists its files: whether it is whole, what others put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NoReturn

import msgspec

from rankfeed.errors import PrepareError, listed
from rankfeed.storage import (
    check_data_name,
    digest_of,
    file_digest,
    fsync_dir,
    is_gone,
    refresh_path,
    stat_uncached,
    write_atomic,
)
from rankfeed.storage.decodable import decodable

MARKER_NAME = ".rankfeed-prepared.json"


@decodable
class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A file of a prepared folder.

    Args:
        name: relative to the folder, with slashes.
        nbytes: its size; that of a link is -1.
        digest: XXH3 of its bytes; of a link, where it leads.
    """

    name: str
    nbytes: int
    digest: str


@decodable
class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finished build says of itself.

    Args:
        version: of this layout.
        key: of what was built.
        host: where.
        seconds: how long it took.
        files: all of them, sorted by name.
    """

    version: int
    key: str
    host: str
    seconds: float
    files: list[Entry]


class State(Enum):
    """What lies where a prepared folder belongs."""

    ABSENT = "nothing"
    FITS = "what is wanted, whole"
    OTHER = "what was prepared with another key"
    DAMAGED = "what was prepared, and was changed since"
    FOREIGN = "what nobody prepared"


def look(path: Path, key: str) -> State:
    """What lies at ``path``. Sizes are compared with the marker's; `check` compares the bytes too.

    Raises:
        PrepareError: it cannot be looked into, which says nothing of what is there.
    """
    try:
        return _looked(path, key)
    except OSError as error:
        raise _unseen(error, path) from error


def _unseen(error: OSError, path: Path) -> PrepareError:
    return PrepareError(
        "what was prepared cannot be looked into",
        found=error.strerror or error,
        where=error.filename or path,
        remedy="see to that, or choose another folder: nothing is built again, or removed, that cannot be seen",
    )


def _looked(path: Path, key: str) -> State:
    asked = False
    while True:
        before = _identity(path)
        error: OSError | None = None
        state = State.FOREIGN
        try:
            state = _look(path, key)
        except OSError as found:
            if not is_gone(found):
                raise
            error = found
        if error is None and state is not State.FOREIGN:
            return state
        if _identity(path) != before:
            continue  # somebody committed while it was looked at
        if not asked:  # nor did another host, of which this one has not heard yet
            refresh_path(path)
            asked = True
        elif error is not None:
            raise error
        else:
            return state


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return found.st_dev, found.st_ino


def _look(path: Path, key: str) -> State:
    marker = read_marker(path)
    if marker is None:
        if not os.path.lexists(path):
            return State.ABSENT
        if path.is_dir() and not any(path.iterdir()):
            return State.ABSENT
        return State.FOREIGN
    if marker.key != key:
        return State.OTHER
    return State.FITS if all(_is_there(path, entry) for entry in marker.files) else State.DAMAGED


def read_marker(path: Path) -> Marker | None:
    """The marker of a folder; None where there is none that can be believed.

    Raises:
        OSError: it cannot be read.
    """
    try:
        marker = msgspec.json.decode((path / MARKER_NAME).read_bytes(), type=Marker)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    for entry in marker.files:
        check_data_name(entry.name, path / MARKER_NAME)
    return marker if marker.version == 1 else None


def _is_there(path: Path, entry: Entry) -> bool:
    try:
        found = os.lstat(path / entry.name)
        if entry.nbytes >= 0 and found.st_size != entry.nbytes and stat.S_ISREG(found.st_mode):
            found = stat_uncached(path / entry.name)  # this host may have seen it grow
    except OSError as error:
        if is_gone(error):
            return False
        raise
    return stat.S_ISLNK(found.st_mode) if entry.nbytes < 0 else found.st_size == entry.nbytes


def strangers(path: Path) -> list[str]:
    """Names of files in a prepared folder that were not built: they are not ours to remove.

    Raises:
        OSError: it cannot be read.
    """
    marker = read_marker(path)
    known = {MARKER_NAME} if marker is None else {MARKER_NAME, *(entry.name for entry in marker.files)}
    names = (file.relative_to(path).as_posix() for file in _walk(path))
    return sorted(name for name in names if name not in known)


def refuse_strangers(path: Path, state: State) -> None:
    """Nothing is removed that nobody prepared.

    Raises:
        PrepareError: there is such a thing where the data belong, or what is there cannot be seen.
    """
    if state in (State.ABSENT, State.FITS):
        return
    try:
        names = strangers(path) if path.is_dir() else ["a file"]
    except OSError as error:
        raise _unseen(error, path) from error
    if names or state is State.FOREIGN:
        raise PrepareError(
            "the folder holds what nobody prepared",
            expected="no folder, an empty one, or one with nothing in it but what prepare_once made",
            found=listed(names),
            where=path,
            remedy="move it away, or choose another folder: what others made is never removed",
        )


def check(path: Path) -> list[str]:
    """Names of the files of a prepared folder whose bytes are not those that were built.

    Raises:
        PrepareError: it has no marker.
        OSError: it cannot be read.
    """
    marker = read_marker(path)
    if marker is None:
        raise PrepareError("nobody prepared this folder", expected=f"a file {MARKER_NAME}", where=path)
    return [
        entry.name
        for entry in marker.files
        if not _is_there(path, entry) or _digest(path / entry.name, entry.nbytes) != entry.digest
    ]


def key_of(key: str, inputs: Sequence[str | os.PathLike[str]]) -> str:
    """The key that goes into the marker: the caller's, and sizes and times of the files it is built from.

    Raises:
        PrepareError: an input is not there.
    """
    pieces = [key.encode()]
    for each in inputs:
        root = Path(each)
        try:
            walked = walk_links(root, onerror=_raise) if root.is_dir() else [(str(root.parent), [], [root.name])]
            for file in (Path(place, name) for place, _, names in walked for name in names):
                found = os.stat(file)
                if stat.S_ISREG(found.st_mode):  # to open a pipe would be to wait for who writes into it
                    with suppress(PermissionError):
                        found = stat_uncached(file)  # this host may have seen it before it was changed
                told = f"{root.name}/{file.relative_to(root)} {found.st_size} {found.st_mtime_ns}"
                pieces.append(told.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise PrepareError(
                "an input cannot be read", found=error.strerror or error, where=error.filename or root
            ) from error
    return digest_of(*pieces) if len(pieces) > 1 or inputs else key


def walk_links(
    top: Path, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, in the order of the names, and into linked folders too, but for those that lead back.

    Args:
        top: where it begins.
        onerror: called where a folder cannot be listed; None: it is passed over.
    """
    for place, folders, files in os.walk(top, followlinks=True, onerror=onerror):
        led = os.path.islink(place) and place != os.fspath(top)
        if led and os.path.realpath(place) in map(os.path.realpath, Path(place).parents):
            folders.clear()
            continue
        folders.sort()
        yield place, folders, sorted(files)


def seal(staging: Path, key: str, host: str, seconds: float) -> None:
    """Make a build durable and write down what it holds.

    Raises:
        PrepareError: it is empty, or holds what is no file, folder or link.
        OSError: it cannot be written.
    """
    paths = sorted(
        path for path in _walk(staging) if path != staging / MARKER_NAME
    )  # a copied one is worth nothing
    if not paths:
        raise PrepareError("the builder wrote nothing", where=staging, remedy="write into the folder it is given")
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(lambda path: _sealed(staging, path), paths))
    for folder, _, _ in os.walk(staging, topdown=False):
        fsync_dir(folder)
    marker = Marker(1, key, host, round(seconds, 3), files)
    write_atomic(staging / MARKER_NAME, msgspec.json.encode(marker))


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder, onerror=_raise):
        yield from (Path(place, name) for name in files)
        yield from (Path(place, name) for name in folders if os.path.islink(os.path.join(place, name)))


def _raise(error: OSError) -> NoReturn:
    raise error  # a folder that cannot be listed is not an empty one


def _sealed(staging: Path, path: Path) -> Entry:
    name = path.relative_to(staging).as_posix()
    found = os.lstat(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PrepareError("the name of a file is no UTF-8", found=os.fsencode(name), where=staging) from error
    check_data_name(name, staging)  # as a reader of the marker does
    if stat.S_ISLNK(found.st_mode):
        return Entry(name, -1, _digest(path, -1))
    if not stat.S_ISREG(found.st_mode):
        raise PrepareError(
            "the builder left something that is no file", found=stat.filemode(found.st_mode), where=name
        )
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return Entry(name, found.st_size, _digest(path, found.st_size))


def _digest(path: Path, nbytes: int) -> str:
    return file_digest(path) if nbytes >= 0 else digest_of(os.fsencode(os.readlink(path)))
