"""Open files that are costly to open again: the most recently used, within the process's limit of open files."""

import errno
import resource
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rankfeed._util.signals import reraise_interrupt
from rankfeed.errors import SourceError

_Value = TypeVar("_Value")

#: All caches together keep this part of the files that the process may open.
_SHARE = 4


class HandleCache(Generic[_Value]):
    """At most ``max_open`` open files by number, oldest use first. Thread- and fork-safe; pickles empty."""

    # No lock, which a fork could leave locked: two threads that open the same file do no harm. A plain dict in the
    # order of use, each of whose operations is atomic; an OrderedDict breaks if several threads change it.

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._values: dict[int, _Value] = {}
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, index: int, open_file: Callable[[], _Value]) -> _Value:
        """The open file of a number, opened if necessary; others are closed to stay within the limits."""
        try:
            handle = self._values[index] = self._values.pop(index)
            return handle
        except KeyError:  # also if another thread is just closing it
            pass
        for is_second in (False, True):
            try:
                handle = open_file()
                break
            except (OSError, SourceError) as error:
                if not _is_too_many_open_files(error):
                    raise
                if is_second:
                    raise SourceError(
                        "too many files are open",
                        expected="enough for the files that the rows of one batch are in",
                        found="the limit of the process, or of the machine, is reached",
                        where=getattr(error, "where", None),
                        remedy="raise the limit before the job starts (`ulimit -n`), or write fewer files",
                    ) from error
            _shrink_all(0)
        self._values[index] = handle
        while len(self._values) > self._max_open:
            self._close_oldest()
        _shrink_all(open_file_limit())
        return handle

    def values(self) -> list[_Value]:
        return list(self._values.values())

    def _close_oldest(self) -> None:
        try:
            self._values.pop(next(iter(self._values)), None)
        except (StopIteration, RuntimeError) as error:  # another thread has closed it, or is changing the dict
            reraise_interrupt(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return HandleCache, (self._max_open,)


_caches: weakref.WeakSet[HandleCache[Any]] = weakref.WeakSet()


def _shrink_all(max_open: int) -> None:
    """Close files of the largest caches until at most ``max_open`` are open."""
    while True:
        try:
            caches = list(_caches)
        except RuntimeError as error:  # another thread creates a cache
            reraise_interrupt(error)
            continue
        if sum(map(len, caches)) <= max_open:
            return
        max(caches, key=len)._close_oldest()


def _is_too_many_open_files(error: BaseException | None) -> bool:
    code = getattr(error, "errno", None)
    return error is not None and (code in (errno.EMFILE, errno.ENFILE) or _is_too_many_open_files(error.__cause__))


def open_file_limit() -> int:
    """Files that all caches together may keep open: a part of what the process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // _SHARE)
