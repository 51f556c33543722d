"""Where the Lance library runs: in this process, or in one beside it.

The library starts threads at its first use and does not survive a fork after that: of the children that use it,
about half crash or hang. So a source never uses it where it is only opened (a process beside this one looks at the
table, says what is there, and ends), and the process that reads uses it directly. There remains the process that
was forked from one where the library ran, because somebody looked at a row before starting worker processes, or
used Lance by hand: it reads through a process beside it, which costs a copy, and is right.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rankfeed.errors import CorruptError, RankfeedError, SourceError
from rankfeed.sources.lance.table import Facts, LanceTable

#: How the library's threads are called, cut to what Linux keeps of a name.
_THREADS = ("lance_backgroun", "lance-cpu", "lance-io")
#: The process beside this one looks this often whether there is still somebody to answer.
_LOOK_UP_SECONDS = 5.0

_ABANDONED: list[object] = []
_ran_at_fork = False
_forked_from_lance = False


def runs_here() -> bool:
    """Whether the library has started its threads in this process."""
    if "lance" not in sys.modules:
        return False
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return True  # nothing to see it by: an imported library may have run
    for task in tasks:
        with suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().strip() in _THREADS:
                return True
    return False


def _before_fork() -> None:
    global _ran_at_fork
    _ran_at_fork = runs_here()


def _after_fork_in_child() -> None:
    global _forked_from_lance
    _forked_from_lance = _forked_from_lance or _ran_at_fork


def forked_from_lance() -> bool:
    """Whether this process descends by fork from one where the library ran, and so must not use it."""
    return _forked_from_lance


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def facts(uri: str, version: int | str | None, condition: str | None) -> Facts:
    """What there is to know of a table, found out by a process beside this one.

    So nothing of the library has run here if this process forks yet, and a table so damaged that the library
    takes its process down with it is an error like others.

    Raises:
        SourceError, CorruptError, ArgumentError: as of :class:`LanceTable`.
    """
    with closing(Beside(uri, version)) as beside:
        beside.call("check")
        deleted = beside.call("deleted_from")
        try:
            beside.call("try_deletions", deleted)
        except Crash as error:
            raise _blamed(error, beside, deleted) from None
        found = beside.call("facts", condition)
        assert isinstance(found, Facts)
        return found


def _blamed(error: Crash, beside: Beside, fragments: list[int]) -> Crash:
    """The error with the fragment that it comes from, found by trying them one after the other."""
    again = Beside(beside.uri, beside.version)
    with closing(again):
        for fragment in fragments:
            try:
                again.call("try_deletions", [fragment])
            except Crash:
                where = f"{error.where}, fragment {fragment}: its list of deleted rows"
                return Crash(error.summary, found=error.found, where=where, remedy=error.remedy)
    return error


class Handle:
    """A table to read from, opened at the first need in the process that reads. Pickles as URI and version.

    Args:
        facts: of the table when its source was opened; another state is refused.
    """

    def __init__(self, facts: Facts) -> None:
        self._uri, self._version, self._digest = facts.uri, facts.version, facts.digest
        self._forget()

    def _forget(self) -> None:
        self._open: LanceTable | Beside | None = None
        self._lock = threading.Lock()
        # Last: from here on other threads of a child take what is open for their own process's.
        self._process = os.getpid()

    def __getstate__(self) -> tuple[str, int, str]:
        return self._uri, self._version, self._digest

    def __setstate__(self, state: tuple[str, int, str]) -> None:
        self._uri, self._version, self._digest = state
        self._forget()

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of :class:`LanceTable` returns; from any thread."""
        table = self._opened()
        if isinstance(table, LanceTable):
            return getattr(table, method)(*arguments)
        return table.call(method, *arguments)

    def _opened(self) -> LanceTable | Beside:
        if self._process != os.getpid():
            _ABANDONED.append(self._open)  # the parent's: freeing it here would run the library
            self._forget()  # its lock, if it was held, would never be let go here
        with self._lock:
            if self._open is None or (isinstance(self._open, Beside) and self._open.closed):
                table = (Beside if forked_from_lance() else LanceTable)(self._uri, self._version)
                found = table.call("facts") if isinstance(table, Beside) else table.facts()
                if found.digest != self._digest:
                    raise SourceError(
                        "the table was replaced while it was in use",
                        expected=self._digest,
                        found=found.digest,
                        where=f"{self._uri}, version {self._version}",
                        remedy="start the job again",
                    )
                self._open = table
            return self._open


class Crash(CorruptError):
    """The library ended its process."""


class Beside:
    """A process that has a table open and answers one call after the other. It ends with this one."""

    def __init__(self, uri: str, version: int | str | None) -> None:
        self.uri, self.version = uri, version
        self._lock = threading.Lock()
        here, there = Pipe()
        self._pipe: Connection[Any, Any] = here
        program = "import sys; from rankfeed.sources.lance.process import serve; serve(int(sys.argv[1]))"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
            )
        self.version = self.call("open", uri, version)

    def call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((method, arguments))
                answer = self._pipe.recv()
            except (EOFError, OSError) as error:
                self.close()
                raise Crash(
                    "Lance crashed while it read the table: it may be damaged",
                    found=f"exit status {self._process.returncode}",
                    where=f"{self.uri}, version {self.version or 'latest'}",
                    remedy="open an older version of the table (version=...), or restore it from a copy",
                ) from error
            except BaseException:  # an interrupt: the answer on its way must not be taken for the next one
                self.close()
                raise
        if isinstance(answer, RankfeedError):
            raise answer
        return answer

    @property
    def closed(self) -> bool:
        """Whether it was closed, or ended."""
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """What the process beside does: answer calls until nobody is there to ask."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the one who asks
    table: LanceTable | None = None
    with Connection(descriptor) as pipe:
        while True:
            while not pipe.poll(_LOOK_UP_SECONDS):
                if os.getppid() != parent:
                    return
            try:
                method, arguments = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                if table is None:
                    table = LanceTable(*arguments)
                    pipe.send(table.version)
                else:
                    pipe.send(getattr(table, method)(*arguments))
            except RankfeedError as error:
                pipe.send(error)
