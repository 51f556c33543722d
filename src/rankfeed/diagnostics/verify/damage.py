"""What is wrong with data, and pieces of data that can be looked at one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from rankfeed.errors import RankfeedError

#: Told the number of bytes that were read; raises where the check is to stop.
Step = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

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
        """As an error says."""
        texts = ["" if fact is None else str(fact)[:500] for fact in (error.expected, error.found)]
        return cls(error.summary, str(error.where or where), *texts)

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        facts = [f"expected {self.expected}"] * bool(self.expected) + [f"found {self.found}"] * bool(self.found)
        return ": ".join([self.where, ", ".join([self.what, *facts])])


@dataclass(frozen=True)
class Piece:
    """A part of the data that is checked in one go.

    Args:
        key: changes with what would change the outcome: path, size, times, inode and expected checksum.
        nbytes: about what is read, for the bar.
        check: yields what is wrong.
    """

    key: tuple[object, ...]
    nbytes: int
    check: Callable[[Step], Iterator[Damage]] = field(repr=False)


def stamp(path: str | os.PathLike[str]) -> tuple[str, int, int, int, int]:
    """A file by name, bytes, times and inode; -1 where there is none.

    A copy may have the name, the bytes and the time of another file, as that on another host has which shares the
    cache; it has neither its inode nor its time of change, which nobody sets.
    """
    try:
        found = os.stat(path)
    except OSError:
        return os.path.abspath(path), -1, -1, -1, -1
    return os.path.abspath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
