"""The marker file of a prepared directory: its key, with the inputs of the build, and a list of its files."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from rankfeed._util.threads import in_parallel
from rankfeed.errors import PrepareError, listed
from rankfeed.storage.checksum import digest_of, file_digest
from rankfeed.storage.commit import decodable, fsync_dir, read_record, write_record
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.network_fs import SuppressGone, is_gone, refresh_path, stat_uncached
from rankfeed.storage.untrusted import check_data_name

MARKER_NAME = ".rankfeed-prepared.json"
_VERSION = 1
_unreadable = partial(
    os_errors,
    PrepareError,
    "cannot read the prepared directory",
    remedy="fix its permissions, or choose another path; nothing unreadable is rebuilt or removed",
)


@decodable
class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A file of a prepared directory."""

    name: str  # relative to the directory, with slashes
    nbytes: int  # -1 for a symbolic link
    digest: str  # XXH3 of its bytes, or of the target of the link


@decodable
class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record of a finished build."""

    version: int  # of this layout
    key: str
    host: str
    seconds: float
    files: list[FileEntry]  # sorted by name


def key_with_inputs(key: str, inputs: Sequence[str | os.PathLike[str]]) -> str:
    """The key for the marker: the caller's, combined with the sizes and times of the input files."""
    pieces = [key.encode()]
    for path in inputs:
        root = Path(path)
        with os_errors(PrepareError, "cannot read an input", root):
            is_dir = root.is_dir()
            walked = walk_links(root, onerror=raise_error) if is_dir else [(str(root.parent), [], [root.name])]
            for file in (Path(place, name) for place, _, names in walked for name in names):
                status = os.stat(file)
                if stat.S_ISREG(status.st_mode):  # opening a pipe would block
                    with suppress(PermissionError):
                        status = stat_uncached(file)  # this host may have cached an earlier state
                facts = f"{root.name}/{file.relative_to(root)} {status.st_size} {status.st_mtime_ns}"
                pieces.append(facts.encode("utf-8", "surrogateescape"))
    return digest_of(*pieces) if inputs else key


def walk_links(
    top: Path, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` in the order of names that follows links to directories, except links back to a parent."""
    for place, folders, files in os.walk(top, followlinks=True, onerror=onerror):
        is_link = os.path.islink(place) and place != os.fspath(top)
        if is_link and os.path.realpath(place) in map(os.path.realpath, Path(place).parents):
            folders.clear()
            continue
        folders.sort()
        yield place, folders, sorted(files)


def raise_error(error: OSError) -> NoReturn:
    """For `os.walk`, which leaves out what it cannot read otherwise."""
    raise error


class DirState(Enum):
    """State of the directory to prepare."""

    ABSENT = "absent or empty"
    VALID = "prepared with this key, complete"
    OTHER_KEY = "prepared with another key"
    DAMAGED = "prepared, and changed since"
    FOREIGN = "not created by prepare_once"


def inspect_dir(path: Path, key: str) -> DirState:
    """The state of a directory, by the sizes of its files; `changed_files` compares the bytes as well."""
    with _unreadable(path):
        refreshed = False
        while True:
            before = _identity(path)
            try:
                state = _inspect(path, key)
            except OSError as error:
                if not is_gone(error) or (refreshed and _identity(path) == before):
                    raise
                state = DirState.FOREIGN
            if state is not DirState.FOREIGN:
                return state
            if _identity(path) != before:
                continue  # another process committed meanwhile
            if refreshed:
                return state
            refresh_path(path)  # changed on another host, perhaps, of which this host has not heard yet
            refreshed = True


def _identity(path: Path) -> tuple[int, int] | None:
    with SuppressGone():
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return None


def _inspect(path: Path, key: str) -> DirState:
    marker = read_marker(path)
    if marker is None:
        empty = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
        return DirState.ABSENT if empty else DirState.FOREIGN
    if marker.key != key:
        return DirState.OTHER_KEY
    return DirState.VALID if all(_exists(path, entry) for entry in marker.files) else DirState.DAMAGED


def read_marker(path: Path) -> Marker | None:
    """The marker of a directory; None if there is no valid one."""
    marker = read_record(path / MARKER_NAME, Marker)
    if marker is None or marker.version != _VERSION:
        return None
    for entry in marker.files:
        check_data_name(entry.name, path / MARKER_NAME)
    return marker


def _exists(path: Path, entry: FileEntry) -> bool:
    with SuppressGone():
        status = os.lstat(path / entry.name)
        if entry.nbytes >= 0 and status.st_size != entry.nbytes and stat.S_ISREG(status.st_mode):
            status = stat_uncached(path / entry.name)  # this host may have cached an earlier size
        return stat.S_ISLNK(status.st_mode) if entry.nbytes < 0 else status.st_size == entry.nbytes
    return False


def changed_files(path: Path) -> list[str]:
    """Names of the files of a prepared directory that are missing, or whose bytes differ from what was built."""
    marker = read_marker(path)
    if marker is None:
        raise PrepareError("not a prepared directory", expected=f"a file {MARKER_NAME}", where=path)
    return [
        entry.name
        for entry in marker.files
        if not _exists(path, entry) or _digest(path / entry.name, entry.nbytes) != entry.digest
    ]


def foreign_files(path: Path) -> list[str]:
    """Names of files in a prepared directory that are not in its marker."""
    marker = read_marker(path)
    expected = {MARKER_NAME} if marker is None else {MARKER_NAME, *(entry.name for entry in marker.files)}
    return sorted({file.relative_to(path).as_posix() for file in _files(path)} - expected)


def refuse_foreign_files(path: Path, state: DirState) -> None:
    """Raise PrepareError if replacing the directory would remove files that prepare_once did not create."""
    if state in (DirState.ABSENT, DirState.VALID):
        return
    with _unreadable(path):
        names = foreign_files(path) if path.is_dir() else ["a file"]
    if names or state is DirState.FOREIGN:
        raise PrepareError(
            "the directory contains files that prepare_once did not create",
            expected="no directory, an empty one, or one that prepare_once created",
            found=listed(names),
            where=path,
            remedy="move them away, or choose another directory; prepare_once never removes files of others",
        )


def write_marker(staging: Path, key: str, host: str, seconds: float) -> None:
    """Flush all files of a build to disk and write the marker that lists them."""
    # A marker that was copied from another directory is not a file of this build.
    paths = sorted(path for path in _files(staging) if path != staging / MARKER_NAME)
    if not paths:
        raise PrepareError(
            "the build produced no files", where=staging, remedy="write into the directory passed to the function"
        )
    files = in_parallel(partial(_flushed, staging), paths)
    for folder, _, _ in os.walk(staging, topdown=False):
        fsync_dir(folder)
    write_record(staging / MARKER_NAME, Marker(_VERSION, key, host, round(seconds, 3), files))


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder, onerror=raise_error):
        yield from (Path(place, name) for name in files)
        yield from (Path(place, name) for name in folders if os.path.islink(os.path.join(place, name)))


def _flushed(staging: Path, path: Path) -> FileEntry:
    name = path.relative_to(staging).as_posix()
    status = os.lstat(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PrepareError("a file name is not valid UTF-8", found=os.fsencode(name), where=staging) from error
    check_data_name(name, staging)  # as a reader of the marker does
    if stat.S_ISLNK(status.st_mode):
        return FileEntry(name, -1, _digest(path, -1))
    if not stat.S_ISREG(status.st_mode):
        raise PrepareError(
            "the build produced something other than files, directories and links",
            found=stat.filemode(status.st_mode),
            where=name,
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return FileEntry(name, status.st_size, _digest(path, status.st_size))


def _digest(path: Path, nbytes: int) -> str:
    return file_digest(path) if nbytes >= 0 else digest_of(os.fsencode(os.readlink(path)))
