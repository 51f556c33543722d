"""Records of the doctor: the job that a run's ranks are given, and the logs of what they report."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from rankfeed.diagnostics.deliveries import LoaderTraits

#: What identifies a row: its id, its index in the dataset, or a hash.
RowKey = int | str


class Phase(StrEnum):
    """Phases of a rank that decide what a failure means; others are any text."""

    START = "starting"
    IMPORT = "importing the factory"
    STATE = "loading the state"
    IDS = "reading the ids"


@dataclass(frozen=True)
class Job:
    """What the ranks of a run do; the options are those of `examine`."""

    name: str
    factory: str
    ranks: int
    workers: int
    start_method: str
    epochs: int
    nodes: int = 1  # on which the ranks seem to run, equally many on each
    timeout: float = 60.0
    max_steps: int = 1000
    max_seconds: float = 60.0
    key: str | int | None = None
    set_epoch: bool = True
    step_seconds: float = 0.0
    #: Directory for the loader's state from the middle of its first epoch, and directory to resume from.
    states: str | None = None
    resume: str | None = None
    reads_again: bool = False  # whether the first batches are read again in the end


@dataclass(frozen=True)
class Event:
    """What a rank has reached: an epoch or its end, a state to resume from."""

    name: Literal["epoch", "whole", "cut", "state", "done"]
    #: The number of the epoch, or of the steps before the state; the last state holds.
    value: int = 0


@dataclass(frozen=True)
class Built:
    """The factory returned after `seconds` and made the process larger by `bytes`."""

    seconds: float
    bytes: int = 0
    #: ``len(loader)``; length of a map-style dataset; digest of the indices of a torch Subset.
    length: int | None = None
    samples: int | None = None
    subset: str | None = None
    fingerprint: str | None = None
    #: What the loader, and a DataLoader that it wraps, declare.
    traits: LoaderTraits = field(default_factory=LoaderTraits)
    persistent: bool = False  # its workers outlive an epoch
    #: Whether a sampler shards what must be the same dataset on all ranks.
    cuts_one_dataset: bool = False
    #: Whether the loader has a state, and whether that can be loaded on any number of ranks.
    resumes: bool = False
    elastic: bool = False
    #: Bytes of the dataset that each worker receives by pickle, if known.
    pickled: int | None = None


@dataclass(frozen=True)
class Step:
    """A batch arrived."""

    #: None if the batch has no rows that can be distinguished.
    rows: int | None = None
    ids: list[RowKey] | None = None
    #: Dataset indices that collate was given, in order, and how many of their samples collate dropped.
    indices: list[int] | None = None
    dropped: int = 0
    #: These indices in the dataset at the bottom of torch's Subsets.
    base: list[int] | None = None
    #: Hash of each row's value, by field.
    fields: dict[str, list[int]] = field(default_factory=dict)
    #: Of fields that may be padded: hashes of the last element and of the row without its trailing run of that
    #: element, and the length of the run; ``name<`` the same from the other end.
    ends: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    #: Sampled hashes of 12 consecutive tokens, and number of tokens.
    shingles: list[int] = field(default_factory=list)
    tokens: int = 0
    waited: float = 0.0
    #: The worker that built it, and digests of the random streams it drew from, as they were when it began.
    worker: int | None = None
    streams: dict[str, str] = field(default_factory=dict)

    def row_keys(self, names: Iterable[str]) -> list[int]:
        """One key for some fields of each row together."""
        return [hash(row) for row in zip(*(self.fields.get(name, ()) for name in names), strict=False)]

    @property
    def content(self) -> list[int]:
        """A key of all fields together for each row."""
        return self.row_keys(sorted(self.fields))

    @property
    def keys(self) -> Sequence[RowKey]:
        """What orders are compared by: ids, else indices, else content."""
        return self.ids if self.ids is not None else self.content if self.indices is None else self.indices


#: The keys of a step's samples.
KeysOf = Callable[[Step], Sequence[RowKey]]


def ids_of(step: Step) -> Sequence[RowKey]:
    """The ids of a step's samples."""
    return step.ids or []


def indices_of(step: Step) -> Sequence[int]:
    """The indices of a step's samples in the dataset."""
    return step.indices or []


def remove_padding(steps: Sequence[Step]) -> None:
    """Replace the hashes of padded rows by those of the rows without padding.

    A field is padded with the most common element of runs of two or more at an end.
    """
    for name in {name for step in steps for name in step.fields}:
        ends: Counter[tuple[str, int]] = Counter()
        for step in steps:
            for end in (name, f"{name}<"):
                ends.update((end, value) for value, _, length in step.ends.get(end, ()) if length > 1)
        for (end, padding), _ in ends.most_common(1):
            for step in (step for step in steps if name in step.fields and end in step.ends):
                rows = zip(step.fields[name], step.ends[end], strict=True)
                step.fields[name] = [body if value == padding else key for key, (value, body, _) in rows]


@dataclass(frozen=True)
class Sizes:
    """Private bytes of memory: of the rank, and of its children by process id."""

    rank: int
    children: dict[int, int]


@dataclass(frozen=True)
class Moved:
    """A file that was open before workers were forked was read through the same handle afterwards."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class ReadAgain:
    """Batches were read in turn and then again, from one state of all random generators."""

    first: list[Step]
    again: list[Step]
    drew: bool  # whether a generator was drawn from
    #: Whether a copy of the dataset was as it had been: reading changes the dataset.
    changes_dataset: bool = False


@dataclass(frozen=True)
class CollatedAlone:
    """The samples of some batches were collated together, and one by one."""

    together: list[Step]
    alone: list[list[Step]]  # of each batch
    drew: bool  # whether collate drew from a generator


@dataclass
class RunFailure:
    """How a rank failed: it raised, hangs or died; with the last lines that it printed."""

    kind: str
    phase: str
    detail: str
    output: list[str] = field(default_factory=list)
    #: Whether no other rank failed before.
    root: bool = True


#: What a rank reports; text is what it does from now on.
Record = str | Event | Built | Step | Sizes | Moved | ReadAgain | CollatedAlone | RunFailure


@dataclass
class EpochLog:
    """What a rank received in an epoch."""

    epoch: int
    steps: list[Step] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    whole: bool = False
    cut: bool = False

    def order(self, keys_of: KeysOf) -> list[RowKey]:
        """The keys of all samples."""
        return [key for step in self.steps for key in keys_of(step)]

    @property
    def rows(self) -> int:
        return sum(step.rows or 0 for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "epoch": self.epoch,
            "steps": len(self.steps),
            "samples": self.rows,
            "to_its_end": self.whole,
            "waited_seconds": sum(step.waited for step in self.steps),
        }


@dataclass
class RankLog:
    """What a rank of a run reported."""

    rank: int
    built: Built | None = None
    epochs: list[EpochLog] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    read_again: ReadAgain | None = None
    collated_alone: CollatedAlone | None = None
    state_after: int | None = None
    failure: RunFailure | None = None
    done: bool = False
    phase: str = Phase.START

    @property
    def whole(self) -> list[EpochLog]:
        """Epochs that were read to their end."""
        return [epoch for epoch in self.epochs if epoch.whole]

    def add(self, record: Record) -> None:
        match record:
            case str():
                self.phase = record
            case Event("epoch", epoch):
                self.epochs.append(EpochLog(epoch))
            case Event("whole" | "cut" as name):
                self.epochs[-1].whole, self.epochs[-1].cut = name == "whole", name == "cut"
            case Event("state", step):
                self.state_after = step
            case Event("done"):
                self.done = True
            case Built():
                self.built = self.built or record
            case Step():
                self.epochs[-1].steps.append(record)
            case Sizes():
                self.epochs[-1].sizes.append(record)
            case Moved():
                self.moved.append(record)
            case ReadAgain():
                self.read_again = record
            case CollatedAlone():
                self.collated_alone = record
            case RunFailure():
                self.failure = record

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        failure = None if self.failure is None else vars(self.failure)
        return {"rank": self.rank, "failure": failure, "epochs": [epoch.as_dict() for epoch in self.epochs]}


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
        return [list(epochs) for epochs in zip(*(rank.whole for rank in self.ranks), strict=False)]

    @property
    def cut(self) -> list[EpochLog]:
        """The first epoch of each rank, if it was cut on any."""
        first = [rank.epochs[0] for rank in self.ranks if rank.epochs]
        return first if len(first) == len(self.ranks) and any(epoch.cut for epoch in first) else []

    @property
    def steps(self) -> Iterator[Step]:
        return (step for rank in self.ranks for epoch in rank.epochs for step in epoch.steps)

    @property
    def largest_batch(self) -> int:
        """The largest number of rows in a batch."""
        return max((step.rows or len(indices_of(step)) for step in self.steps), default=0)

    @property
    def built(self) -> list[Built]:
        return [rank.built for rank in self.ranks if rank.built is not None]

    @property
    def remainder(self) -> int:
        """The largest number of samples that all workers lack for a last batch."""
        return self.job.ranks * max(self.job.workers, 1) * self.largest_batch

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        job = self.job
        run = {"run": job.name, "ranks": job.ranks, "workers": job.workers, "start_method": job.start_method}
        return run | {"by_rank": [rank.as_dict() for rank in self.ranks]}
