"""Progress of the training thread of this process, and its observation by the monitor's threads."""

import re
import sys
import threading
import time
import traceback
from typing import Any

from msgspec import structs

from rankfeed.diagnostics.lockstep.collectives import FlightRecorder, collective_numbers
from rankfeed.diagnostics.lockstep.status import LoopFailure, PeerState, Progress, RankStatus, State

#: Errors that are likely to be the effect of another rank's end.
_ECHO = re.compile(r"gloo|nccl|peer|socket|timed? ?out|process group|abort|broken pipe", re.IGNORECASE)
_LINES = 6
#: Seconds between two observations that count: in a longer interval this process was stopped.
_GAP = 2.0
#: Seconds without progress from which on the stack and the last collectives are published.
_PATIENCE = 1.5


class LocalProgress:
    """Written by the training thread only: a step replaces one tuple, without a lock."""

    def __init__(self) -> None:
        self._first = collective_numbers()
        self.progress = Progress(since=time.monotonic())
        self.failure: LoopFailure | None = None
        self.thread = threading.get_ident()

    @property
    def is_inside(self) -> bool:
        return self.progress.state in ("data", "step") and self.failure is None

    def numbers(self) -> dict[str, int]:
        """Collectives that were entered since the loop began: calls before it may differ between the ranks."""
        return {key: count - self._first.get(key, 0) for key, count in collective_numbers().items()}

    def begin_pass(self) -> None:
        self.thread = threading.get_ident()
        self._set(passes=self.progress.passes + 1, steps=0, state="data")

    def wait(self) -> None:
        sequence, passes, steps, _, _, closed, done = self.progress
        self.progress = Progress(sequence + 1, passes, steps, "data", time.monotonic(), closed, done)

    def step(self) -> None:
        sequence, passes, steps, _, _, closed, done = self.progress
        now = time.monotonic()
        self.progress = Progress(sequence + 1, passes, steps + 1, "step", now, closed, done)

    def work(self) -> None:
        """What follows belongs to the step that was begun."""
        self._set(state="step")

    def end_pass(self, state: State) -> None:
        if self.is_inside:
            self._set(state=state, done=(self.progress.passes, self.progress.steps))

    def close(self) -> None:
        self.end_pass("left")
        self._set(closed=True)

    def fail(self, error: BaseException) -> LoopFailure:
        lines = [line for part in traceback.format_exception(error) for line in part.rstrip().splitlines()]
        text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0][:500]
        echo = self.progress.state != "data" and is_echo(error)
        self.failure = LoopFailure(text, lines[-_LINES:], echo)
        self._set()
        return self.failure

    def _set(self, **changes: Any) -> None:
        old = self.progress
        self.progress = old._replace(sequence=old.sequence + 1, since=time.monotonic(), **changes)


def is_echo(error: BaseException) -> bool:
    """Whether an error is likely to be the effect of another rank's end: a collective that failed."""
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(_ECHO.search(str(error)))


class Observer:
    """Makes statuses; its seconds are those in which this process was not stopped."""

    def __init__(self, identity: RankStatus, local: LocalProgress) -> None:
        self._identity, self._local = identity, local
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._progress, self._since = local.progress, 0.0
        self._numbers, self._changed = local.numbers(), dict[str, float]()
        self._recorder = FlightRecorder()
        self.now, self.standing, self._beat = 0.0, 0.0, 0

    def status(self, peers: dict[int, PeerState]) -> RankStatus:
        """Progress, collective numbers and their ages from one read."""
        local = self._local
        with self._lock:
            last, self._last = self._last, time.monotonic()
            self.now += min(self._last - last, _GAP)
            self._beat += 1
            # Before the numbers, so that a collective that is entered meanwhile counts as progress.
            calls = self._recorder.calls(list(self._numbers)) if self.standing > _PATIENCE else {}
            progress, failure, numbers = local.progress, local.failure, local.numbers()
            if progress is not self._progress:
                self._progress = progress
                self._since = max(self._since, self.now - max(self._last - progress.since, 0.0))
            for key, count in numbers.items():
                if self._numbers.get(key, 0) != count:
                    self._numbers[key], self._changed[key] = count, self.now
            age = self.now - self._since
            ages = {key: self.now - time for key, time in self._changed.items() if key in numbers}
            self.standing = min([age, *ages.values()])
        frame = sys._current_frames().get(local.thread) if age > _PATIENCE else None
        stack = "".join(traceback.format_stack(frame)).splitlines()[-_LINES:] if frame is not None else []
        return structs.replace(
            self._identity,
            beat=self._beat,
            progress=progress,
            failure=failure,
            age=age,
            numbers=numbers,
            ages=ages,
            calls=calls,
            stack=stack,
            peers=peers,
        )
