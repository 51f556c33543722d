"""Using the Lance library in this process, or in a helper process if it would crash here.

The library starts threads at its first use; of processes that are forked later and use it, about half crash or
hang. So opening a table uses a helper process only, and the process that reads uses the library directly. A
process that was forked from one that had imported the library reads through a helper process, which costs a copy.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.errors import CorruptError, RankfeedError
from rankfeed.sources.lance.lance_table import LanceTable, TableInfo
from rankfeed.sources.source import check_same_data

#: Seconds between two checks of the helper process that its parent still exists.
_PARENT_CHECK_SECONDS = 5.0
_PROGRAM = "import sys; from rankfeed.sources.lance.process import serve; serve(int(sys.argv[1]))"
#: Tables that a fork inherited: freeing them would run the library.
_ABANDONED: list[object] = []
_forked_from_lance = False


def forked_from_lance() -> bool:
    """Whether this process was forked from one where the library may have run, and so must not use it."""
    return _forked_from_lance


def _after_fork_in_child() -> None:
    global _forked_from_lance
    _forked_from_lance = _forked_from_lance or "lance" in sys.modules


os.register_at_fork(after_in_child=_after_fork_in_child)


class IsolatedTable:
    """A `LanceTable` in a helper process, which ends with this one; a crash of the library is a CorruptError."""

    def __init__(self, uri: str, version: int | str | None) -> None:
        self.where = f"{uri}, version {version or 'latest'}"
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self.where = self.call("open", uri, version)
        except RankfeedError:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, about: str = "") -> Any:
        """Call a method of the table; ``about`` is what it reads, for the error."""
        with self._lock:
            try:
                self._pipe.send((method, arguments))
                answer = self._pipe.recv()
            except BaseException as error:  # if interrupted, the next call must not receive this answer
                self.close()
                if not isinstance(error, (EOFError, OSError)):
                    raise
                raise CorruptError(
                    "Lance crashed while it read the table: it may be damaged",
                    found=f"exit status {self._process.returncode}",
                    where=self.where + about,
                    remedy="open an older version of the table (version=...), or restore it from a copy",
                ) from error
        if isinstance(answer, RankfeedError):
            raise answer
        return answer

    @property
    def closed(self) -> bool:
        """Whether the helper process ended."""
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """The main function of the helper process: open a table, and answer calls until the parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent
    table: Any = None
    with Connection(descriptor) as pipe:
        while True:
            while not pipe.poll(_PARENT_CHECK_SECONDS):
                if os.getppid() != parent:
                    return
            try:
                method, arguments = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                if method == "open":
                    table = LanceTable(*arguments)
                    answer = table.where
                else:
                    answer = table.call(method, *arguments)
            except RankfeedError as error:
                answer = error
            pipe.send(answer)


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
        self._info = replace(info, schema=None, chosen=None, files=())
        self._open: LanceTable | IsolatedTable | None = None
        init_in_each_process(self._init_process)

    def _init_process(self) -> None:
        if self._open is not None:
            _ABANDONED.append(self._open)
        self._open, self._lock = None, threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TableHandle, (self._info,)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LanceTable`, from any thread."""
        return self._opened().call(method, *arguments)

    def _opened(self) -> LanceTable | IsolatedTable:
        with self._lock:
            if self._open is None or self._open.closed:
                table = (IsolatedTable if forked_from_lance() else LanceTable)(self._info.uri, self._info.version)
                check_same_data(table.call("info").digest, self._info.digest, table.where)
                self._open = table
            return self._open
