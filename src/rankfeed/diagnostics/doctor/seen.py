"""What the ranks of a probe were seen to do: what they say, line by line, put together."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.diagnostics.doctor.observed import (
    Began,
    Built,
    Done,
    Ended,
    Job,
    Line,
    Moved,
    Raised,
    Ready,
    SampleKey,
    Sizes,
    Stated,
    Step,
)

_DECODER = msgspec.json.Decoder(Line)


@dataclass
class EpochSeen:
    """What a rank was given in an epoch."""

    epoch: int
    steps: list[Step] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    whole: bool = False
    cut: bool = False

    @property
    def keys(self) -> list[SampleKey]:
        return [key for step in self.steps for key in step.keys]


@dataclass
class Failure:
    """How a rank failed.

    Attributes:
        kind: "raised", "hangs" or "died".
        phase: while what.
        detail: an error, a signal, how long.
        output: the last lines that the rank said.
    """

    kind: str
    phase: str
    detail: str
    output: list[str] = field(default_factory=list)
    root: bool = True


@dataclass
class RankSeen:
    """What a rank of a probe was seen to do."""

    rank: int
    built: Built | None = None
    epochs: list[EpochSeen] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    state_after: int | None = None
    failure: Failure | None = None
    done: bool = False
    phase: str = "starting"

    @property
    def whole(self) -> list[EpochSeen]:
        """Epochs that were read to their end."""
        return [epoch for epoch in self.epochs if epoch.whole]

    def add(self, line: Line) -> None:
        """Take in what the rank says next."""
        match line:
            case Ready():
                self.phase = "calling the factory"
            case Built():
                self.built = self.built or line
            case Began(epoch=epoch):
                self.epochs.append(EpochSeen(epoch))
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
class ProbeSeen:
    """What the ranks of a probe were seen to do."""

    job: Job
    ranks: list[RankSeen]

    @property
    def ok(self) -> bool:
        """Whether all came to their end."""
        return all(rank.done for rank in self.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether it is one rank without workers, which is given all there is."""
        return self.job.ranks == 1 and not self.job.workers

    @property
    def epochs(self) -> list[list[EpochSeen]]:
        """Epochs that all ranks read to their end, of each rank."""
        return [list(each) for each in zip(*(rank.whole for rank in self.ranks), strict=False)]

    @property
    def beginnings(self) -> list[EpochSeen]:
        """Of an epoch with an end that was not reached, what each rank was given."""
        known = all(rank.built is not None and rank.built.length is not None for rank in self.ranks)
        first = [rank.epochs[0] for rank in self.ranks if rank.epochs and rank.epochs[0].cut]
        return first if known and len(first) == len(self.ranks) else []

    @property
    def by_content(self) -> bool:
        return any(step.by_content for rank in self.ranks for epoch in rank.epochs for step in epoch.steps)

    def figures(self) -> dict[str, Any]:
        """What there is to tell of it, JSON-able."""
        return {
            "probe": self.job.name,
            "ranks": self.job.ranks,
            "workers": self.job.workers,
            "start_method": self.job.start_method,
            "by_rank": [
                {
                    "rank": rank.rank,
                    "built": None if rank.built is None else msgspec.to_builtins(rank.built),
                    "failure": None if rank.failure is None else vars(rank.failure),
                    "epochs": [
                        {
                            "epoch": epoch.epoch,
                            "steps": len(epoch.steps),
                            "samples": len(epoch.keys),
                            "different": len({*epoch.keys}),
                            "to_its_end": epoch.whole,
                            "first_batch_seconds": epoch.steps[0].waited if epoch.steps else None,
                            "waited_seconds": sum(step.waited for step in epoch.steps),
                            "bytes": max((sizes.rank for sizes in epoch.sizes), default=None),
                        }
                        for epoch in rank.epochs
                    ],
                }
                for rank in self.ranks
            ],
        }


class Following:
    """Reads what a rank says as it says it.

    Args:
        path: of the rank's lines; the file need not be there yet.
        seen: what takes them in.
    """

    def __init__(self, path: Path, seen: RankSeen) -> None:
        self._path, self._seen, self._at = path, seen, 0

    def read(self) -> bool:
        """Take in what is new; whether anything was. A line that is half there is left for the next time."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._seen.add(_DECODER.decode(line))
        self._at += len(whole)
        return bool(whole)
