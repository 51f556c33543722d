"""The part of the key that comes from ``inputs=``: names, sizes and times of the input files."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rankfeed.errors import PrepareError
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.file_errors import os_errors
from rankfeed.storage.network_fs import stat_uncached


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
