"""Pieces of a data set that are verified one by one, and those that an interrupted check has verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rankfeed.errors import RankfeedError
from rankfeed.sources.tar.index_cache import cache_folder
from rankfeed.storage.checksum import digest_of

#: Called with the number of bytes that were read; raises if the check is to stop.
Step = Callable[[int], None]
#: Yields what is wrong; an error that it raises is damage as well.
Check = Callable[[Step], "Iterable[Damage] | None"]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with data.

    Attributes:
        what: in a few words.
        where: file, and offset, row or sample in it.
        expected, found: what should be there, and what is.
    """

    what: str
    where: str
    expected: str = ""
    found: str = ""

    @classmethod
    def of(cls, error: RankfeedError, where: object = "") -> Damage:
        """As an error reports it."""
        texts = ["" if fact is None else str(fact)[:500] for fact in (error.expected, error.found)]
        return cls(error.summary, str(error.where or where), *texts)

    def __str__(self) -> str:
        facts = [f"expected {self.expected}"] * bool(self.expected) + [f"found {self.found}"] * bool(self.found)
        return ": ".join([self.where, ", ".join([self.what, *facts])])


@dataclass(frozen=True)
class DataPiece:
    """A part of the data."""

    key: tuple[object, ...]  # begins with the path
    nbytes: int  # that the check reads
    check: Check = field(repr=False)


def file_stamp(path: str | os.PathLike[str]) -> tuple[str, int, int, int, int]:
    """Path, bytes, times and inode of a file; -1 if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.abspath(path), -1, -1, -1, -1
    return os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class VerifiedPieces:
    """Keys of the pieces that an interrupted check found intact, a line each in the user's cache."""

    def __init__(self, name: str, cache_dir: str | None, *, resume: bool) -> None:
        self._path = Path(cache_folder(cache_dir), "verify", digest_of(os.fsencode(name))[:16])
        self._known: frozenset[str] = frozenset()
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                self._known = frozenset(self._path.read_text(errors="replace").splitlines())
            else:
                self.clear()

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
