"""What the training thread says of itself, by plain attributes, and what is seen of it from outside."""

import linecache
import re
import sys
import threading
import time
import traceback
from types import FrameType

from rankfeed.diagnostics.lockstep.words import State

#: Errors that are likely to be the echo of another rank's end.
_ECHO = re.compile(r"gloo|nccl|peer|socket|timed? ?out|process group|abort|broken pipe", re.IGNORECASE)
#: Calls in user code that wait for the device, and so for collectives on it.
_WAITING = re.compile(r"\.item\(|\.cpu\(|\.tolist\(|\.numpy\(|synchronize\(|\.wait\(")
_LINES = 6


class Here:
    """Where this rank is. The training thread writes it: a step costs two attributes, and no lock.

    Attributes:
        lap: passes begun.
        step: steps begun in this pass.
        state: see Word.
        was: the state before it failed.
        done: the last pass that is over, and its steps.
        closed: it begins no other step.
        error: what it failed with.
        collective: whether that is likely to be another rank's doing.
        lines: the end of its traceback.
        thread: the training thread.
    """

    __slots__ = ("closed", "collective", "done", "error", "lap", "lines", "state", "step", "thread", "was")

    def __init__(self) -> None:
        self.lap = self.step = 0
        self.state: State = "ended"
        self.was: State = "ended"
        self.done = (0, 0)
        self.closed = self.collective = False
        self.error = ""
        self.lines: list[str] = []
        self.thread = threading.get_ident()

    @property
    def inside(self) -> bool:
        """Whether it is inside a pass."""
        return self.state in ("data", "step")

    def begin(self) -> None:
        """A pass begins."""
        self.thread = threading.get_ident()
        self.step = 0
        self.lap += 1
        self.state = "data"

    def end(self, state: State) -> None:
        """A pass is over."""
        if self.inside:
            self.done = self.lap, self.step
            self.state = state

    def fail(self, error: BaseException) -> None:
        """An error ends it."""
        lines = [line for part in traceback.format_exception(error) for line in part.rstrip().splitlines()]
        self.lines = lines[-_LINES:]
        self.error = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0][:500]
        self.was = self.was if self.state == "failed" else self.state
        self.collective = self.was != "data" and is_echo(error)
        self.state = "failed"

    @property
    def mark(self) -> tuple[object, ...]:
        """Changes whenever it gets on."""
        return self.lap, self.step, self.state, self.closed


def is_echo(error: BaseException) -> bool:
    """Whether an error is likely to be the echo of another rank's end: a collective that broke.

    Examples:
        >>> is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        True
        >>> is_echo(ValueError("a peer's label"))
        False
    """
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(_ECHO.search(str(error)))


class Clock:
    """Seconds that this process has had: those in which it, or its host, was stopped do not count."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._last = time.monotonic()
        self.now = 0.0

    def tick(self) -> None:
        """Called several times a second."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, self._most)


class Sight:
    """For how long the training thread has stood still, and where: seen by another thread, again and again."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self._mark: tuple[object, ...] = ()
        self._since = self._stands = 0.0
        self._spot: tuple[int, int] = (0, 0)
        self.still = self.waits = 0.0
        self.lines: list[str] = []

    def look(self, now: float, long: float) -> None:
        """See where it is.

        Args:
            now: of the clock.
            long: seconds from which on its stack is looked at.
        """
        mark = self._here.mark
        if mark != self._mark:
            self._mark, self._since, self._stands, self._spot = mark, now, now, (0, 0)
        self.still, self.waits, self.lines = now - self._since, 0.0, []
        frame = sys._current_frames().get(self._here.thread)
        if frame is None:
            return
        spot = id(frame), frame.f_lasti
        if spot != self._spot:
            self._spot, self._stands = spot, now
        if self.still >= long:
            self.lines = _stack(frame)
            self.waits = now - self._stands if _waits_for_others(frame) else 0.0


def _stack(frame: FrameType) -> list[str]:
    lines = "".join(traceback.format_stack(frame)).splitlines()
    return lines[-_LINES:]


def _waits_for_others(frame: FrameType) -> bool:
    """Whether a call that does not come back is one that waits for other ranks."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if _WAITING.search(line):
        return True
    inner: FrameType | None = frame
    for _ in range(4):
        if inner is None:
            return False
        name = inner.f_code.co_filename.replace("\\", "/")
        if "/torch/distributed/" in name or name.endswith(
            ("torch/autograd/graph.py", "nn/parallel/distributed.py")
        ):
            return True
        inner = inner.f_back
    return False
