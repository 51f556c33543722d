"""Several sources as one, the samples of each behind those of the one before."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns import Columns, Field
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.concat_columns import agreed_fields, joined_column
from rankfeed.sources.source import Annotate, Collate, Declared, Int64, Source, by_chunk, check_columns, check_ids
from rankfeed.storage import digest_of

#: How sources are shown in errors: a wrapped list may be of any length.
_SHORT = reprlib.Repr()
_SHORT.maxother = 160


class ConcatSource(Source):
    """Sources one behind the other: `concat` makes it.

    Sample ids are offsets into the sources in the order given; blocks are theirs. What a source is called changes
    nothing of what is delivered, and so not the fingerprint.

    Args:
        sources: at least one.
        names: what each is called; None for no names.
        columns: names of the columns to offer; None for all.

    Attributes:
        sources: as given.
        names: as given.
        starts: int64 [sources + 1], the first sample id of each, and at the end their number.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        names: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.names = None if names is None else tuple(names)
        self._wanted = None if columns is None else tuple(check_names("columns", columns))
        self.starts = np.zeros(len(self.sources) + 1, np.int64)
        np.cumsum([len(source) for source in self.sources], out=self.starts[1:])
        #: How many times what is in it was split at random: the next split draws anew.
        self.splits: int = max((getattr(source, "splits", 0) for source in self.sources), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.sources, self.names, self._wanted)

    def _num_samples(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"concat of {len(self.sources)} sources, {len(self)} samples"

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """What suits one that reads whole blocks suits all: the others lose little by it."""
        return "window" if any(source.default_shuffle == "window" for source in self.sources) else "global"

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        """The smallest of theirs."""
        return min((each.best_window for each in self.sources if each.best_window is not None), default=None)

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        """Whether one of them does."""
        return any(source.runs_user_code for source in self.sources)

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether all code of the user's does: what reads sample by sample is seeded for each of them."""
        theirs = [source.takes_batches for source in self.sources if source.runs_user_code]
        return bool(theirs) and all(theirs)

    @property
    def collate(self) -> Collate | None:  # type: ignore[override]
        """That of all, if they have the same: graphs with graphs."""
        first, *others = (source.collate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def annotate(self) -> Annotate | None:  # type: ignore[override]
        """That of all, as ``collate``."""
        first, *others = (source.annotate for source in self.sources)
        return first if all(other == first for other in others) else None

    @property
    def looks_ahead(self) -> int:  # type: ignore[override]
        """As far as the one that looks farthest."""
        return max(source.looks_ahead for source in self.sources)

    @property
    def identified(self) -> bool:
        """Whether all their fingerprints tell their samples from all others."""
        return all(source.identified for source in self.sources)

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether the samples of all are dicts of columns."""
        return all(source.as_dicts for source in self.sources)

    @property
    def declared(self) -> Declared | None:  # type: ignore[override]
        """What is known of the fields, if those of one of them are learned by reading samples."""
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

    @cached_property
    def blocks(self) -> Int64:
        """Samples in each block: int64."""
        return np.concatenate([np.asarray(source.blocks, np.int64) for source in self.sources])

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds.

        Raises:
            SourceError: the sources do not agree; names the column and two of them.
        """
        named = [(self._name(number), source.fields) for number, source in enumerate(self.sources)]
        if len({source.as_dicts for source in self.sources}) > 1:
            others, dicts = (
                next(name for (name, _), each in zip(named, self.sources, strict=True) if each.as_dicts is kind)
                for kind in (False, True)
            )
            raise SourceError(
                "columns are missing in one of the sources: its samples are no dicts of columns",
                expected=f"{', '.join(map(repr, dict(named)[dicts]))} as in {dicts}",
                found=f"other samples in {others}",
                remedy="return dicts from its Dataset's __getitem__, and columns=[...] with those that all have",
            )
        return agreed_fields(named, self._wanted)

    @cached_property
    def fingerprint(self) -> str:
        """Of their fingerprints, in order, and of the columns where some were chosen."""
        columns = [] if self._wanted is None else [repr(self._wanted).encode()]
        return digest_of(b"concat", *(source.fingerprint.encode() for source in self.sources), *columns)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples; each source that has some of them is asked once.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or one of the sources cannot be read.
        """
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        if not self.as_dicts:
            return Columns.of_objects(self.samples(ids))
        pieces = [
            (self.sources[number].fetch(rows, self._wanted if columns is None else columns), slots)
            for number, rows, slots in by_chunk(ids, self.starts)
        ]
        joined = {
            name: joined_column(name, self.fields[name], [(fetched[name], slots) for fetched, slots in pieces])
            for name in names
            if name in pieces[0][0]  # a Dataset that is asked for no samples gives no columns
        }
        return Columns(joined, len(ids))

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """Some samples one by one, as their sources give them.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample or column, or one of the sources cannot be read.
        """
        ids = check_ids(sample_ids, len(self))
        wanted = self._wanted if columns is None else columns
        found: list[Any] = [None] * len(ids)
        for number, rows, slots in by_chunk(ids, self.starts):
            places = range(len(ids)) if slots is None else slots.tolist()
            for place, sample in zip(places, self.sources[number].samples(rows, wanted), strict=True):
                found[place] = sample
        return found

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """What will be read next, handed on to the sources that have it."""
        for number, rows, _ in by_chunk(check_ids(sample_ids, len(self)), self.starts):
            self.sources[number].expect(rows, self._wanted if columns is None else columns)

    def check_unchanged(self) -> None:
        """Find that a file of one of the sources was rewritten in place.

        Raises:
            CorruptError: one was; names it.
        """
        for source in self.sources:
            source.check_unchanged()

    def _name(self, number: int) -> str:
        called = number if self.names is None else repr(self.names[number])
        return f"source {called}, {_SHORT.repr(self.sources[number])}"


def concat(
    sources: Sequence[Source] | Mapping[str, Source], *, columns: Sequence[str] | None = None
) -> ConcatSource:
    """Several sources as one, the samples of each behind those of the one before.

    They have the same columns, of the same types; one that is dense in some and ragged in others is ragged.
    A source that is given twice is delivered twice, under other sample ids.

    Args:
        sources: a list of sources, or a dict of them by name; its order counts.
        columns: names of the columns to offer, where the sources have others besides; None for all.

    Raises:
        ArgumentError: none, or something that is no source.
        SourceError: their columns do not agree; names the column and two sources. Where reading samples runs the
            user's code, this is found when the fields are first asked for, by a Loader at the latest.

    Examples:
        >>> import rankfeed as rf
        >>> one, two = rf.from_dataset([{"x": 1}, {"x": 2}]), rf.from_dataset([{"x": 3}])
        >>> both = concat({"one": one, "two": two})
        >>> len(both), both.fetch([2, 0])["x"].gather()
        (3, array([3, 1]))
    """
    names = list(sources) if isinstance(sources, Mapping) else None
    given: Any = list(sources.values()) if isinstance(sources, Mapping) else sources
    if not isinstance(given, (list, tuple)):
        raise invalid("sources", "a list of sources, or a dict of them by name", sources)
    if not given:
        raise invalid("sources", "at least one source", sources)
    for number, source in enumerate(given):
        if not isinstance(source, Source):
            raise ArgumentError(
                "only sources can be concatenated",
                expected="what rankfeed.open() or rankfeed.from_dataset() returned",
                found=f"{type(source).__name__}: {_SHORT.repr(source)}",
                where=f"number {number}" if names is None else f"name {safe_repr(names[number])}",
            )
    if names is not None:
        names = check_names("names of sources", names)
    combined = ConcatSource(given, names=names, columns=columns)
    if not combined.runs_user_code:
        combined.fields  # noqa: B018  (that they agree is better known now)
    return combined


def _again(sources: Sequence[Source], names: Any, columns: Any) -> ConcatSource:
    return ConcatSource(sources, names=names, columns=columns)
