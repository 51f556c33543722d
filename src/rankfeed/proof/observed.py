"""What a rank of a probe says while it reads the user's loader, a line for each thing; and the lines put together.

The lines lie in a file: what a rank said before it was killed is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rankfeed.storage.decodable import decodable

#: A sample as a probe knows it: its id, or what its id or content hashes to.
SampleKey = int | str


@decodable
class Job(msgspec.Struct, frozen=True):
    """What the ranks of a probe are to do.

    Attributes:
        name: of the probe.
        factory: ``module:function`` or ``file.py:function``.
        path: folders to import from, first of all others.
        ranks: how many.
        workers: what the factory gets as ``num_workers``.
        start_method: of processes that the loader starts.
        epochs: how often to read it.
        timeout: seconds for the factory, for the first batch and for each next.
        max_steps: an epoch is cut after so many.
        max_seconds: an epoch is cut after so long.
        key: where a batch has its ids; None: as the factory says, or the usual.
        set_epoch: whether to call `set_epoch` where there is one.
        step_seconds: how long the consumer works on a batch.
        states: folder where a rank puts the loader's state in the middle of its first epoch; None: nowhere.
        resume: such a folder to go on from.
    """

    name: str
    factory: str
    path: list[str]
    ranks: int
    workers: int
    start_method: str
    epochs: int
    timeout: float = 60.0
    max_steps: int = 1000
    max_seconds: float = 60.0
    key: str | int | None = None
    set_epoch: bool = True
    step_seconds: float = 0.0
    states: str | None = None
    resume: str | None = None


class Record(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A line."""


@decodable
class Ready(Record, frozen=True):
    """The rank stands in its process group, and calls the factory now."""


@decodable
class Built(Record, frozen=True):
    """The factory returned.

    Attributes:
        seconds: it took.
        bytes: that it made the process larger.
        length: ``len(loader)``, if there is one.
        samples: those of the loader's data set.
        fingerprint: of the data set, where it has one.
        workers: that the loader says it has.
        cuts_one_data_set: whether a sampler cuts what is the same data set on all ranks.
        drops: whether the rest of an epoch is left out on purpose.
        replaces: whether samples are drawn with replacement on purpose.
        shuffles: whether it says that it shuffles.
        resumes: whether it has a state.
        elastic: whether its state fits any number of ranks.
        once: whether it can be read once only, so that the factory is called for each epoch.
        seeded: whether anybody has seeded torch's global generator.
        pickled: bytes of the data set that each worker gets by pickle, where it is known.
    """

    seconds: float
    bytes: int = 0
    length: int | None = None
    samples: int | None = None
    fingerprint: str | None = None
    workers: int | None = None
    cuts_one_data_set: bool = False
    drops: bool = False
    replaces: bool = False
    shuffles: bool = False
    resumes: bool = False
    elastic: bool = False
    once: bool = False
    seeded: bool = False
    pickled: int | None = None


@decodable
class Began(Record, frozen=True):
    """An epoch began."""

    epoch: int


@decodable
class Step(Record, frozen=True):
    """A batch came.

    Attributes:
        keys: of its samples, in order.
        waited: seconds for it.
        worker: that made it, where it is known.
        by_content: whether keys are hashes of contents.
        values: of fields of floats, a digest of each sample's; of the first steps alone.
        streams: digests of the random streams that the worker drew from for it, as they were when it began.
    """

    keys: list[SampleKey]
    waited: float
    worker: int | None = None
    by_content: bool = False
    values: dict[str, list[str]] = {}
    streams: dict[str, str] = {}


@decodable
class Sizes(Record, frozen=True):
    """Bytes of memory that a process has for itself alone: the rank's, and those of its children by process id."""

    rank: int
    children: dict[str, int]


@decodable
class Moved(Record, frozen=True):
    """A file that was open before workers were forked was read through the same handle afterwards."""

    path: str
    start: int
    end: int


@decodable
class Stated(Record, frozen=True):
    """The state was taken after so many steps of the first epoch."""

    step: int


@decodable
class Ended(Record, frozen=True):
    """An epoch ended: whole, or cut."""

    whole: bool


@decodable
class Raised(Record, frozen=True):
    """The user's code raised an error: while what was done, and the end of its traceback."""

    phase: str
    error: str
    traceback: str


@decodable
class Done(Record, frozen=True):
    """The rank has nothing left to do."""


Line = Ready | Built | Began | Step | Sizes | Moved | Stated | Ended | Raised | Done
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
    def epochs(self) -> list[list[EpochSeen]]:
        """Epochs that all ranks read to their end, of each rank."""
        return [list(each) for each in zip(*(rank.whole for rank in self.ranks), strict=False)]

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
