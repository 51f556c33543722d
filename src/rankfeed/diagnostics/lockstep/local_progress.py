"""Progress of the training thread of this process, and its observation by the monitor's threads."""

import re
import sys
import threading
import time
import traceback
from typing import Any

from msgspec import structs

from rankfeed.diagnostics.lockstep.collectives import collective_numbers
from rankfeed.diagnostics.lockstep.status import Progress, RankStatus, State

#: Errors that are likely to be the effect of another rank's end.
_ECHO = re.compile(r"gloo|nccl|peer|socket|timed? ?out|process group|abort|broken pipe", re.IGNORECASE)
_LINES = 6
#: Seconds between two observations that count: in a longer interval this process was stopped.
_GAP = 2.0
#: Seconds without progress from which on the stack is published.
_PATIENCE = 1.5


class LocalProgress:
    """Written by the training thread only: a step replaces one tuple, without a lock."""

    def __init__(self) -> None:
        self.progress = Progress(since=time.monotonic())
        self.thread = threading.get_ident()
        # See RankStatus.
        self.failed_from: State = "ended"
        self.error = ""
        self.is_echo = False
        self.lines: list[str] = []

    @property
    def is_inside(self) -> bool:
        """Whether it is inside a pass."""
        return self.progress.state in ("data", "step")

    def begin_pass(self) -> None:
        """A pass begins, in the calling thread."""
        self.thread = threading.get_ident()
        self._set(passes=self.progress.passes + 1, steps=0, state="data")

    def wait(self) -> None:
        """The next batch is waited for."""
        sequence, passes, steps, _, _, closed, done = self.progress
        self.progress = Progress(sequence + 1, passes, steps, "data", time.monotonic(), closed, done)

    def step(self) -> None:
        """A step begins."""
        sequence, passes, steps, _, _, closed, done = self.progress
        self.progress = Progress(sequence + 1, passes, steps + 1, "step", time.monotonic(), closed, done)

    def work(self) -> None:
        """What follows belongs to the step that was begun."""
        self._set(state="step")

    def end_pass(self, state: State) -> None:
        """A pass is over."""
        if self.is_inside:
            self._set(state=state, done=(self.progress.passes, self.progress.steps))

    def close(self) -> None:
        """No other step will begin."""
        self.end_pass("left")
        self._set(closed=True)

    def fail(self, error: BaseException) -> None:
        """An error ends the loop."""
        lines = [line for part in traceback.format_exception(error) for line in part.rstrip().splitlines()]
        self.lines = lines[-_LINES:]
        self.error = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0][:500]
        self.failed_from = self.progress.state
        self.is_echo = self.failed_from != "data" and is_echo(error)
        self._set(state="failed")

    def _set(self, **changes: Any) -> None:
        old = self.progress
        self.progress = old._replace(sequence=old.sequence + 1, since=time.monotonic(), **changes)


def is_echo(error: BaseException) -> bool:
    """Whether an error is likely to be the effect of another rank's end: a collective that failed.

    Examples:
        >>> is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        True
        >>> is_echo(ValueError("a peer's label"))
        False
    """
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(_ECHO.search(str(error)))


class Observer:
    """Makes statuses; its seconds are those in which this process was not stopped."""

    def __init__(self, identity: RankStatus, local: LocalProgress) -> None:
        self._identity, self._local = identity, local
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._progress, self._since = local.progress, 0.0
        self._numbers, self._changed = collective_numbers(), dict[str, float]()
        self.now = 0.0

    def status(self, beat: int = 0, **facts: Any) -> RankStatus:
        """Progress, collective numbers and their ages from one read."""
        local = self._local
        with self._lock:
            last, self._last = self._last, time.monotonic()
            self.now += min(self._last - last, _GAP)
            for _ in range(3):
                progress, numbers = local.progress, collective_numbers()
                if local.progress is progress:
                    break
            else:
                numbers = {}  # in the middle of a step, which cannot hang now
            if progress is not self._progress:
                self._progress = progress
                self._since = max(self._since, self.now - max(self._last - progress.since, 0.0))
            for key, number in numbers.items():
                if self._numbers.get(key, 0) != number:
                    self._numbers[key], self._changed[key] = number, self.now
            ages = {key: self.now - time for key, time in self._changed.items() if key in numbers}
            facts |= {"age": self.now - self._since, "numbers": numbers, "ages": ages, "progress": progress}
        facts |= {"failed_from": local.failed_from, "error": local.error, "is_echo": local.is_echo}
        return structs.replace(self._identity, beat=beat, lines=local.lines or self._stack(), **facts)

    def _stack(self) -> list[str]:
        """Last lines of the stack of a training thread that may hang."""
        frame = sys._current_frames().get(self._local.thread) if self.now - self._since > _PATIENCE else None
        return "".join(traceback.format_stack(frame)).splitlines()[-_LINES:] if frame is not None else []
