"""``rankfeed.prepare_once``: builds a directory in exactly one process; all others wait until it is complete.

The file system is the only means of agreement, and there is no collective: processes of one job or of several, on
one host or on many, may call at any time. One holds the lease and builds; a rename publishes the result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

from rankfeed._util.validate import (
    check_callable,
    check_choice,
    check_int,
    check_path,
    check_paths,
    check_seconds,
    check_str,
    invalid,
)
from rankfeed.errors import PrepareError
from rankfeed.prepare.build import Build, BuildAttempt, cannot_prepare, raise_failure
from rankfeed.prepare.marker import DirState, inspect_dir, key_with_inputs, refuse_foreign_files
from rankfeed.prepare.swap import control_dir, refuse_irreplaceable
from rankfeed.prepare.wait import ThreadStack, WaitReporter, building, refuse_reentry
from rankfeed.storage.failure import forget_failures, next_attempt
from rankfeed.storage.lease import Lease, StallDetector
from rankfeed.storage.network_fs import refresh_path

Scope = Literal["shared", "node"]

#: Times that a build may be taken over before this process gives up.
_MAX_LOSSES = 5


class _Options(TypedDict, total=False):
    key: str
    scope: Scope
    retries: int
    timeout: float | None
    inputs: Sequence[str | os.PathLike[str]]


@overload
def prepare_once(path: str | os.PathLike[str], build: Build, **options: Unpack[_Options]) -> Path: ...
@overload
def prepare_once(path: str | os.PathLike[str], build: None = None, **options: Unpack[_Options]) -> Preparation: ...
def prepare_once(
    path: str | os.PathLike[str],
    build: Build | None = None,
    *,
    key: str = "",
    scope: Scope = "shared",
    retries: int = 0,
    timeout: float | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
) -> Path | Preparation:
    """Build a directory in exactly one process; all others wait.

    Call it with the same arguments in every process that needs the directory; no process group is needed.
    ``build(staging)`` writes into a private directory. Its files are flushed and listed with sizes and checksums,
    and one rename publishes all of them at ``path``. If the building process dies, a waiting one takes over.

    Without ``build`` it returns a :class:`Preparation`, which is a decorator and a context manager.

    Args:
        path: of the directory. It must not contain files that prepare_once did not create.
        build: called with an empty directory to write into.
        key: identifies what is built. A directory that was built with another key is replaced; files of it that
            are held open stay readable.
        scope: "shared": built once per file system. "node": ``path`` is on a disk of each node, and is built once
            on each.
        retries: how often a failing build is tried again, each time in a new directory and after a longer pause.
        timeout: seconds to wait for another process; None: as long as it is alive.
        inputs: files and directories that the build reads; changes of their sizes or times change the key.

    Returns:
        ``path``, absolute.

    Raises:
        PrepareError: the build failed (raised in every process of the job, with the builder's traceback as the
            cause; `sys.exit` in the build is a failure, `KeyboardInterrupt` is not), the directory cannot be
            written or contains other files, or the timeout is over.
        ArgumentError: an argument has an invalid type or value.

    Examples:
        >>> import tempfile
        >>> def build(staging):
        ...     print("building")
        ...     (staging / "data.txt").write_text("hello")
        >>> folder = tempfile.mkdtemp() + "/data"
        >>> (prepare_once(folder, build, key="v1") / "data.txt").read_text()
        building
        'hello'
        >>> prepare_once(folder, build, key="v1").name  # already built
        'data'
    """
    text = check_path("path", path)
    target = Path(os.path.realpath(text))
    if "://" in text or not target.name:
        raise invalid("path", "a directory of a mounted file system", path)
    if not check_str("key", key).isprintable():
        raise invalid("key", "one line of text", key)
    seconds: Any = timeout
    unlimited = seconds is None or (isinstance(seconds, float) and seconds == math.inf)
    preparation = Preparation(
        target,
        check_str("key", key),
        check_choice("scope", scope, get_args(Scope)),
        check_int("retries", retries, at_least=0, at_most=2**31 - 1),
        None if unlimited else check_seconds("timeout", timeout),
        tuple(check_paths("inputs", inputs)),
    )
    return preparation if build is None else preparation.run(check_callable("build", build))


@dataclass
class Preparation:
    """A directory to prepare: a decorator of the build function, or a context manager around the build.

    `prepare_once` creates it. The body of a ``with`` statement runs once, so it has no retries.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/data"
        >>> @prepare_once(folder)
        ... def data(staging):
        ...     (staging / "data.txt").write_text("hello")
        >>> data().name
        'data'
        >>> with prepare_once(folder) as staging:
        ...     if staging is not None:  # None if it is already built, by this or another process
        ...         (staging / "data.txt").write_text("hello")
        >>> staging is None
        True
    """

    path: Path
    key: str
    scope: Scope
    retries: int
    timeout: float | None
    inputs: tuple[str, ...]

    def __post_init__(self) -> None:
        self._control = control_dir(self.path)
        self._entered = ThreadStack()  # of (ExitStack, BuildAttempt | None)

    def __call__(self, build: Build) -> Callable[[], Path]:
        """The function without arguments, which prepares the directory and returns its path."""
        check_callable("build", build)

        @wraps(build)
        def prepared() -> Path:
            return self.run(build)

        del prepared.__wrapped__  # its arguments are not those of `build`
        return prepared

    def __enter__(self) -> Path | None:
        with ExitStack() as stack:
            attempt = self._wait(stack, next_attempt(self.path))
            staging = None if attempt is None else attempt.begin()
            self._entered.items.append((stack.pop_all(), attempt))
        return staging

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        stack, attempt = self._entered.items.pop()
        with stack:
            if attempt is None:
                return
            if error is not None:
                if not attempt.end(error):
                    raise self._lost() from error
                return
            published = attempt.publish()
        if not published:
            with ExitStack() as stack:
                if self._wait(stack, attempt.attempt) is not None:
                    raise self._lost()

    def run(self, build: Build) -> Path:
        """Prepare the directory; see :func:`prepare_once`."""
        name = next_attempt(self.path)
        for _ in range(_MAX_LOSSES):
            with ExitStack() as stack:
                attempt = self._wait(stack, name)
                if attempt is None or attempt.run(build, self.retries):
                    return self.path
        raise self._lost()

    def _lost(self) -> PrepareError:
        return PrepareError(
            "lost the build lease (no heartbeat); another process took over",
            where=self.path,
            remedy="restart the job; a builder must not be stopped for long, and its lease files must stay",
        )

    def _wait(self, stack: ExitStack, attempt: str) -> BuildAttempt | None:
        """Wait until the directory is prepared (None), or until this process holds the lease."""
        try:
            return self._wait_or_acquire(stack, attempt)
        except OSError as error:
            raise cannot_prepare(error, self.path) from error

    def _wait_or_acquire(self, stack: ExitStack, attempt: str) -> BuildAttempt | None:
        reporter = WaitReporter(self.path, self.timeout)
        key = key_with_inputs(self.key, self.inputs)
        lease = Lease(self._control)
        stalls, awaited = StallDetector(), set[str]()
        while True:
            if self._is_prepared(key):
                self._clean_up(lease, key)
                return None
            raise_failure(self._control, awaited, attempt, key)
            owner = lease.owner()
            if owner is not None and not lease.is_expired(owner, stalls):
                awaited.add(owner.token)
                refuse_reentry(owner, self.path)
                reporter.wait(owner, self._control)
                with suppress(OSError):  # a network file system may have cached an earlier state of the parent
                    os.close(os.open(self.path.parent, os.O_RDONLY))
                continue
            self.path.parent.mkdir(parents=True, exist_ok=True)
            held = lease.acquire(owner, reporter.label, reporter.local_rank)
            if held is None:
                continue
            stack.enter_context(held)
            # What was seen before may have changed meanwhile: look again, now that no other process builds.
            raise_failure(self._control, awaited, attempt, key)
            refresh_path(self.path)
            if self._is_prepared(key):
                return None
            refuse_irreplaceable(self.path, inspect_dir(self.path, key), self._control)
            stack.enter_context(building(held.owner.token))
            return BuildAttempt(self.path, self._control, key, held, attempt)

    def _clean_up(self, lease: Lease, key: str) -> None:
        """Remove what processes left that died, after their commit perhaps."""
        with suppress(OSError):  # the prepared directory may be all that this process can see or write
            if self._control.exists():
                owner = lease.owner()
                is_free = owner is None or lease.is_expired(owner, StallDetector())
                if is_free and (held := lease.acquire(owner)) is not None:
                    with held:
                        BuildAttempt(self.path, self._control, key, held).remove_leftovers()
                        forget_failures(self._control, key)

    def _is_prepared(self, key: str) -> bool:
        state = inspect_dir(self.path, key)
        if state is DirState.FOREIGN:
            refuse_foreign_files(self.path, state)
        return state is DirState.VALID
