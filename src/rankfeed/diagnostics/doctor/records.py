"""What a rank of a run reports while it reads the user's loader, one JSON line per event.

The lines are written to a file, so that what a rank reported before it was killed is kept.
"""

import msgspec

from rankfeed.storage.commit import decodable

#: Phases of a rank: before the factory is imported, while a state is loaded, and while ids are read.
IMPORT, STATE, IDS = "importing the factory", "loading the state", "reading the ids"
#: What identifies a row: its id, its index in the dataset, or a hash.
RowKey = int | str


@decodable
class Job(msgspec.Struct, frozen=True):
    """What the ranks of a run do.

    Attributes:
        name: of the run.
        factory: ``module:function`` or ``file.py:function``.
        path: directories to import from, before all others.
        ranks: number of ranks.
        workers: passed to the factory as ``num_workers``.
        start_method: of the processes that the loader starts.
        epochs: how often the loader is read.
        timeout: seconds for the factory and for each batch.
        max_steps: an epoch is cut after this many.
        max_seconds: an epoch is cut after this long.
        key: where a batch has its ids; None: as the factory says, or the usual.
        set_epoch: whether to call `set_epoch` where it exists.
        step_seconds: how long the consumer works on a batch.
        states: directory for the loader's state from the middle of its first epoch; None: not saved.
        resume: such a directory to resume from.
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


@decodable
class Record(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One line."""


@decodable
class Ready(Record, frozen=True):
    """The process group is initialised; the factory is called next."""


@decodable
class Built(Record, frozen=True):
    """The factory returned.

    Attributes:
        seconds: it took.
        bytes: by which it made the process larger.
        length: ``len(loader)``, if it has one.
        samples: length of a map-style dataset.
        subset: for a torch Subset, its indices in the dataset that it is part of.
        fingerprint: of the dataset, if it has one.
        workers: of the loader.
        cuts_one_dataset: whether a sampler shards what must be the same dataset on all ranks.
        drops: whether an incomplete last batch or remainder is dropped by declaration.
        replaces: whether samples are drawn with replacement by declaration.
        shuffles: whether the sampler says that it shuffles; None: it does not say.
        resumes: whether it has a state.
        elastic: whether its state can be loaded on any number of ranks.
        seeded: whether the global generator of torch was seeded.
        pickled: bytes of the dataset that each worker receives by pickle, if known.
    """

    seconds: float
    bytes: int = 0
    length: int | None = None
    samples: int | None = None
    subset: list[int] | None = None
    fingerprint: str | None = None
    workers: int | None = None
    cuts_one_dataset: bool = False
    drops: bool = False
    replaces: bool = False
    shuffles: bool | None = None
    resumes: bool = False
    elastic: bool = False
    seeded: bool = False
    pickled: int | None = None


@decodable
class Began(Record, frozen=True):
    """An epoch began."""

    epoch: int


@decodable
class Step(Record, frozen=True):
    """A batch arrived.

    Attributes:
        rows: number of rows; None if the batch has no rows that can be told apart.
        ids: declared ids of the rows.
        indices: dataset indices that collate was given, in order.
        nones: how many of the samples given to collate were None.
        fields: hash of each row's value, by field.
        ends: of fields that may be padded: hashes of the last element and of the row without its trailing run of
            that element, and the length of the run; ``name<`` the same from the other end.
        shingles: sampled hashes of 12 consecutive tokens.
        tokens: number of tokens in rows of integers.
        waited: seconds for it.
        worker: that built it, if known.
        streams: digests of the random streams that the worker drew from, as they were when it began.
    """

    rows: int | None = None
    ids: list[RowKey] | None = None
    indices: list[int] | None = None
    nones: int = 0
    fields: dict[str, list[int]] = {}
    ends: dict[str, list[tuple[int, int, int]]] = {}
    shingles: list[int] = []
    tokens: int = 0
    waited: float = 0.0
    worker: int | None = None
    streams: dict[str, str] = {}

    @property
    def content(self) -> list[RowKey]:
        """A key of all fields together for each row."""
        return [hash(row) for row in zip(*(self.fields[name] for name in sorted(self.fields)), strict=False)]

    @property
    def keys(self) -> list[RowKey]:
        """What orders are compared by: ids, else indices, else content."""
        return self.ids if self.ids is not None else self.content if self.indices is None else [*self.indices]


@decodable
class Sizes(Record, frozen=True):
    """Private bytes of memory: of the rank, and of its children by process id."""

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
    """The state to resume from was taken after this many steps of the first epoch; the last such record holds."""

    step: int


@decodable
class Ended(Record, frozen=True):
    """An epoch ended: complete, or cut."""

    whole: bool


@decodable
class Raised(Record, frozen=True):
    """The user's code raised an error: the phase, and the end of the traceback."""

    phase: str
    error: str
    traceback: str


@decodable
class Done(Record, frozen=True):
    """The rank has finished."""


Line = Ready | Built | Began | Step | Sizes | Moved | Stated | Ended | Raised | Done
