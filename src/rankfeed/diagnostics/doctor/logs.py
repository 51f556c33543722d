"""What the ranks of a run reported, line by line, put together."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.diagnostics.doctor.records import (
    Began,
    Built,
    Done,
    Ended,
    Job,
    Line,
    Moved,
    Raised,
    Ready,
    RowKey,
    Sizes,
    Stated,
    Step,
)

_DECODER = msgspec.json.Decoder(Line)


@dataclass
class EpochLog:
    """What a rank received in an epoch."""

    epoch: int
    steps: list[Step] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    whole: bool = False
    cut: bool = False

    @property
    def keys(self) -> list[RowKey]:
        return [key for step in self.steps for key in step.keys]

    @property
    def rows(self) -> int:
        return sum(step.rows or 0 for step in self.steps)


@dataclass
class Failure:
    """How a rank failed.

    Attributes:
        kind: "raised", "hangs" or "died".
        phase: in which it failed.
        detail: an error, a signal, how long.
        output: the last lines that the rank printed.
        root: whether no other rank failed before.
    """

    kind: str
    phase: str
    detail: str
    output: list[str] = field(default_factory=list)
    root: bool = True


@dataclass
class RankLog:
    """What a rank of a run reported."""

    rank: int
    built: Built | None = None
    epochs: list[EpochLog] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    state_after: int | None = None
    failure: Failure | None = None
    done: bool = False
    phase: str = "starting"

    @property
    def whole(self) -> list[EpochLog]:
        """Epochs that were read to their end."""
        return [epoch for epoch in self.epochs if epoch.whole]

    def add(self, line: Line) -> None:
        match line:
            case Ready():
                self.phase = "calling the factory"
            case Built():
                self.built = self.built or line
            case Began(epoch=epoch):
                self.epochs.append(EpochLog(epoch))
                self.phase = f"epoch {epoch}, waiting for the first batch"
            case Step():
                self.epochs[-1].steps.append(line)
                self.phase = f"epoch {self.epochs[-1].epoch}, waiting for step {len(self.epochs[-1].steps)}"
            case Sizes() if self.epochs:
                self.epochs[-1].sizes.append(line)
            case Sizes():
                pass
            case Moved():
                self.moved.append(line)
            case Stated(step=step):
                self.state_after = step
            case Ended(whole=whole):
                self.epochs[-1].whole, self.epochs[-1].cut = whole, not whole
                self.phase = f"after epoch {self.epochs[-1].epoch}"
            case Raised():
                self.failure = Failure("raised", line.phase, line.error, line.traceback.splitlines())
            case Done():
                self.done = True


@dataclass
class RunLog:
    """What the ranks of a run reported."""

    job: Job
    ranks: list[RankLog]

    @property
    def ok(self) -> bool:
        """Whether all ranks finished."""
        return all(rank.done for rank in self.ranks)

    @property
    def epochs(self) -> list[list[EpochLog]]:
        """Epochs that all ranks read to their end, of each rank."""
        return [list(each) for each in zip(*(rank.whole for rank in self.ranks), strict=False)]

    @property
    def cut(self) -> list[EpochLog]:
        """The first epoch of each rank, if it was cut on any."""
        first = [rank.epochs[0] for rank in self.ranks if rank.epochs]
        complete = len(first) == len(self.ranks)
        return first if complete and any(epoch.cut for epoch in first) else []

    @property
    def steps(self) -> Iterator[Step]:
        return (step for rank in self.ranks for epoch in rank.epochs for step in epoch.steps)

    @property
    def built(self) -> list[Built]:
        return [rank.built for rank in self.ranks if rank.built is not None]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "run": self.job.name,
            "ranks": self.job.ranks,
            "workers": self.job.workers,
            "start_method": self.job.start_method,
            "by_rank": [
                {
                    "rank": rank.rank,
                    "failure": None if rank.failure is None else vars(rank.failure),
                    "epochs": [
                        {
                            "epoch": epoch.epoch,
                            "steps": len(epoch.steps),
                            "samples": epoch.rows,
                            "to_its_end": epoch.whole,
                            "waited_seconds": sum(step.waited for step in epoch.steps),
                        }
                        for epoch in rank.epochs
                    ],
                }
                for rank in self.ranks
            ],
        }


class LogReader:
    """Reads the lines of a rank as they are written; the file need not exist yet."""

    def __init__(self, path: Path, log: RankLog) -> None:
        self._path, self._log, self._at = path, log, 0

    def read(self) -> bool:
        """Take in the new complete lines; whether there were any."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._log.add(_DECODER.decode(line))
        self._at += len(whole)
        return bool(whole)
