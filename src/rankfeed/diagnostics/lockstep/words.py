"""What ranks say of themselves, and what is said of one of them in the end."""

from typing import Literal

import msgspec

from rankfeed.errors import LockstepError
from rankfeed.storage.commit import decodable

State = Literal["data", "step", "ended", "left", "failed"]


@decodable
class Word(msgspec.Struct, frozen=True):
    """What a rank says of itself, once a second.

    Attributes:
        rank: which.
        host: its machine.
        pid: its process.
        beat: goes up with each word.
        lap: passes over the data that it has begun.
        step: steps that it has begun in this pass.
        state: it waits for data, is in a step, has come to the end of its data, left the loop before that, or
            failed.
        closed: it begins no other step.
        done: the last pass that is over, and the steps in it.
        still: seconds since step or state changed.
        waits: seconds that its thread has stood at one instruction which waits for other ranks.
        was: its state before it failed.
        error: what it failed with.
        collective: which came out of a collective, so that another rank is likely to be the cause.
        lines: the end of its traceback; or of the stack of its thread, where it has stood still for long.
        missing: processes on its machine, by rank, that are "gone" or "stopped".
    """

    rank: int
    host: str
    pid: int
    beat: int = 0
    lap: int = 0
    step: int = 0
    state: State = "ended"
    closed: bool = False
    done: tuple[int, int] = (0, 0)
    still: float = 0.0
    waits: float = 0.0
    was: Literal["data", "step", "ended", "left"] = "ended"
    error: str = ""
    collective: bool = False
    lines: list[str] = []
    missing: dict[int, str] = {}

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it has come, to be compared with others."""
        state = self.was if self.state == "failed" else self.state
        return self.lap, self.step, {"step": 0, "left": 0, "data": 1, "ended": 2}[state]

    @property
    def inside(self) -> bool:
        """Whether it is inside a pass, where ranks wait for one another."""
        return self.state in ("data", "step") and self.lap > 0 and not self.closed

    @property
    def who(self) -> str:
        """It, in a sentence."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    @property
    def at(self) -> str:
        """Where it is, in a sentence."""
        what = {
            "data": f"waiting for the data of step {self.step + 1}",
            "step": f"in step {self.step}",
            "left": f"out of its loop, which it left in step {self.step}",
            "ended": f"at the end of its data after {self.step} steps",
        }[self.state if self.state != "failed" else "data" if self.was == "data" else "step"]
        return f"{what} of pass {self.lap}" if self.lap else "before its first step"


@decodable
class Verdict(msgspec.Struct, frozen=True):
    """Which rank is the cause, and why.

    Attributes:
        rank: which.
        summary: who, where and why.
        lines: the end of its traceback, or of its stack.
        remedy: what the user can do.
        failed: whether it is a traceback.
    """

    rank: int
    summary: str
    lines: list[str] = []
    remedy: str = ""
    failed: bool = False

    def error(self, here: Word) -> LockstepError:
        """The error that a rank raises."""
        lines = "\n".join(
            [
                f"the last lines of its {'traceback' if self.failed else 'stack'}",
                *(f"    {line}" for line in self.lines),
            ]
        )
        error = LockstepError(
            self.summary,
            found=lines if self.lines else None,
            where=f"raised on rank {here.rank} (host {here.host}), step {here.step} of pass {here.lap}",
            remedy=self.remedy or None,
        )
        error.rank = self.rank
        return error
