"""What a rank of a probe says while it reads the user's loader, a line for each thing.

The lines lie in a file: what a rank said before it was killed is there.
"""

import msgspec

from rankfeed.storage.commit import decodable

#: What a rank says that it does before it has the factory, while a state is loaded, and while it looks for ids.
IMPORT, STATE, IDS = "importing the factory", "loading the state", "looking for ids"
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


@decodable
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
        shuffles: whether it says that it shuffles; None: it does not say.
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
    shuffles: bool | None = None
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
    """The state to resume from was taken after so many steps of the first epoch; what is said later holds."""

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
