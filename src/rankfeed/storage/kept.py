"""What is costly to open and stays open: the last ones used, up to a number of them, and of the process."""

from __future__ import annotations

import errno
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rankfeed.errors import SourceError

_Value = TypeVar("_Value")

#: So many of the files that a process may open are kept, all that is read together: others need some too.
_SHARE = 4


class Kept(Generic[_Value]):
    """Open files by number. Safe to use from several threads, and after fork; it travels empty.

    Examples:
        >>> kept = Kept()
        >>> [kept.get(number, lambda number=number: [number], most=2) for number in (1, 2, 1, 3)]
        [[1], [2], [1], [3]]
        >>> len(kept)
        2
    """

    # No lock, which a fork could leave held: two threads that open one file do no harm. A plain dict in the order
    # of use, each of whose operations is one step; an OrderedDict breaks where several threads change it.

    def __init__(self) -> None:
        self._values: dict[int, _Value] = {}
        _all.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, number: int, opened: Callable[[], _Value], *, most: int) -> _Value:
        """The value of a number, opened if it has to be; of others, no more than ``most`` in all stay.

        Raises:
            SourceError: what is in use already is all that the process may open.
        """
        with suppress(KeyError):  # also where another thread lets go of it just now
            value = self._values[number] = self._values.pop(number)
            return value
        try:
            value = opened()
        except (OSError, SourceError) as error:
            if not _too_many(error):
                raise
            _close_all_but(0)
            value = _opened_after_all(opened)
        self._values[number] = value
        while len(self._values) > most:
            self.close_one()
        _close_all_but(_most_open())
        return value

    def close_one(self) -> None:
        """Let go of the one that was used longest ago."""
        with suppress(StopIteration, RuntimeError):  # another thread was there first, or is there now
            self._values.pop(next(iter(self._values)), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()


#: All that there are in this process.
_all: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def _close_all_but(most: int) -> None:
    """Keep no more than that, over all data sets: those with most of them give first."""
    while True:
        with suppress(RuntimeError):  # another thread opens a data set
            kept = list(_all)
            if sum(map(len, kept)) <= most:
                return
            max(kept, key=len).close_one()


def _too_many(error: BaseException | None) -> bool:
    """Whether an error, or what it comes from, is that no more files may be opened."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def _opened_after_all(opened: Callable[[], _Value]) -> _Value:
    try:
        return opened()
    except (OSError, SourceError) as error:
        if not _too_many(error):
            raise
        raise SourceError(
            "too many files are open",
            expected="as many as the rows of one batch lie in, and some for others",
            found="the limit of the process, or of the machine, is reached",
            where=getattr(error, "where", None),
            remedy="raise the limit before the job starts (`ulimit -n`), or write the data to fewer files",
        ) from error


def _most_open() -> int:
    """How many files may be kept open: a mapping takes one of those that the process may open, as a file does."""
    try:
        import resource
    except ImportError:  # not Unix
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // _SHARE)
