"""Using the Lance library in this process, or in a helper process if it would crash here.

The library starts threads at its first use; of processes that are forked later and use it, about half crash or
hang. So opening a table uses a helper process only, and the process that reads uses the library directly. A
process that was forked from one that had imported the library reads through a helper process, which costs a copy.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from rankfeed.errors import CorruptError
from rankfeed.sources.helper_process import HelperCrash, HelperProcess
from rankfeed.sources.lance.table import LanceTable, TableInfo
from rankfeed.sources.source import check_same_data

#: Tables that a fork inherited: freeing them would run the library.
_ABANDONED: list[object] = []
_forked_from_lance = False


def forked_from_lance() -> bool:
    """Whether this process was forked from one where the library may have run, and so must not use it."""
    return _forked_from_lance


def _after_fork_in_child() -> None:
    global _forked_from_lance
    _forked_from_lance = _forked_from_lance or "lance" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class IsolatedTable:
    """A `LanceTable` in a helper process; a crash of the library is a CorruptError."""

    def __init__(self, uri: str, version: int | str | None) -> None:
        self._where = f"{uri}, version {version or 'latest'}"
        with self._crash_errors(""):
            self.helper = HelperProcess("rankfeed.sources.lance.table:LanceTable", uri, version)
        self._where = self.call("describe")

    def call(self, method: str, *arguments: Any, about: str = "") -> Any:
        """Call a method of the table; ``about`` is what it reads, for the error."""
        with self._crash_errors(about):
            return self.helper.call(method, *arguments)

    @contextmanager
    def _crash_errors(self, about: str) -> Iterator[None]:
        try:
            yield
        except HelperCrash as crash:
            raise CorruptError(
                "Lance crashed while it read the table: it may be damaged",
                found=crash,
                where=self._where + about,
                remedy="open an older version of the table (version=...), or restore it from a copy",
            ) from crash

    @property
    def closed(self) -> bool:
        """Whether the helper process ended."""
        return self.helper.closed

    def close(self) -> None:
        self.helper.close()


def inspect_table(uri: str, version: int | str | None, condition: str | None) -> TableInfo:
    """Check a table in a helper process, so that the library does not run here, and return what it knows of it."""
    with closing(IsolatedTable(uri, version)) as table:
        for fragment in table.call("check"):
            table.call("read_deletions", fragment, about=f", fragment {fragment}: its list of deleted rows")
        info: TableInfo = table.call("info", condition)
        return info


class TableHandle:
    """A table to read, opened when it is first used in a process; refused if it is another than ``info`` says."""

    def __init__(self, info: TableInfo) -> None:
        self.__setstate__((info.uri, info.version, info.digest))

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
        return self._opened().call(method, *arguments)

    def _opened(self) -> LanceTable | IsolatedTable:
        if self._process != os.getpid():
            _ABANDONED.append(self._open)
            self._reset()  # a lock that was held at the fork is never released here
        with self._lock:
            if self._open is None or self._open.closed:
                table = (IsolatedTable if forked_from_lance() else LanceTable)(self._uri, self._version)
                check_same_data(table.call("info").digest, self._digest, table.call("describe"))
                self._open = table
            return self._open
