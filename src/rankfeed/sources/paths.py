"""Lists the files named by a path, a pattern or a list of them, in order."""

import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rankfeed._util.validate import check_path, invalid
from rankfeed.errors import ArgumentError, SourceError, listed
from rankfeed.storage.commit import is_temporary
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.ledger import SUFFIX as LEDGER_SUFFIX
from rankfeed.storage.manifest import MANIFEST_NAME, STAGING_NAME

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

#: Appended to the name of a tar shard for the name of its index.
INDEX_SUFFIX = ".rankfeed"
#: Prefix of hidden files and directories that rankfeed writes beside data: locks, staging directories, markers.
_HIDDEN_PREFIX = ".rankfeed-"
#: Directories beside data in which rankfeed writes files with names of data: staging, and decompressed copies.
_OWN_FOLDERS = frozenset((STAGING_NAME, ".rankfeed-decompressed"))

#: Not ``[{]``, which is a brace in the name of a file.
_BRACES = re.compile(r"\{(?!\])([^{}]*)\}")
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
#: A number with leading zeros.
_PADDED = re.compile(r"-?0[0-9]+")
#: Files that one pattern may name.
_MOST = 10_000_000
#: Folders that are searched to learn what is in a folder, so that a cycle of links ends.
_SEARCHED_FOLDERS = 1000


def expand(where: Paths) -> list[str]:
    """The files of a path, a glob (``*.tar``), a brace pattern (``{000..012}``, ``{a,b}``), or a list of these.

    A path that exists is no pattern. Braces are expanded in their order; matches of a glob are sorted naturally.
    Files that rankfeed wrote beside the data are left out. A file that does not exist and a pattern without a
    match are a SourceError.
    """
    paths: list[str] = []
    for pattern in [where] if isinstance(where, (str, os.PathLike)) else where:
        text = os.fspath(pattern)
        for path in [text] if os.path.exists(text) else braces(text):
            if os.path.exists(path):
                paths.append(path)
            elif not glob.has_magic(path):
                raise SourceError("no such file or folder", where=path, remedy=_escape_remedy(text))
            elif matches := sorted(glob.glob(path, recursive=True), key=natural):
                paths += matches
            else:
                raise SourceError("no file matches the pattern", where=path, remedy=_escape_remedy(text))
    data = [path for path in paths if not is_side_file(path)]
    if paths and not data:
        raise SourceError(
            "rankfeed wrote these files itself, beside data: they are not data",
            expected="files of data, or a folder of them",
            found=listed([os.path.basename(path) for path in paths]),
            where=os.path.dirname(paths[0]) or os.curdir,
            remedy="open the data by their own names, or the folder",
        )
    for path in data:
        check_kind(path)
    return data


def is_side_file(path: str) -> bool:
    """Whether rankfeed writes files of this name beside data: indexes, manifests, ledgers, locks and so on."""
    *folders, name = path.split(os.sep)
    if name.startswith(_HIDDEN_PREFIX) or not _OWN_FOLDERS.isdisjoint(folders):
        return True
    is_named = name == MANIFEST_NAME or name.endswith((INDEX_SUFFIX, LEDGER_SUFFIX)) or is_temporary(name)
    return is_named and not os.path.isdir(path)


def escape(path: str) -> str:
    """A pattern that only this path matches.

    Examples:
        >>> escape("run[1]/{a,b}")
        'run[[]1]/[{]a,b}'
    """
    return glob.escape(path).replace("{", "[{]")


def _escape_remedy(pattern: str) -> str | None:
    """How to write a pattern in an existing folder whose name has signs of a pattern; None for another folder."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if not (glob.has_magic(folder) or _BRACES.search(folder)):
        return None
    braces = ".replace('{', '[{]')" if "{" in folder else ""
    return f"escape the folder's name: rankfeed.open(glob.escape({folder!r}){braces} + {pattern[len(folder) :]!r})"


def check_kind(path: str) -> None:
    """Refuse broken links, whose samples would be missing, and pipes and devices, which may block forever."""
    try:
        kind = os.stat(path).st_mode
    except (OSError, ValueError):
        if os.path.islink(path):
            raise SourceError(
                "a symbolic link is broken",
                found=f"a link to {os.readlink(path)}",
                where=path,
                remedy="fetch the file that it leads to, or remove the link",
            ) from None
        return  # opening it raises the error
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise SourceError("this is neither a file nor a folder", found=stat.filemode(kind), where=path)


def braces(pattern: str) -> Iterator[str]:
    """Expand braces: ranges keep their width, lists their order, and the first brace varies slowest."""
    for brace in _BRACES.finditer(pattern):
        words = _words(brace[1])
        if words is not None:
            before, after = pattern[: brace.start()], pattern[brace.end() :]
            return (f"{before}{word}{rest}" for word in words for rest in braces(after))
    return iter((pattern,))


def _words(content: str) -> Iterator[str] | None:
    """The words that the content of a brace expands to; None if it is neither a list nor a range."""
    span = _RANGE.fullmatch(content)
    if span is None:
        return iter(content.split(",")) if "," in content else None
    first, last = int(span[1]), int(span[2])
    if abs(last - first) >= _MOST:
        raise ArgumentError("a pattern expands to too many files", expected=f"up to {_MOST}", found=content)
    width = max(map(len, span.groups())) if any(map(_PADDED.fullmatch, span.groups())) else 0
    step = 1 if first <= last else -1
    return (f"{number:0{width}d}" for number in range(first, last + step, step))


def files_in(
    folder: str | os.PathLike[str],
    suffixes: Sequence[str],
    recursive: bool = False,
    skip: tuple[str, ...] = (".", "_"),
) -> list[str]:
    """Files of a directory with one of some suffixes, in natural order.

    Names that begin with one of ``skip`` are left out: hidden files, and by convention files that are not data.
    """
    files: list[str] = []
    pending, seen = [os.fspath(folder)], set()
    while pending:
        current = pending.pop()
        if (real := os.path.realpath(current)) in seen:
            continue  # a cycle of links
        seen.add(real)
        with os_errors(SourceError, "the folder cannot be read", current):
            for entry in os.scandir(current):
                if entry.name.startswith(skip) or is_side_file(entry.path):
                    continue
                if recursive and entry.is_dir():
                    pending.append(entry.path)
                elif entry.name.endswith(tuple(suffixes)):
                    if entry.is_file():
                        files.append(entry.path)
                    else:
                        check_kind(entry.path)
    return sorted(files, key=natural)


def walk(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and the first thousand at any depth, each with the names of its files; hidden ones are left out."""
    for parent, folders, names in islice(os.walk(folder, followlinks=True), _SEARCHED_FOLDERS):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural)
        yield parent, [name for name in names if not name.startswith(".")]


def files_at(where: Paths, suffixes: Sequence[str]) -> list[str]:
    """The given files, and those of given directories; a SourceError if a directory has none with a suffix."""
    files: list[str] = []
    for path in expand(where):
        inside = files_in(path, suffixes) if os.path.isdir(path) else [path]
        if not inside:
            raise SourceError(f"no {suffixes[0]} files in the folder", expected=" or ".join(suffixes), where=path)
        files += inside
    return files


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key with which 2 comes before 10."""
    # Not \d, which matches digits of other scripts too.
    pieces = re.split(r"([0-9]+)", name)
    return [(1, int(piece), "") if index % 2 else (0, 0, piece) for index, piece in enumerate(pieces)], name


def common_root(paths: Sequence[str]) -> str:
    """The directory that names in a fingerprint are relative to, so that the mount point does not matter."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths]) if paths else ""


def label(paths: Sequence[str]) -> str:
    """A short description of files for a repr."""
    return paths[0] if len(paths) == 1 else f"{len(paths)} files in {common_root(paths)}"


def head(path: str | os.PathLike[str], size: int) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""


def check_utf8(path: str, where: str, description: str) -> None:
    """Refuse a path that is not UTF-8, if a library or a column needs text; ``description`` names it."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        name, remedy = repr(os.fsencode(path)), "rename the file or folder"
        raise SourceError(f"{description} has to be UTF-8", found=name, where=where, remedy=remedy) from error


def as_paths(uri: Any) -> Paths:
    """The ``uri`` argument of `rankfeed.open` as a str or a list of str."""
    paths = [uri] if isinstance(uri, (str, os.PathLike)) else uri
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise invalid("uri", "a path, or a list of paths", uri)
    texts = [check_path("uri", path) for path in paths]
    return texts if paths is uri else texts[0]
