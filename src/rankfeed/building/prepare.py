"""Data prepared once, by whichever process comes first; all others wait until they are there.

The file system is the truth, and there is no collective: any processes may call, of one job or of several, on one
host or on many, at any time. One holds the lease and builds into a folder of its own; a rename commits it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, overload

from rankfeed._util.validate import (
    check_callable,
    check_choice,
    check_int,
    check_paths,
    check_seconds,
    check_str,
    invalid,
)
from rankfeed.building.failure import cannot_write, find_failure, next_attempt
from rankfeed.building.hint import Hint, communicator
from rankfeed.building.holder import Watch, place_in_job
from rankfeed.building.inside import inside, refuse_inside
from rankfeed.building.lease import Leases
from rankfeed.building.patience import Patience
from rankfeed.building.prepared import State, key_of, look, refuse_strangers
from rankfeed.building.replacing import refuse_fixed
from rankfeed.building.target import control_folder, folder_meant
from rankfeed.building.turn import Build, Turn
from rankfeed.errors import PrepareError, RankfeedError
from rankfeed.storage import is_gone, refresh_path
from rankfeed.topology.job import job_id

Scope = Literal["shared", "node"]

#: Seconds between looks, at first and at most.
_FIRST_LOOK, _LAST_LOOK = 0.01, 0.5
#: Seconds after another process was faster in taking the lease.
_LOST = 0.01
#: Times that a build may be taken over before its process gives up.
_LOSSES = 5


@overload
def prepare_once(
    path: str | os.PathLike[str],
    build: Build,
    *,
    key: str = ...,
    scope: Scope = ...,
    retries: int = ...,
    timeout: float | None = ...,
    inputs: Sequence[str | os.PathLike[str]] = ...,
    comm: Any = ...,
) -> Path: ...
@overload
def prepare_once(
    path: str | os.PathLike[str],
    build: None = ...,
    *,
    key: str = ...,
    scope: Scope = ...,
    retries: int = ...,
    timeout: float | None = ...,
    inputs: Sequence[str | os.PathLike[str]] = ...,
    comm: Any = ...,
) -> Preparation: ...
def prepare_once(
    path: str | os.PathLike[str],
    build: Build | None = None,
    *,
    key: str = "",
    scope: Scope = "shared",
    retries: int = 0,
    timeout: float | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
    comm: Any = None,
) -> Path | Preparation:
    """Have a folder built by one process, whichever comes first; all others wait for it.

    Call it alike in every process that needs the folder. It needs no process group, and nobody has to take part:
    ``build(staging)`` writes into a private folder, its files are flushed, listed with sizes and checksums, and
    one rename brings all of it to ``path``. A builder that dies is replaced by one of those who wait.

    Without ``build`` it returns a :class:`Preparation`, which is a decorator and a context manager.

    Args:
        path: folder to be there in the end. It must not hold what nobody prepared.
        build: called with an empty folder to write into.
        key: what is built, in a word; a folder that was prepared with another key is replaced. Files of the old
            one that are held open stay readable.
        scope: "shared": once for all who see the file system. "node": the folder lies on a disk of each node's
            own, under the same path, and is built once on each.
        retries: how often a failing build is tried again, each time in a new folder and after a longer pause.
        timeout: seconds to wait for another process that builds; None for as long as it lives.
        inputs: files and folders that it is built from: where their sizes or times differ, so does the key.
        comm: an mpi4py communicator of the processes that call, to hurry those who wait by a message (tag 28531)
            when the build is over. Nothing depends on it. An initialised torch.distributed is used so by itself.

    Returns:
        ``path``, absolute.

    Raises:
        PrepareError: the build failed (in every process of the job, with the builder's traceback as the cause;
            `sys.exit` in the build is a failure like any exception, `KeyboardInterrupt` is not), the folder
            cannot be written or holds something else, or the wait was too long.
        ArgumentError: an argument that cannot be meant.

    Examples:
        >>> import tempfile
        >>> def build(staging):
        ...     print("building")
        ...     (staging / "data.txt").write_text("hello")
        >>> folder = tempfile.mkdtemp() + "/data"
        >>> (prepare_once(folder, build, key="v1") / "data.txt").read_text()
        building
        'hello'
        >>> prepare_once(folder, build, key="v1").name  # it is there
        'data'
    """
    preparation = Preparation(
        path, key=key, scope=scope, retries=retries, timeout=timeout, inputs=inputs, comm=comm
    )
    return preparation if build is None else preparation.run(check_callable("build", build))


class Preparation:
    """A folder that is to be prepared once: a decorator for what builds it, or a context manager around that.

    The arguments are those of `prepare_once`. A context manager's body runs once, so there are no retries there.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/data"
        >>> @prepare_once(folder)
        ... def data(staging):
        ...     (staging / "data.txt").write_text("hello")
        >>> data().name
        'data'
        >>> with prepare_once(folder) as staging:
        ...     if staging is not None:  # None where it is there already, or another process has built it
        ...         (staging / "data.txt").write_text("hello")
        >>> staging is None
        True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str = "",
        scope: Scope = "shared",
        retries: int = 0,
        timeout: float | None = None,
        inputs: Sequence[str | os.PathLike[str]] = (),
        comm: Any = None,
    ) -> None:
        self.path = folder_meant(path)
        self.key = check_str("key", key)
        if not self.key.isprintable():
            raise invalid("key", "one line of text", key)
        self.scope: Scope = check_choice("scope", scope, get_args(Scope))
        self.retries = check_int("retries", retries, at_least=0, at_most=2**31 - 1)
        given: Any = timeout
        endless = given is None or (isinstance(given, float) and given == math.inf)
        self.timeout = None if endless else check_seconds("timeout", timeout)
        self.inputs = tuple(check_paths("inputs", inputs))
        self.comm = communicator(comm)
        self._entered = _Entered()

    def __call__(self, build: Build) -> Callable[[], Path]:
        """The function as one without arguments, which prepares the folder and returns its path."""
        check_callable("build", build)

        @wraps(build)
        def prepared() -> Path:
            return self.run(build)

        del prepared.__wrapped__  # its arguments are not those of `build`
        return prepared

    def __enter__(self) -> Path | None:
        with ExitStack() as stack:
            turn = self._wait(stack, next_attempt(self.path))
            staging = None if turn is None else turn.begin()
            self._entered.turns.append((stack.pop_all(), turn))
        return staging

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        stack, turn = self._entered.turns.pop()
        with stack:
            if turn is None:
                return
            if error is not None and not isinstance(error, (Exception, SystemExit)):
                turn.clear()  # whoever interrupts it says nothing about the data
                return
            if error is not None:
                if not turn.lease.is_mine:
                    return  # raised in a child that the body forked, which has no part in the build
                raise (self._lost() if turn.lease.is_lost() else turn.failed(error)) from error
            done = turn.finish()
        if not done:
            with ExitStack() as stack:
                if self._wait(stack, turn.lease.me.attempt) is not None:
                    raise self._lost()

    def run(self, build: Build) -> Path:
        """Prepare the folder; as :func:`prepare_once`."""
        attempt = next_attempt(self.path)
        for _ in range(_LOSSES):
            with ExitStack() as stack:
                turn = self._wait(stack, attempt)
                if turn is None or turn.run(build, self.retries):
                    return self.path
        raise self._lost()

    def _lost(self) -> PrepareError:
        return PrepareError(
            "others took this process for dead while it was building, and began anew",
            where=self.path,
            remedy="start the job again; a builder must not be stopped for long, nor remove the lease's files",
        )

    def _wait(self, stack: ExitStack, attempt: str) -> Turn | None:
        """Wait until the folder is there (None), or until it is this process's turn to build it.

        Args:
            stack: what ends the turn.
            attempt: which one this is; the same when a turn was lost.
        """
        try:
            with Hint(self.comm) as hint, Patience(self.path, place_in_job(), self.timeout) as patience:
                return self._waited(stack, attempt, hint, patience)
        except OSError as error:
            if isinstance(error, RankfeedError):
                raise
            raise cannot_write(error, self.path) from error

    def _waited(self, stack: ExitStack, attempt: str, hint: Hint, patience: Patience) -> Turn | None:
        key = key_of(self.key, self.inputs)
        folder = control_folder(self.path)
        leases = Leases(folder)
        watch, waited_for, pause, refused = Watch(), set[str](), _FIRST_LOOK, 0
        while True:
            if self._is_there(key):
                self._tidy(leases, key)
                return None
            failure = find_failure(folder, waited_for, attempt, job_id(), key)
            if failure is not None:
                raise failure.error()
            holder = leases.holder()
            if holder is None or leases.is_dead(holder, watch):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(hint.tell)
                try:
                    lease = stack.enter_context(leases.claimed(holder, patience.me, attempt))
                except OSError as error:
                    refused += 1
                    # The second is what making a folder says where another process removes it just then.
                    if refused == _LOSSES or not (is_gone(error) or isinstance(error, FileExistsError)):
                        raise
                    continue  # somebody tidied up just then
                if lease is not None:
                    hint.turn = lease.me.name
                    # What was seen before may have ended meanwhile: look again, now that nobody else builds.
                    failure = find_failure(folder, waited_for, attempt, job_id(), key)
                    if failure is not None:
                        raise failure.error()
                    refresh_path(self.path)  # another host may have built it, or another one, a moment ago
                    if self._is_there(key):
                        return None
                    refuse_fixed(self.path, look(self.path, key), folder)
                    stack.enter_context(inside(lease.me.name))
                    return Turn(self.path, folder, key, lease)
                stack.close()
                time.sleep(_LOST)  # this host may not have heard of the faster one yet
                continue
            waited_for.add(holder.name)
            refuse_inside(holder, self.path)
            patience.check(holder, folder)
            hinted = hint.wait(holder.name, pause)
            with suppress(OSError):  # a network file system may take a folder for what it was a minute ago
                os.close(os.open(self.path.parent, os.O_RDONLY))
            pause = _FIRST_LOOK if hinted else min(_LAST_LOOK, pause * 1.5)

    def _tidy(self, leases: Leases, key: str) -> None:
        """Remove what others left who died: one that had just committed, say."""
        with suppress(OSError):  # the data are there, and may be all that this process can see or write
            if leases.folder.exists():
                holder = leases.holder()
                if holder is None or leases.is_dead(holder, Watch()):
                    with leases.claimed(holder, "", "") as lease:
                        if lease is not None:
                            Turn(self.path, leases.folder, key, lease).tidy()

    def _is_there(self, key: str) -> bool:
        state = look(self.path, key)
        if state is State.FOREIGN:
            refuse_strangers(self.path, state)
        return state is State.FITS


class _Entered(threading.local):
    """The turns that a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.turns: list[tuple[ExitStack, Turn | None]] = []
