"""The status that a rank publishes about itself, and the cause of a hang that all ranks report."""

from typing import Literal, NamedTuple

import msgspec

from rankfeed.errors import LockstepError
from rankfeed.storage.commit import decodable

#: Waits for data, is in a step, reached the end of its data, or left the loop before that.
State = Literal["data", "step", "ended", "left"]
#: Of another process on the same host.
PeerState = Literal["alive", "stopped", "dead"]


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
class LoopFailure(msgspec.Struct, frozen=True):
    """The error that ended a rank's loop."""

    error: str
    lines: list[str]  # end of its traceback
    is_echo: bool  # it came out of a collective: another rank is likely to be the cause


@decodable
class GroupCalls(msgspec.Struct, frozen=True):
    """Collectives of a process group, without point-to-point calls."""

    entered: int  # the last one
    inside: int  # the last one that was entered and has not ended, or 0
    kinds: dict[int, str]  # what the last ones were


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
    failure: LoopFailure | None = None
    age: float = 0.0  # seconds since the progress changed
    numbers: dict[str, int] = {}  # collectives entered since the loop began, by process group
    ages: dict[str, float] = {}  # seconds since each number changed, for those that have changed under watch
    calls: dict[str, GroupCalls] = {}  # by process group, if it makes no progress and torch records them
    stack: list[str] = []  # its end, likewise
    peers: dict[int, PeerState] = {}  # ranks whose processes it watches
    has_left: bool = False  # it makes no other request to the store

    @property
    def standing(self) -> float:
        """Seconds since it last made a step or entered a collective."""
        return min([self.age, *self.ages.values()])

    @property
    def entered(self) -> dict[tuple[str, bool], int]:
        """Number of its last collective, by process group and whether it was recorded: only like are compared."""
        calls = self.calls
        return {(k, k in calls): calls[k].entered if k in calls else count for k, count in self.numbers.items()}

    @property
    def inside(self) -> dict[tuple[str, bool], int]:
        """Likewise, of groups whose last collective has not ended, or is not recorded."""
        return {key: n for key, n in self.entered.items() if n and (not key[1] or self.calls[key[0]].inside)}

    @property
    def place(self) -> tuple[int, int]:
        return self.progress.passes, self.progress.steps

    @property
    def is_inside(self) -> bool:
        return self.progress.state in ("data", "step") and not (self.progress.closed or self.failure)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        """Its position, for messages."""
        steps, state = self.progress.steps, self.progress.state
        if self.failure and state != "data":
            state = "step"  # an error leaves the loop before it is published
        text = {
            "data": f"waiting for the data of step {steps + 1}",
            "step": f"in step {steps}",
            "left": f"out of its loop, which it left in step {steps}",
            "ended": f"at the end of its data after {steps} steps",
        }[state]
        return f"{text} of pass {self.progress.passes}" if self.progress.passes else "before its first step"

    @property
    def end(self) -> str:
        how = "left its loop" if self.progress.state == "left" else "ran out of data"
        passes, steps = self.progress.done
        return f"{how} after {steps} steps of pass {passes}"

    @property
    def error(self) -> str:
        return self.failure.error if self.failure else ""

    def cause(self, text: str, remedy: str = "", hangs: bool = False) -> "Cause":
        return Cause(self.rank, f"{self.name} {text}", remedy, self, hangs)


@decodable
class Cause(msgspec.Struct, frozen=True):
    """Which rank stopped the job (-1: the launcher), and why."""

    rank: int
    summary: str
    remedy: str = ""
    status: RankStatus | None = None  # its last one
    hangs: bool = False  # it made no progress beyond the limit

    def blocks(self, status: RankStatus) -> bool:
        """Whether a rank is known to hang because of it; others may be busy and raise at their next step."""
        if self.status is None or status.rank == self.rank:
            return self.hangs
        own, other = status.inside, self.status.entered
        # Ranks in different collectives of one number block each other.
        common = own.keys() & other.keys()
        return status.place > self.status.place or any(own[key] >= other[key] + (not key[1]) for key in common)

    def error(self, status: RankStatus) -> LockstepError:
        failure, stack = (self.status.failure, self.status.stack) if self.status is not None else (None, [])
        kind, lines = ("traceback", failure.lines) if failure else ("stack", stack if self.hangs else [])
        trace = "\n    ".join([f"the last lines of its {kind}", *lines]) if lines else None
        passes, steps = status.place
        where = f"raised on rank {status.rank} (host {status.host}), step {steps} of pass {passes}"
        error = LockstepError(self.summary, found=trace, where=where, remedy=self.remedy or None)
        error.rank = self.rank
        return error
