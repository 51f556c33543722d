"""Using the Lance library in this process, or in a helper process if it would crash here.

The library starts threads at its first use; of processes that are forked later and use it, about half crash or
hang. So opening a table uses a helper process only, and the process that reads uses the library directly. A
process that was forked from one where the library ran reads through a helper process, which costs a copy.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from rankfeed.errors import CorruptError, RankfeedError
from rankfeed.sources.helper_process import HelperCrash, HelperProcess
from rankfeed.sources.lance.table import LanceTable, TableInfo
from rankfeed.sources.source import check_same_data, with_where

#: Names of the library's threads, cut to 15 characters as on Linux.
_THREADS = ("lance_backgroun", "lance-cpu", "lance-io")

#: Tables that a fork inherited: freeing them would run the library.
_ABANDONED: list[object] = []
_ran_at_fork = False
_forked_from_lance = False


def runs_here() -> bool:
    """Whether the library has started threads in this process."""
    if "lance" not in sys.modules:
        return False
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return True  # unknown: an imported library may have started them
    for task in tasks:
        with suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().strip() in _THREADS:
                return True
    return False


def forked_from_lance() -> bool:
    """Whether this process was forked from one where the library ran, and so must not use it."""
    return _forked_from_lance


def _before_fork() -> None:
    global _ran_at_fork
    _ran_at_fork = runs_here()


def _after_fork_in_child() -> None:
    global _forked_from_lance
    _forked_from_lance = _forked_from_lance or _ran_at_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


class LanceCrashError(CorruptError):
    """The library ended its process."""


class IsolatedTable:
    """A `LanceTable` in a helper process."""

    def __init__(self, uri: str, version: int | str | None) -> None:
        self.uri, self.version = uri, version
        with self._crash_errors():
            self.helper = HelperProcess("rankfeed.sources.lance.table:LanceTable", uri, version)
        self.version = self.call("resolved_version")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the table."""
        with self._crash_errors():
            return self.helper.call(method, *arguments)

    @contextmanager
    def _crash_errors(self) -> Iterator[None]:
        try:
            yield
        except HelperCrash as crash:
            raise LanceCrashError(
                "Lance crashed while it read the table: it may be damaged",
                found=crash,
                where=f"{self.uri}, version {self.version or 'latest'}",
                remedy="open an older version of the table (version=...), or restore it from a copy",
            ) from crash

    @property
    def closed(self) -> bool:
        """Whether the helper process ended."""
        return self.helper.closed

    def close(self) -> None:
        """End the helper process."""
        self.helper.close()


def inspect_table(uri: str, version: int | str | None, condition: str | None) -> TableInfo:
    """Check a table in a helper process, and return its schema, fragments and counts.

    So the library does not run in this process, and a table that crashes it is an error like others.
    """
    with closing(IsolatedTable(uri, version)) as table:
        table.call("check")
        fragments = table.call("fragments_with_deletions")
        try:
            table.call("read_deletions", fragments)
        except LanceCrashError as error:
            raise _with_fragment(error, table, fragments) from None
        info: TableInfo = table.call("info", condition)
        return info


def _with_fragment(error: LanceCrashError, table: IsolatedTable, fragments: list[int]) -> RankfeedError:
    """The error with the fragment that causes it, found by reading one after the other."""
    with closing(IsolatedTable(table.uri, table.version)) as again:
        for fragment in fragments:
            try:
                again.call("read_deletions", [fragment])
            except LanceCrashError:
                return with_where(error, f"{error.where}, fragment {fragment}: its list of deleted rows")
    return error


class TableHandle:
    """A table to read, opened when it is first used in a process. Pickles as URI and version.

    Args:
        info: of the table when its source was opened; another state is refused.
    """

    def __init__(self, info: TableInfo) -> None:
        self._uri, self._version, self._digest = info.uri, info.version, info.digest
        self._reset()

    def _reset(self) -> None:
        self._open: LanceTable | IsolatedTable | None = None
        self._lock = threading.Lock()
        # Last: then other threads of a forked child consider the table open in this process.
        self._process = os.getpid()

    def __getstate__(self) -> tuple[str, int, str]:
        return self._uri, self._version, self._digest

    def __setstate__(self, state: tuple[str, int, str]) -> None:
        self._uri, self._version, self._digest = state
        self._reset()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LanceTable`, from any thread."""
        table = self._opened()
        if isinstance(table, LanceTable):
            return getattr(table, method)(*arguments)
        return table.call(method, *arguments)

    def _opened(self) -> LanceTable | IsolatedTable:
        if self._process != os.getpid():
            _ABANDONED.append(self._open)
            self._reset()  # a lock that was held at the fork is never released here
        with self._lock:
            if self._open is None or (isinstance(self._open, IsolatedTable) and self._open.closed):
                table = (IsolatedTable if forked_from_lance() else LanceTable)(self._uri, self._version)
                info = table.call("info") if isinstance(table, IsolatedTable) else table.info()
                check_same_data(info.digest, self._digest, f"{self._uri}, version {self._version}")
                self._open = table
            return self._open
