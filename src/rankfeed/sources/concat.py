"""Concatenation of sources."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns import Columns, Field
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.concat_columns import agreed_fields, concat_columns
from rankfeed.sources.source import Int64, Source, by_chunk, check_columns, check_ids, starts_of
from rankfeed.sources.view import SourceView
from rankfeed.storage import digest_of

#: The repr of a wrapped list may have any length.
_SHORT = reprlib.Repr()
_SHORT.maxother = 160


class ConcatSource(SourceView):
    """Concatenated sources, made by `concat`.

    Sample ids and blocks follow the order of the sources. Names do not change the samples, nor the fingerprint.

    Attributes:
        sources: as given.
        names: as given; None for none.
        starts: int64 [sources + 1], the first sample id of each, and their number at the end.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        names: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(*sources)
        self.names = None if names is None else tuple(names)
        self._wanted = None if columns is None else tuple(check_names("columns", columns))
        self.starts = starts_of([len(source) for source in self.sources])

    def __reduce__(self) -> tuple[Any, ...]:
        return ConcatSource, (self.sources, self.names, self._wanted)

    def _num_samples(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"concat of {len(self.sources)} sources, {len(self)} samples"

    @cached_property
    def blocks(self) -> Int64:
        return np.concatenate([np.asarray(source.blocks, np.int64) for source in self.sources])

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        named = [(self._name(number), source.fields) for number, source in enumerate(self.sources)]
        if len({source.as_dicts for source in self.sources}) > 1:
            others, dicts = (
                next(name for (name, _), each in zip(named, self.sources, strict=True) if each.as_dicts is kind)
                for kind in (False, True)
            )
            raise SourceError(
                "columns are missing in one of the sources: its samples are not dicts of columns",
                expected=f"{', '.join(map(repr, dict(named)[dicts]))} as in {dicts}",
                found=f"other samples in {others}",
                remedy="return dicts from its Dataset's __getitem__, and columns=[...] with those that all have",
            )
        return agreed_fields(named, self._wanted)

    @cached_property
    def fingerprint(self) -> str:
        columns = [] if self._wanted is None else [repr(self._wanted).encode()]
        return digest_of(b"concat", *(source.fingerprint.encode() for source in self.sources), *columns)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        if not self.as_dicts:
            return Columns.of_objects(self.samples(ids))
        pieces = [
            (self.sources[number].fetch(rows, self._wanted if columns is None else columns), slots)
            for number, rows, slots in by_chunk(ids, self.starts)
        ]
        combined = {
            name: concat_columns(name, self.fields[name], [(fetched[name], slots) for fetched, slots in pieces])
            for name in names
            if name in pieces[0][0]  # a Dataset returns no columns for no samples
        }
        return Columns(combined, len(ids))

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        ids = check_ids(sample_ids, len(self))
        wanted = self._wanted if columns is None else columns
        found: list[Any] = [None] * len(ids)
        for number, rows, slots in by_chunk(ids, self.starts):
            places = range(len(ids)) if slots is None else slots.tolist()
            for place, sample in zip(places, self.sources[number].samples(rows, wanted), strict=True):
                found[place] = sample
        return found

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        for number, rows, _ in by_chunk(check_ids(sample_ids, len(self)), self.starts):
            self.sources[number].expect(rows, self._wanted if columns is None else columns)

    def _name(self, number: int) -> str:
        name = number if self.names is None else repr(self.names[number])
        return f"source {name}, {_SHORT.repr(self.sources[number])}"


def concat(
    sources: Sequence[Source] | Mapping[str, Source], *, columns: Sequence[str] | None = None
) -> ConcatSource:
    """Concatenate sources.

    The sources have the same columns of the same types; a column that is dense in some and ragged in others is
    ragged. A source that is given twice is delivered twice, under different sample ids.

    Args:
        sources: a list of sources, or a dict of them by name; the order matters.
        columns: names of the columns to offer if the sources have others too; None for all.

    Raises:
        ArgumentError: there are no sources, or an item is not a source.
        SourceError: the columns do not agree; names the column and two sources. If reading samples runs user code,
            this is raised when the fields are first used, by a Loader at the latest.

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
    combined = ConcatSource(given, names, columns)
    if not combined.runs_user_code:
        combined.fields  # noqa: B018  (raises now if they do not agree)
    return combined
