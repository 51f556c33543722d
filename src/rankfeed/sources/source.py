"""The Source contract, selections and other views of sources, and functions that all sources share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.progress import progress_bar
from rankfeed._util.trainer import refuse_trainer_without_mixin
from rankfeed._util.validate import check_bool, check_int, check_int_array, check_names
from rankfeed.columns.columns import Column, Columns
from rankfeed.columns.field import Field
from rankfeed.columns.layout import Layout
from rankfeed.errors import ArgumentError, CorruptError, SourceError, describe_error, safe_str
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles

Int64 = npt.NDArray[np.int64]
Derived = Mapping[str, Sequence[str]]
Sample = dict[str, Any]
#: Sample ids, a mask, a slice, a range or a predicate.
Selection = npt.ArrayLike | slice | range | Callable[[Any], Any]

#: Approximate size of a block of data that can be read at any place.
BLOCK_BYTES = 4 << 20
#: Decoded data of at most this size are shuffled globally by ``shuffle=True``: they can be held in memory.
GLOBAL_SHUFFLE_BYTES = 512 << 20
#: Samples that are read to learn the fields; more are read if these leave a type open (empty lists).
PROBES, MORE_PROBES = 8, 64
#: Characters of a list of classes that errors show.
_MOST_SHOWN = 200
#: Limits of the rows that `scan` reads at once, and the assumed bytes of a row of unknown length.
_SCAN_BYTES, _SCAN_ROWS, _UNKNOWN_ROW = 1 << 20, 4096, 4096


@dataclass(frozen=True)
class Declared:
    """What the user declared about samples whose fields are learned by reading some of them."""

    what: str  # the object that returns the samples, for error messages
    call: str  # that made the source, up to where ``ragged=`` or ``fields=`` would follow, for remedies
    layout: Layout | None = None  # complete; None to read some samples
    ragged: tuple[str, ...] = ()  # fields that are ragged even if the samples that are read do not show it

    @staticmethod
    def names(ragged: Any) -> tuple[str, ...]:
        """The names in ``ragged=``; positions in a tuple become text."""
        if isinstance(ragged, Sequence) and not isinstance(ragged, str):
            ragged = [str(name) if type(name) is int else name for name in ragged]
        return tuple(check_names("ragged", ragged))


def probe_ids(size: int, count: int = PROBES) -> Int64:
    """Evenly spaced sample ids, beginning with 0: the same on every rank and after every resume."""
    return np.arange(size) if size <= count else np.arange(count) * (size - 1) // count


class Source:
    """Samples in storage, read in place by sample id. Also a map-style torch Dataset.

    A source knows nothing of ranks and workers. It pickles what was learned of its files, and opens them in the
    process that reads them, so it works after fork and spawn.

    A new format overrides ``blocks``, ``fields``, ``fingerprint`` and ``fetch``; or it calls ``_init_samples`` and
    implements ``_fetch``, to which `fetch` passes ids and names that it checked.

    Attributes:
        default_shuffle: what ``shuffle=True`` means for these data: "window" if pieces of them have to be decoded,
            and all do not fit into memory.
        decoded_bytes: approximate size of the data if pieces of them have to be decoded, from their metadata; 0 if
            rows are read singly.
        cache_bytes: limit of the decoded data that a process keeps.
        best_window: samples in a window if the user gives no ``window``; None for the default.
        runs_user_code: whether reading a sample calls user code, which may draw random numbers.
        supports_batched_getitem: whether such code reads many samples per call, and is seeded once for all.
        collate: makes a batch of samples that are not dicts if the user gives no ``collate_fn``; None for torch's.
        annotate: ``annotate(batch, name, tensor)`` adds a tensor to such a batch; None if it cannot be added.
        prefetch_distance: number of samples ahead of their use that `expect` should announce; 0 for none.
        reads_in_place: whether `fetch` only points at rows in memory-mapped files or in memory, without a copy.
        as_dicts: whether samples are dicts of columns. If not, ``fetch`` returns one column of objects.
        declared: what the user declared about the fields; None if the data define them.
        derived: by column, the columns that are made from it and are always read with it, such as its mask.
        logical_types: by column, what its integers are: "int64", the Arrow type of a time, or class labels; only
            columns of which the source knows it. The key "" is for samples that are not dicts.
        files: the files of the source as this job first saw them; None if it reads no files itself.
    """

    default_shuffle: Literal["global", "window"] = "global"
    decoded_bytes: int = 0
    cache_bytes: int = 0
    best_window: int | None = None
    runs_user_code: bool = False
    supports_batched_getitem: bool = False
    collate: Callable[[Sequence[Any]], Any] | None = None
    annotate: Callable[[Any, str, Any], None] | None = None
    prefetch_distance: int = 0
    reads_in_place: bool = False
    as_dicts: bool = True
    declared: Declared | None = None
    derived: Derived = MappingProxyType({})
    logical_types: Mapping[str, str] = MappingProxyType({})
    files: DataFiles | None = None

    _label: str = ""
    _fields: Mapping[str, Field]
    _blocks: Int64
    _fingerprint: str
    _length: int | None = None  # None: the sum of the blocks

    def _init_samples(
        self, label: object, fields: Mapping[str, Field], blocks: Int64, fingerprint: str = ""
    ) -> None:
        """Store the properties; raises a SourceError for no samples. ``label`` is for that and the repr."""
        self._label = str(label)
        self._fields, self._blocks, self._fingerprint = fields, blocks, fingerprint
        self._length = int(blocks.sum())
        if not self._length:
            raise SourceError("there are no samples", where=label)

    @property
    def identified(self) -> bool:
        """Whether the fingerprint depends on the content of the samples."""
        return True

    @property
    def tells_content(self) -> bool:
        """Whether the fingerprint is enough to recognise the samples when a job resumes."""
        return self.identified

    @property
    def earlier_fingerprint(self) -> str:
        """The fingerprint that states of earlier versions have for the same data."""
        return self.fingerprint

    @property
    def blocks(self) -> Int64:
        """Number of samples in each block (what is read in one piece), in the order of sample ids: int64."""
        return self._blocks

    @property
    def fields(self) -> Mapping[str, Field]:
        """Kind, dtype and shape of each column."""
        return self._fields

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest that changes with the data, but not with their mount point."""
        return self._fingerprint

    @property
    def cached_blocks(self) -> int | None:
        """Blocks whose decoded data fit into the cache, approximately; None if no blocks have to be decoded."""
        return max(1, self.cache_bytes * len(self.blocks) // self.decoded_bytes) if self.decoded_bytes else None

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Rows of the given samples, in the given order.

        Args:
            sample_ids: integers in [0, len(self)).
            columns: names of the columns to read, in the order of the result; None for all. Columns that are
                derived from one of them, such as its mask, follow it.

        Raises:
            SourceError: a sample or column does not exist, or the data cannot be read.
            CorruptError: the data are damaged, or were changed while they are in use.
        """
        ids, names = check_ids(sample_ids, len(self)), check_columns(columns, self.fields, self.derived)
        if self.files is None:
            return Columns(self._fetch(ids, names), len(ids), as_dicts=self.as_dicts)
        self.files.check_open(at_intervals=True)
        try:
            return Columns(self._fetch(ids, names), len(ids), as_dicts=self.as_dicts)
        finally:
            self.files.check_read()

    def _fetch(self, ids: Int64, names: Sequence[str]) -> Mapping[str, Column]:
        """The columns with these names, in this order."""
        raise NotImplementedError(f"{type(self).__name__} implements neither fetch nor _fetch")

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """The given samples as a list: dicts of columns, or the objects that a wrapped Dataset returns.

        Arguments and errors are those of `fetch`.

        Examples:
            >>> import rankfeed as rf
            >>> rf.from_dataset([(1, "a"), (2, "b")]).samples([1])
            [(2, 'b')]
        """
        return self.fetch(sample_ids, columns).samples()

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Announce samples that will be read soon: a prefetch hint."""

    def name_of(self, sample_id: int) -> str:
        """Names a sample in error messages."""
        return f"sample {sample_id}"

    def check_unchanged(self, *, at_intervals: bool = False) -> None:
        """Check that no open file was rewritten in place since the source was opened.

        A Loader calls this with each ``state_dict()`` and at the end of each epoch; and for each batch with
        ``at_intervals``, which checks at most once per second.

        Raises:
            CorruptError: a file was changed; names it.
        """
        if self.files is not None:
            self.files.check_open(at_intervals=at_intervals)

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

        Examples:
            >>> import rankfeed as rf
            >>> source = rf.from_dataset([{"x": number * number} for number in range(10)])
            >>> int(source.select([7, 2])[0]["x"]), len(source.select(slice(0, None, 3)))
            (49, 4)
            >>> source.select(lambda sample: sample["x"] > 50, columns=["x"]).origin_ids([0, 1])
            array([8, 9])
        """
        progress = check_bool("progress", progress)
        if callable(chosen) and not isinstance(chosen, type):
            check_columns(columns, self.fields)
            chosen = _matching_ids(self, chosen, columns, progress)
        elif columns is not None:
            raise ArgumentError(
                "columns= is for a predicate only",
                remedy="rankfeed.open(..., columns=[...]) restricts the columns",
            )
        return SelectSource(self, resolve_selection(chosen, len(self)))

    def __len__(self) -> int:
        refuse_trainer_without_mixin("a rankfeed source", is_share=False)
        return int(np.sum(self.blocks)) if self._length is None else self._length

    def __repr__(self) -> str:
        label = f"{self._label!r}, " if self._label else ""
        return f"{type(self).__name__}({label}{len(self)} samples)"

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
        integers = check_int_array("indices", indices).reshape(-1).tolist()
        ids = [index + size if index < 0 else index for index in integers]
        if any(not 0 <= sample_id < size for sample_id in ids):
            raise IndexError(f"sample {max(ids)} of a source of {size}")
        return self.samples(ids)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class SourceView(Source):
    """Samples of other sources, whose properties are combined here."""

    def __init__(self, *sources: Source, splits: int = 0) -> None:
        self.sources = sources
        #: How often the samples were split at random; the next split uses another hash.
        self.splits: int = max([splits, *(source.splits for source in sources if isinstance(source, SourceView))])
        self.prefetch_distance = max(source.prefetch_distance for source in sources)
        self.cache_bytes = sum(source.cache_bytes for source in sources)
        first, *others = sources
        self.collate = first.collate if all(other.collate == first.collate for other in others) else None
        self.annotate = first.annotate if all(other.annotate == first.annotate for other in others) else None
        user = [source.supports_batched_getitem for source in sources if source.runs_user_code]
        self.supports_batched_getitem = bool(user) and all(user)  # otherwise each sample is seeded
        self.runs_user_code = bool(user)
        self.derived = {name: added for source in sources for name, added in source.derived.items()}
        self.logical_types = {name: kind for source in sources for name, kind in source.logical_types.items()}

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """Windows if one source needs them, or all together: the others lose little."""
        needs_windows = any(source.default_shuffle == "window" for source in self.sources)
        return "window" if needs_windows or self.decoded_bytes > GLOBAL_SHUFFLE_BYTES else "global"

    @property
    def decoded_bytes(self) -> int:  # type: ignore[override]
        return sum(source.decoded_bytes for source in self.sources)

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        return min((source.best_window for source in self.sources if source.best_window), default=None)

    @property
    def reads_in_place(self) -> bool:  # type: ignore[override]
        """Whether all do, from columns of the same types."""
        return all(source.reads_in_place and source.fields == self.sources[0].fields for source in self.sources)

    @property
    def identified(self) -> bool:
        return all(source.identified for source in self.sources)

    @property
    def tells_content(self) -> bool:
        """Whether all fingerprints do."""
        return all(source.tells_content for source in self.sources)

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether all samples are dicts of columns; may read samples."""
        return all(source.as_dicts for source in self.sources)

    @property
    def declared(self) -> Declared | None:  # type: ignore[override]
        """What was declared, if the fields of a source are learned by reading samples."""
        declared = [source.declared for source in self.sources]
        declarations = [declaration for declaration in declared if declaration is not None]
        if not declarations:
            return None
        ragged = {name for declaration in declarations for name in declaration.ragged}
        for source in self.sources:
            if source.declared is None and source.as_dicts:
                ragged |= {name for name, field in source.fields.items() if field.kind == "ragged"}
        layout = declarations[0].layout if all(declaration == declared[0] for declaration in declared) else None
        return Declared(declarations[0].what, declarations[0].call, layout, tuple(sorted(ragged)))

    def check_unchanged(self, *, at_intervals: bool = False) -> None:
        for source in self.sources:
            source.check_unchanged(at_intervals=at_intervals)


@dataclass(frozen=True, eq=False)
class Indices:
    """Sample ids: a range if they are evenly spaced, so that the digest depends on the ids alone."""

    values: range | npt.NDArray[np.unsignedinteger[Any]]

    def __len__(self) -> int:
        return len(self.values)

    def ids(self, positions: Int64) -> Int64:
        if isinstance(self.values, range):
            return self.values.start + positions * self.values.step
        return self.values[positions].astype(np.int64)

    @property
    def digest(self) -> str:
        if isinstance(self.values, range):
            return digest_of(f"range {self.values.start} {len(self)} {self.values.step}".encode())
        return digest_of(b"ids", self.values.astype("<i8").tobytes())


def indices_of(ids: Int64 | range) -> Indices:
    """The smallest representation of ids (at least one, none negative)."""
    first, step = int(ids[0]), int(ids[1] - ids[0]) if len(ids) > 1 else 1
    if isinstance(ids, range) or (ids[1:] - ids[:-1] == step).all():
        return Indices(range(first, first + step * len(ids), step))
    return Indices(ids.astype(np.min_scalar_type(int(ids.max()))))


def resolve_selection(chosen: Any, size: int) -> Indices:
    """The samples that ids, a mask, a slice or a range select from ``size`` samples: at least one, each once."""
    ids: range | Int64
    if isinstance(chosen, slice):
        try:
            ids = range(*chosen.indices(size))
        except Exception as error:
            summary = "invalid slice: it needs integers and a step other than 0"
            raise ArgumentError(summary, found=chosen) from error
    elif isinstance(chosen, range):
        ids = chosen
        _check_bounds([chosen[0], chosen[-1]] if chosen else [], size)
    else:
        ids = _check_ids_or_mask(chosen, size)
    if not len(ids):
        raise SourceError("no sample is selected", expected=f"at least one of {size}", found="none")
    return indices_of(ids)


def _check_ids_or_mask(chosen: Any, size: int) -> Int64:
    expected = "a list or 1-D array of integers, a bool mask, a slice, a range or a function"
    try:
        array = np.asarray(chosen)
    except Exception as error:  # RuntimeError is torch's
        description = f"{type(chosen).__name__}: {safe_str(error)}"
        raise ArgumentError("this selects no samples", expected=expected, found=description) from error
    if array.ndim != 1 or (array.dtype.kind not in "biu" and array.size):
        description = f"{type(chosen).__name__} of dtype {array.dtype} with shape {array.shape}"
        raise ArgumentError("this selects no samples", expected=expected, found=description)
    if array.dtype.kind == "b":
        if len(array) != size:
            raise ArgumentError(
                "a mask has a value for each sample", expected=f"{size} values", found=f"{len(array)} values"
            )
        return np.flatnonzero(array)
    _check_bounds([int(array.min()), int(array.max())] if array.size else [], size)
    ids = array.astype(np.int64)
    if not (ids[1:] > ids[:-1]).all():
        in_order = np.sort(ids)
        repeated = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(repeated):
            raise ArgumentError(
                "a sample is selected twice",
                expected="each id once, as each sample is delivered once in an epoch",
                found=f"{repeated[0]} at positions {np.flatnonzero(ids == repeated[0])[:4].tolist()}",
                remedy="remove repeats (np.unique); rankfeed.concat of two selections delivers a sample twice",
            )
    return ids


def _check_bounds(ids: list[int], size: int) -> None:
    for index in ids:
        if not 0 <= index < size:
            remedy = "count from the start: negative ids are refused" if index < 0 else None
            raise ArgumentError("no such sample", expected=f"ids from 0 to {size - 1}", found=index, remedy=remedy)


class SelectSource(SourceView):
    """Some samples of a source in an order of their own, made by `Source.select`.

    Sample ids are positions in the selection. It pickles as the source and the ids, in their smallest
    representation. A selection of a selection is one of the original source.

    Attributes:
        source: the source of the samples.
        indices: which of its samples are selected.
    """

    def __init__(self, source: Source, indices: Indices, splits: int = 0) -> None:
        if isinstance(source, SelectSource):
            outer, inner = source.indices, indices
            if isinstance(outer.values, range) and isinstance(inner.values, range):
                first, step = outer.values[inner.values[0]], outer.values.step * inner.values.step
                indices = indices_of(range(first, first + step * len(inner), step))
            else:
                indices = indices_of(outer.ids(inner.ids(np.arange(len(inner), dtype=np.int64))))
            splits, source = max(splits, source.splits), source.source
        super().__init__(source, splits=splits)
        self.source: Source = source
        self.indices: Indices = indices
        self._length = len(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return SelectSource, (self.source, self.indices, self.splits)

    def __repr__(self) -> str:
        return f"{len(self)} of the samples of {self.source!r}"

    @cached_property
    def blocks(self) -> Int64:
        """Consecutive samples that are in the same block of the source: int64."""
        ids, starts = self.indices.values, starts_of(self.source.blocks)
        if not isinstance(ids, range):
            block = starts.searchsorted(ids.astype(np.int64), side="right")
            return np.diff(np.concatenate([[0], np.flatnonzero(block[1:] != block[:-1]) + 1, [len(ids)]]))
        upwards = ids if ids.step > 0 else ids[::-1]
        ids_before = np.clip(-((upwards.start - starts) // upwards.step), 0, len(ids))
        sizes = np.diff(ids_before)
        sizes = sizes[sizes > 0]
        return sizes if ids.step > 0 else sizes[::-1].copy()

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.source.fields

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(b"select", self.source.fingerprint.encode(), self.indices.digest.encode())

    @property
    def earlier_fingerprint(self) -> str:
        return digest_of(b"select", self.source.earlier_fingerprint.encode(), self.indices.digest.encode())

    def origin_ids(self, sample_ids: npt.ArrayLike) -> Int64:
        """Ids of the given samples in the source."""
        return self.indices.ids(check_ids(sample_ids, len(self)))

    def name_of(self, sample_id: int) -> str:
        return f"sample {sample_id} ({self.source.name_of(int(self.origin_ids(sample_id)[0]))} of the source)"

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        return self.source.fetch(self.origin_ids(sample_ids), columns)

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        return self.source.samples(self.origin_ids(sample_ids), columns)

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        self.source.expect(self.origin_ids(sample_ids), columns)


def scan(
    source: Source, columns: Sequence[str] | None, label: str, *, progress: bool
) -> Iterator[tuple[Int64, Columns]]:
    """All samples of a source in order, as (sample ids, rows); ``label`` is the text of the progress bar."""
    size, fields = len(source), source.fields
    wanted = [fields[name] for name in (fields if columns is None else columns)]
    row_bytes = sum(field.row_bytes() if field.kind == "dense" else _UNKNOWN_ROW for field in wanted)
    rows = max(1, min(_SCAN_ROWS, _SCAN_BYTES // max(1, row_bytes)))
    with progress_bar(label, size, enabled=progress) as advance:
        for first in range(0, size, rows):
            ids = np.arange(first, min(first + rows, size), dtype=np.int64)
            source.expect(np.arange(first, min(first + 4 * rows, size), dtype=np.int64), columns)
            yield ids, source.fetch(ids, columns)
            advance(len(ids))


def _matching_ids(
    source: Source, predicate: Callable[[Any], Any], columns: Sequence[str] | None, progress: bool
) -> Int64:
    mask = np.zeros(len(source), np.bool_)
    for ids, rows in scan(source, columns, "selecting", progress=progress):
        for sample_id, sample in zip(ids.tolist(), rows.samples(), strict=True):
            try:
                answer = predicate(sample)
            except Exception as error:
                where = f"sample {sample_id}"
                raise SourceError("the predicate raised", found=describe_error(error), where=where) from error
            if getattr(answer, "shape", None) == ():  # a numpy scalar or a tensor
                answer = answer.item()
            if not isinstance(answer, bool):
                raise ArgumentError(
                    "the predicate returned no truth value",
                    expected="True or False",
                    found=f"{type(answer).__name__}",
                    where=f"sample {sample_id}",
                    remedy="return a comparison; for an array, .any() or .all() of it",
                )
            mask[sample_id] = answer
    return np.flatnonzero(mask)


def class_labels(names: Sequence[object]) -> str:
    """The logical type of integers that are indices of class names."""
    return f"class labels {[str(name) for name in names]}"


def from_difference(text: str, other: str) -> str:
    """A text; of a long one, the part around its first difference from another."""
    if len(text) <= _MOST_SHOWN:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    difference = next((place for place, (left, right) in pairs if left != right), len(other))
    start = max(0, difference - _MOST_SHOWN // 2)
    shown = text[start : start + _MOST_SHOWN]
    return f"{'...' if start else ''}{shown}{'...' if start + len(shown) < len(text) else ''}"


def check_ids(sample_ids: npt.ArrayLike, size: int) -> Int64:
    """Sample ids as int64; a SourceError if one is outside [0, size)."""
    ids = check_int_array("sample_ids", sample_ids).reshape(-1)
    if ids.size and int(ids.view(np.uint64).max()) >= size:
        raise SourceError(
            "no such sample", expected=f"ids from 0 to {size - 1}", found=f"{ids.min()} to {ids.max()}"
        )
    return ids


def check_columns(
    columns: Sequence[str] | None,
    fields: Mapping[str, Any],
    derived: Derived = MappingProxyType({}),
    *,
    remedy: str | None = None,
) -> list[str]:
    """Names of the requested columns and those derived from them; an ArgumentError if one does not exist."""
    if columns is None:
        return list(fields)
    names = check_names("columns", columns)
    missing = [name for name in names if name not in fields]
    if missing:
        raise ArgumentError(
            "no such column",
            expected="some of " + ", ".join(fields),
            found=", ".join(map(repr, missing)),
            remedy=remedy,
        )
    return with_derived(names, derived)


def with_derived(names: list[str], derived: Derived) -> list[str]:
    """Columns, each followed by those that are derived from it and not in the list."""
    if not derived:
        return names
    listed = set(names)
    return [
        column
        for name in names
        for column in (name, *(added for added in derived.get(name, ()) if added not in listed))
    ]


def reopen(kind: Callable[..., Source], where: Any, options: Mapping[str, Any], fingerprint: str) -> Source:
    """Unpickle a source by opening its data again; an error if they are not the same data."""
    source = kind(where, **options)
    check_same_data(source.fingerprint, fingerprint, where)
    return source


def check_same_data(actual: str, expected: str, where: object) -> None:
    """Compare two digests; a CorruptError if data are not those that the job opened first."""
    if actual != expected:
        raise CorruptError(
            "the data were changed or replaced while they were in use",
            expected=f"fingerprint {expected}",
            found=actual,
            where=where,
            remedy="start the job again; write new data to another directory while a job reads these",
        )


def starts_of(counts: npt.ArrayLike) -> Int64:
    """First index of each chunk, and the total at the end: int64 [chunks + 1]."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def even_blocks(rows: int, block_rows: int) -> Int64:
    """Blocks of ``block_rows`` rows; the last one has the remainder."""
    block_rows = max(1, min(rows, block_rows))
    return np.diff(np.append(np.arange(0, rows, block_rows), rows))
