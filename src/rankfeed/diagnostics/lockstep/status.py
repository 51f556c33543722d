"""What a rank publishes about itself, and the cause that all ranks report in the end."""

from typing import Literal, NamedTuple

import msgspec

from rankfeed.errors import LockstepError
from rankfeed.storage.commit import decodable

#: Waits for data, is in a step, reached the end of its data, left the loop before that, or failed.
State = Literal["data", "step", "ended", "left", "failed"]


class Progress(NamedTuple):
    """Position of the training thread, which replaces the whole tuple: other threads read a consistent one."""

    sequence: int = 0
    passes: int = 0  # begun
    steps: int = 0  # begun in this pass
    state: State = "ended"
    since: float = 0.0  # time.monotonic() of the change
    closed: bool = False  # begins no other step
    done: tuple[int, int] = (0, 0)  # the last completed pass, and its steps


@decodable
class RankStatus(msgspec.Struct, frozen=True):
    """Status of a rank, published about once a second."""

    rank: int
    host: str = "?"
    pid: int = 0
    born: int = -1  # see process_start_time
    namespace: str = ""  # in which the process id is valid, see pid_namespace_id
    beat: int = 0  # number of this status; 0 if the rank has not published any
    progress: Progress = Progress()
    age: float = 0.0  # seconds since the progress changed
    numbers: dict[str, int] = {}  # collectives entered, by process group
    ages: dict[str, float] = {}  # seconds since each number changed, for those that have changed under watch
    failed_from: State = "ended"  # state before it failed
    error: str = ""
    is_echo: bool = False  # the error came out of a collective: another rank is likely to be the cause
    lines: list[str] = []  # end of its traceback, or of the stack of a training thread that makes no progress
    missing: dict[int, Literal["dead", "stopped"]] = {}  # ranks on its host

    @property
    def standing(self) -> float:
        """Seconds since it last made a step or entered a collective."""
        return min([self.age, *self.ages.values()])

    @property
    def place(self) -> tuple[int, int]:
        """Passes and steps begun."""
        return self.progress.passes, self.progress.steps

    @property
    def failed(self) -> bool:
        """Whether an error ended its loop."""
        return self.progress.state == "failed"

    @property
    def is_inside(self) -> bool:
        """Whether it is inside a pass."""
        return self.progress.state in ("data", "step") and not self.progress.closed

    @property
    def name(self) -> str:
        """Rank, host and process."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        """Its position, for messages."""
        passes, steps = self.place
        if not passes:
            return "before its first step"
        state = ("data" if self.failed_from == "data" else "step") if self.failed else self.progress.state
        text = {
            "data": f"waiting for the data of step {steps + 1}",
            "step": f"in step {steps}",
            "left": f"out of its loop, which it left in step {steps}",
            "ended": f"at the end of its data after {steps} steps",
        }[state]
        return f"{text} of pass {passes}"


@decodable
class Cause(msgspec.Struct, frozen=True):
    """Which rank stopped the job (-1: the launcher), and why."""

    rank: int
    summary: str
    lines: list[str] = []  # end of its traceback or stack
    remedy: str = ""
    status: RankStatus | None = None  # its last one
    hangs: bool = False  # it made no progress beyond the limit

    def blocks(self, status: RankStatus) -> bool:
        """Whether a rank is known to hang because of it; others may be busy and raise at their next step."""
        blamed = self.status
        if blamed is None or status.rank == self.rank:
            return self.hangs
        shared = status.numbers.keys() & blamed.numbers.keys()
        return status.place > blamed.place or any(status.numbers[key] > blamed.numbers[key] for key in shared)

    def error(self, status: RankStatus) -> LockstepError:
        """The error to raise on a rank."""
        kind = "traceback" if self.status is not None and self.status.failed else "stack"
        lines = "\n    ".join([f"the last lines of its {kind}", *self.lines])
        passes, steps = status.place
        error = LockstepError(
            self.summary,
            found=lines if self.lines else None,
            where=f"raised on rank {status.rank} (host {status.host}), step {steps} of pass {passes}",
            remedy=self.remedy or None,
        )
        error.rank = self.rank
        return error
