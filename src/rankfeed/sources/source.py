"""The Source contract, its base classes, and functions that all sources share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_int, check_int_array, check_names
from rankfeed.columns import Bytes, Column, Columns, Dense, Field, Layout, Objects, Ragged, RowSlices, RowTake
from rankfeed.errors import ArgumentError, RankfeedError, SourceError
from rankfeed.storage import DataFiles

if TYPE_CHECKING:
    from rankfeed.sources.select import Selection, SelectSource

Int64 = npt.NDArray[np.int64]
Collate = Callable[[Sequence[Any]], Any]
Annotate = Callable[[Any, str, Any], None]
Sample = dict[str, Any]

#: Approximate size of a block of data that can be read at any place.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Declared:
    """What the user declared about samples whose fields are learned by reading some of them.

    Args:
        what: the object that returns the samples, for error messages.
        call: the call that made the source, up to where ``ragged=`` or ``fields=`` would follow, for remedies.
        layout: the complete layout; None to read some samples.
        ragged: names of fields that are ragged even if the samples that are read do not show it.
    """

    what: str
    call: str
    layout: Layout | None = None
    ragged: tuple[str, ...] = ()

    @staticmethod
    def names(ragged: Any) -> tuple[str, ...]:
        """The names in ``ragged=``; positions in a tuple become text."""
        names = (
            [str(each) if type(each) is int else each for each in ragged]
            if isinstance(ragged, Sequence)
            else ragged
        )
        return tuple(check_names("ragged", ragged if isinstance(ragged, str) else names))


class Source(ABC):
    """ColumnBuffer samples, read in place by sample id. Also a map-style torch Dataset.

    A source knows nothing of ranks and workers. It pickles as a path and a few integers and opens its files in the
    process that reads them, so it works after fork and spawn.

    A new format implements ``blocks``, ``fields``, ``fingerprint`` and ``fetch``.

    Attributes:
        default_shuffle: what ``shuffle=True`` means for this format.
        best_window: samples in a window if the user gives no ``window``; None for the default.
        runs_user_code: whether reading a sample calls user code, which may draw random numbers.
        supports_batched_getitem: whether such code reads many samples per call, and is seeded once for all of
            them.
        collate: makes a batch of samples that are not dicts if the user gives no ``collate_fn``; None for torch's.
        annotate: ``annotate(batch, name, tensor)`` adds a tensor to such a batch; None if it cannot be added.
        prefetch_distance: number of samples ahead of their use that `expect` should announce; 0 for none.
        as_dicts: whether samples are dicts of columns. If not, ``fetch`` returns one column of objects.
        declared: what the user declared about the fields; None if the data define them.
        files: the files of the source as this job first saw them; None if it reads no files itself.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "global"
    best_window: int | None = None
    runs_user_code: ClassVar[bool] = False
    supports_batched_getitem: bool = False
    collate: Collate | None = None
    annotate: Annotate | None = None
    prefetch_distance: int = 0
    as_dicts: bool = True
    declared: Declared | None = None
    files: DataFiles | None = None

    @property
    def identified(self) -> bool:
        """Whether the fingerprint depends on the content of the samples."""
        return True

    @property
    @abstractmethod
    def blocks(self) -> Int64:
        """Number of samples in each block (what is read in one piece), in the order of sample ids: int64."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """Kind, dtype and shape of each column."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digest that changes with the data, but not with their mount point."""

    @abstractmethod
    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Rows of the given samples, in the given order.

        Args:
            sample_ids: integers in [0, len(self)).
            columns: names of the columns to read; None for all.

        Raises:
            SourceError: a sample or column does not exist, or the data cannot be read.
            CorruptError: the data are damaged, or were changed while they are in use.
        """

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """The given samples as a list: dicts of columns, or the objects that a wrapped Dataset returns.

        Args:
            sample_ids: integers in [0, len(self)).
            columns: names of the columns in the dicts; None for all.

        Raises:
            SourceError: a sample or column does not exist, or the data cannot be read.

        Examples:
            >>> import rankfeed as rf
            >>> rf.from_dataset([(1, "a"), (2, "b")]).samples([1])
            [(2, 'b')]
        """
        return self.fetch(sample_ids, columns).samples()

    def expect(  # noqa: B027  (a hint: an empty default is correct)
        self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None
    ) -> None:
        """Announce samples that will be read soon: a prefetch hint."""

    def check_unchanged(self) -> None:
        """Check that no open file was rewritten in place since the source was opened.

        Sources check at most once per second while they read; a Loader calls this with each ``state_dict()`` and
        at the end of each epoch.

        Raises:
            CorruptError: a file was changed; names it.
        """
        if self.files is not None:
            self.files.check_open()

    def select(
        self, chosen: Selection, *, columns: Sequence[str] | None = None, progress: bool = True
    ) -> SelectSource:
        """A source of some of the samples, in the given order.

        Args:
            chosen: sample ids (each once), a bool mask with a value for each sample, a slice or range, or a
                predicate, which is called now, once for each sample in order.
            columns: names of the columns that the predicate reads; None for all.
            progress: show a progress bar on standard error while a predicate reads, if it is a terminal.

        Raises:
            ArgumentError: an id is invalid or repeated, or the predicate returned neither True nor False.
            SourceError: the selection is empty, the predicate raised, or the data cannot be read.
        """
        from rankfeed.sources.select import select

        return select(self, chosen, columns=columns, progress=progress)

    def __len__(self) -> int:
        refuse_trainer_without_mixin("a rankfeed source", is_share=False)
        return self._num_samples()

    def _num_samples(self) -> int:
        return int(np.sum(self.blocks))

    def __getitem__(self, index: int | slice) -> Sample:
        if isinstance(index, slice):
            raise ArgumentError(
                "a source cannot be indexed with a slice",
                found=index,
                remedy="source.select(slice) is a source of these samples; source.fetch(range(...)) reads them",
            )
        return self.__getitems__([check_int("index", index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        size = len(self)
        given = check_int_array("indices", indices).reshape(-1).tolist()
        ids = [index + size if index < 0 else index for index in given]
        if any(not 0 <= each < size for each in ids):
            raise IndexError(f"sample {max(ids)} of a source of {size}")
        return self.samples(ids)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class SourceView(Source):
    """Samples of other sources, whose properties are combined here.

    Attributes:
        sources: at least one.
        splits: how often the samples were split at random; the next split uses another hash.
    """

    def __init__(self, *sources: Source, splits: int | None = None) -> None:
        self.sources = sources
        inherited = max((source.splits for source in sources if isinstance(source, SourceView)), default=0)
        self.splits: int = inherited if splits is None else splits

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """Windows if one source needs them: the others lose little by it."""
        return "window" if any(source.default_shuffle == "window" for source in self.sources) else "global"

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        """The smallest of all."""
        return min((each.best_window for each in self.sources if each.best_window is not None), default=None)

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        """Whether a source runs user code."""
        return any(source.runs_user_code for source in self.sources)

    @property
    def supports_batched_getitem(self) -> bool:  # type: ignore[override]
        """Whether all user code reads batches; otherwise each sample is seeded."""
        user = [source.supports_batched_getitem for source in self.sources if source.runs_user_code]
        return bool(user) and all(user)

    @property
    def collate(self) -> Collate | None:  # type: ignore[override]
        """That of all sources if it is the same."""
        first, *others = (source.collate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def annotate(self) -> Annotate | None:  # type: ignore[override]
        """That of all sources if it is the same."""
        first, *others = (source.annotate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def prefetch_distance(self) -> int:  # type: ignore[override]
        """The largest of all."""
        return max(source.prefetch_distance for source in self.sources)

    @property
    def identified(self) -> bool:
        """Whether all fingerprints depend on content."""
        return all(source.identified for source in self.sources)

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether all samples are dicts of columns."""
        return all(source.as_dicts for source in self.sources)

    @property
    def declared(self) -> Declared | None:  # type: ignore[override]
        """What was declared, if the fields of a source are learned by reading samples."""
        declared = [source.declared for source in self.sources]
        some = [each for each in declared if each is not None]
        if not some:
            return None
        ragged = {name for each in some for name in each.ragged}
        for source in self.sources:
            if source.declared is None and source.as_dicts:
                ragged |= {name for name, field in source.fields.items() if field.kind == "ragged"}
        layout = some[0].layout if all(each == declared[0] for each in declared) else None
        return Declared(some[0].what, some[0].call, layout, tuple(sorted(ragged)))

    def check_unchanged(self) -> None:
        for source in self.sources:
            source.check_unchanged()


def check_ids(sample_ids: npt.ArrayLike, size: int) -> Int64:
    """Sample ids as int64; a SourceError if one is outside [0, size)."""
    ids = check_int_array("sample_ids", sample_ids).reshape(-1)
    if ids.size and int(ids.view(np.uint64).max()) >= size:
        raise SourceError(
            "no such sample", expected=f"ids from 0 to {size - 1}", found=f"{ids.min()} to {ids.max()}"
        )
    return ids


def check_columns(columns: Sequence[str] | None, fields: Mapping[str, Any]) -> list[str]:
    """Names of the requested columns; an ArgumentError if one does not exist."""
    if columns is None:
        return list(fields)
    names = check_names("columns", columns)
    missing = [name for name in names if name not in fields]
    if missing:
        raise ArgumentError(
            "no such column", expected="some of " + ", ".join(fields), found=", ".join(map(repr, missing))
        )
    return names


def reopen(kind: Callable[..., Source], where: Any, options: Mapping[str, Any], fingerprint: str) -> Source:
    """Unpickle a source by opening its data again; an error if they are not the same data."""
    source = kind(where, **options)
    check_same_data(source.fingerprint, fingerprint, where)
    return source


def check_same_data(found: str, expected: str, where: object) -> None:
    """Compare two digests; a SourceError if data are not those that the job opened first."""
    if found != expected:
        raise SourceError(
            "the data were changed or replaced while they were in use",
            expected=f"fingerprint {expected}",
            found=found,
            where=where,
            remedy="start the job again; write new data to another directory while a job reads these",
        )


def with_where(error: RankfeedError, where: str) -> RankfeedError:
    """The same error about another place."""
    return type(error)(error.summary, expected=error.expected, found=error.found, where=where, remedy=error.remedy)


def starts_of(counts: npt.ArrayLike) -> Int64:
    """First index of each chunk, and the total at the end: int64 [chunks + 1].

    Examples:
        >>> starts_of([2, 0, 4])
        array([0, 2, 2, 6])
    """
    counts = np.asarray(counts, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def even_blocks(rows: int, block_rows: int) -> Int64:
    """Blocks of ``block_rows`` rows; the last one has the remainder.

    Examples:
        >>> even_blocks(7, 3)
        array([3, 3, 1])
    """
    block_rows = max(1, min(rows, block_rows))
    return np.diff(np.append(np.arange(0, rows, block_rows), rows))


def empty_column(field: Field) -> Column:
    """A column without rows."""
    if field.kind == "object":
        return Objects([])
    none = np.empty(0, np.int64)
    if field.kind in ("bytes", "str"):
        return Bytes([RowSlices(np.empty(0, np.uint8), none, none)], text=field.kind == "str")
    values = np.empty((0, *field.shape), field.dtype)
    return Dense([RowTake(values, none)]) if field.kind == "dense" else Ragged([RowSlices(values, none, none)])


def by_chunk(ids: Int64, starts: Int64) -> list[tuple[int, Int64, Int64 | None]]:
    """Group sample ids by the chunk (shard, file, row group) that contains them.

    Args:
        ids: int64 [m].
        starts: int64 [chunks + 1], the first id of each chunk, and the number of samples at the end.

    Returns:
        for each chunk: its number, the rows in it, and their positions in ``ids`` (None for all). For no ids, no
        rows of the first chunk that is not empty.

    Examples:
        >>> by_chunk(np.array([5, 0, 4]), np.array([0, 2, 6]))
        [(0, array([0]), array([1])), (1, array([3, 2]), array([0, 2]))]
        >>> by_chunk(np.array([], int), np.array([0, 0, 2, 6]))
        [(1, array([], dtype=int64), None)]
    """
    if len(starts) == 2:
        return [(0, ids, None)]
    chunk = starts.searchsorted(ids, side="right") - 1
    if not len(ids) or (chunk == chunk[0]).all():
        number = int(chunk[0] if len(ids) else np.argmax(starts[1:] > 0))
        return [(number, ids - starts[number], None)]
    rows = ids - starts[chunk]
    # numpy sorts uint16 with a radix sort.
    order = chunk.astype(np.uint16 if len(starts) < 2**16 else np.int64).argsort(kind="stable")
    chunk = chunk[order]
    edges = (np.flatnonzero(chunk[1:] != chunk[:-1]) + 1).tolist()
    rows = rows[order]
    return [
        (number, rows[first:last], order[first:last])
        for number, first, last in zip(chunk[[0, *edges]].tolist(), [0, *edges], [*edges, len(ids)], strict=True)
    ]
