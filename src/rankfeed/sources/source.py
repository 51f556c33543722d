"""What every source of samples is: a length, blocks, and rows on demand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_int, check_int_array, check_names
from rankfeed.columns import Columns, Field, Layout
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.storage import DataFiles

if TYPE_CHECKING:
    from rankfeed.sources.select import Chosen, SelectSource

Int64 = npt.NDArray[np.int64]
Collate = Callable[[Sequence[Any]], Any]
#: What a source returns by number, unless it wraps a Dataset whose samples are something else.
Sample = dict[str, Any]
Annotate = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Declared:
    """What is known of samples that have to be read to learn their fields.

    Args:
        what: who returns the samples, as errors say it.
        call: how the source was made, up to where ``ragged=`` or ``fields=`` would stand, for remedies.
        layout: all there is to know; None to read some samples.
        ragged: names of fields that are ragged, whatever the samples read show.
    """

    what: str
    call: str
    layout: Layout | None = None
    ragged: tuple[str, ...] = ()

    @staticmethod
    def names(ragged: Any) -> tuple[str, ...]:
        """The names that ``ragged=`` gives, positions in a tuple as text.

        Raises:
            ArgumentError: it is no list of names.
        """
        names = (
            [str(each) if type(each) is int else each for each in ragged]
            if isinstance(ragged, Sequence)
            else ragged
        )
        return tuple(check_names("ragged", ragged if isinstance(ragged, str) else names))


class Source(ABC):
    """Samples that lie somewhere, read in place. Also a map-style torch Dataset.

    A source knows nothing of ranks and workers: it is handed sample ids. It pickles as a path and a few integers
    and opens its files in the process that reads, so that it is safe after fork and spawn.

    To add a format, give ``blocks``, ``fields``, ``fingerprint`` and ``fetch``; the rest follows.

    Attributes:
        default_shuffle: the kind that suits the format; what ``shuffle=True`` means.
        best_window: samples that a window should mix where nobody chose a number; None for any.
        runs_user_code: whether reading a sample calls code of the user's, which may draw random numbers.
        takes_batches: whether such code reads many samples at once, and is seeded for them together.
        collate: makes a batch of samples that are no dicts, where the user gives no ``collate_fn``; None for
            torch's own way.
        annotate: puts a further tensor on such a batch, by name; None where there is no room for one.
        looks_ahead: how many samples before their turn the source would know of them (see `expect`); 0: never.
        as_dicts: whether samples are dicts with a column for each key. If not, ``fetch`` gives them in one column
            of objects (`Columns.of_objects`).
        declared: what is known of the fields where they are learned by reading samples; None where the data say.
        files: the files that it reads, as this job first saw them; None where it reads none by itself.
    """

    default_shuffle: ClassVar[Literal["global", "window"]] = "global"
    best_window: int | None = None
    runs_user_code: ClassVar[bool] = False
    takes_batches: bool = False
    collate: Collate | None = None
    annotate: Annotate | None = None
    looks_ahead: int = 0
    as_dicts: bool = True
    declared: Declared | None = None
    files: DataFiles | None = None

    @property
    def identified(self) -> bool:
        """Whether the fingerprint tells these samples from all others."""
        return True

    @property
    @abstractmethod
    def blocks(self) -> Int64:
        """Samples in each block (what is read in one go), in the order of sample ids: int64."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal digits that change with the data, not with where they are mounted."""

    @abstractmethod
    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples, in the order given.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample or column, or the data cannot be read.
        """

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """Some samples one by one, in the order given; those of a wrapped Dataset as it returns them.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of the columns that dicts are to have; None for all.

        Raises:
            SourceError: no such sample or column, or the data cannot be read.

        Examples:
            >>> import rankfeed as rf
            >>> rf.from_dataset([(1, "a"), (2, "b")]).samples([1])
            [(2, 'b')]
        """
        return self.fetch(sample_ids, columns).samples()

    def expect(  # noqa: B027  (a hint: doing nothing is right)
        self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None
    ) -> None:
        """What will be read next: a hint, for a source that can fetch ahead."""

    def check_unchanged(self) -> None:
        """Find that a file which is being read was rewritten in place since the source was opened.

        Sources do so at most once a second while they fetch; a Loader calls this with each ``state_dict()`` and
        at the end of each epoch.

        Raises:
            CorruptError: one was; names it.
        """
        if self.files is not None:
            self.files.check_open()

    def select(
        self, chosen: Chosen, *, columns: Sequence[str] | None = None, progress: bool = True
    ) -> SelectSource:
        """Some of the samples, in the order given, as a source of their own.

        Args:
            chosen: sample ids (each once), a bool mask with a value for each sample, a slice or range, or a
                predicate: called with each sample once, now, in order, and true of those that are selected.
            columns: names of the columns that the predicate reads; None for all.
            progress: a bar on standard error while a predicate reads, if that is a terminal.

        Raises:
            ArgumentError: these are no ids of the source, or the predicate returned something else than True or
                False.
            SourceError: nothing is selected, the predicate raised, or the data cannot be read.
        """
        from rankfeed.sources.select import select

        return select(self, chosen, columns=columns, progress=progress)

    def __len__(self) -> int:
        refuse_trainer_without_mixin("a rankfeed source", is_share=False)
        return self._num_samples()

    def _num_samples(self) -> int:
        """The sum of ``blocks``, unless the format knows it without them."""
        return int(np.sum(self.blocks))

    def __getitem__(self, index: int | slice) -> Sample:
        if isinstance(index, slice):
            raise ArgumentError(
                "a slice of a source is not read at once",
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


def check_ids(sample_ids: npt.ArrayLike, size: int) -> Int64:
    """Sample ids as int64.

    Raises:
        ArgumentError: these are no integers.
        SourceError: one is outside [0, size).
    """
    ids = check_int_array("sample_ids", sample_ids).reshape(-1)
    if ids.size and int(ids.view(np.uint64).max()) >= size:
        raise SourceError(
            "no such sample", expected=f"ids from 0 to {size - 1}", found=f"{ids.min()} to {ids.max()}"
        )
    return ids


def check_columns(columns: Sequence[str] | None, fields: Mapping[str, Field]) -> list[str]:
    """Names of the columns wanted.

    Raises:
        ArgumentError: one is not there; names those that are.
    """
    if columns is None:
        return list(fields)
    names = check_names("columns", columns)
    missing = [name for name in names if name not in fields]
    if missing:
        raise ArgumentError(
            "no such column", expected="some of " + ", ".join(fields), found=", ".join(map(repr, missing))
        )
    return names


def by_chunk(ids: Int64, starts: Int64) -> list[tuple[int, Int64, Int64 | None]]:
    """Sample ids grouped by the chunk (shard, file, row group) that they lie in.

    Args:
        ids: int64 [m].
        starts: int64 [chunks + 1], the first id of each chunk, and at the end their number.

    Returns:
        for each chunk that is met: its number, rows within it, and which of ``ids`` they are (None for all). Of no
        ids: no rows of a chunk that has some.

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
    # Few chunks have small numbers, which numpy sorts by their digits.
    order = chunk.astype(np.uint16 if len(starts) < 2**16 else np.int64).argsort(kind="stable")
    chunk = chunk[order]
    edges = (np.flatnonzero(chunk[1:] != chunk[:-1]) + 1).tolist()
    rows = rows[order]
    return [
        (number, rows[first:last], order[first:last])
        for number, first, last in zip(chunk[[0, *edges]].tolist(), [0, *edges], [*edges, len(ids)], strict=True)
    ]
