"""Concatenates sources: checks that their fields agree, and joins their rows in one batch."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_columns_option, check_names, check_optional, invalid
from rankfeed.columns.chunk_groups import by_chunk
from rankfeed.columns.columns import Column, Columns, PointedColumn, column_from_parts, make_column
from rankfeed.columns.field import Field
from rankfeed.columns.layout import element_shape
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.source import (
    Int64,
    Source,
    SourceView,
    check_columns,
    check_ids,
    from_difference,
    starts_of,
    with_derived,
)
from rankfeed.storage.checksum import digest_of

Fields = Mapping[str, Field]

_REMEDY = "leave the column out with columns=[...], or write one of the sources again with rankfeed.write"

_UNITS_REMEDY = (
    "store the column with one type in all sources (for CSV and JSON lines, give types={'column': "
    "'timestamp[us]'}), convert it with rankfeed.write(..., map=...), or leave it out with columns=[...]"
)
_LABELS_REMEDY = (
    "give all sources the same classes in the same order (labels=[...] for folders of .npy files, map with new "
    "features for a Hugging Face Dataset, target_transform= for a torchvision Dataset), convert the labels with "
    "rankfeed.write(..., map=...), or leave the column out with columns=[...]"
)

#: Characters of the repr of a source in messages: that of a wrapped list may have any length.
_MOST_SHOWN = 160


class ConcatSource(SourceView):
    """Concatenated sources, made by `concat`.

    Sample ids and blocks follow the order of the sources. Names do not change the samples, nor the fingerprint.

    Attributes:
        sources: as given.
        names: as given; None for none.
        starts: int64 [sources + 1], the first sample id of each, and their number at the end.
    """

    def __init__(
        self, sources: Sequence[Source], names: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(*sources)
        self.names = None if names is None else tuple(names)
        self._wanted = (
            None if columns is None else tuple(with_derived(check_columns_option(columns), self.derived))
        )
        self.starts = starts_of([len(source) for source in self.sources])
        self._length = int(self.starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return ConcatSource, (self.sources, self.names, self._wanted)

    def __repr__(self) -> str:
        return f"concat of {len(self.sources)} sources, {len(self)} samples"

    @cached_property
    def blocks(self) -> Int64:
        return np.concatenate([np.asarray(source.blocks, np.int64) for source in self.sources])

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        names = range(len(self.sources)) if self.names is None else map(repr, self.names)
        named = [
            (f"source {name}, {safe_repr(source, _MOST_SHOWN)}", source)
            for name, source in zip(names, self.sources, strict=True)
        ]
        kinds = [source.as_dicts for source in self.sources]
        if len(set(kinds)) > 1:
            (dicts, source), (others, _) = named[kinds.index(True)], named[kinds.index(False)]
            raise SourceError(
                "columns are missing in one of the sources: its samples are not dicts of columns",
                expected=f"{', '.join(map(repr, source.fields))} as in {dicts}",
                found=f"other samples in {others}",
                remedy="return dicts from its Dataset's __getitem__, and columns=[...] with those that all have",
            )
        agreed = agreed_fields([(label, source.fields) for label, source in named], self._wanted)
        types = [(label, source.logical_types) for label, source in named]
        check_logical_types(types, ["", *agreed] if self._wanted is None else agreed)
        return agreed

    @cached_property
    def fingerprint(self) -> str:
        return self._combine([source.fingerprint for source in self.sources])

    @property
    def earlier_fingerprint(self) -> str:
        return self._combine([source.earlier_fingerprint for source in self.sources])

    def _combine(self, fingerprints: Sequence[str]) -> str:
        columns = [] if self._wanted is None else [repr(self._wanted).encode()]
        return digest_of(b"concat", *map(str.encode, fingerprints), *columns)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields, self.derived)
        if not self.as_dicts:
            return Columns.of_objects(self.samples(ids))
        wanted = None if columns is None and self._wanted is None else names
        pieces = [
            (self.sources[index].fetch(rows, wanted), slots) for index, rows, slots in by_chunk(ids, self.starts)
        ]
        combined = {
            name: concat_columns(name, self.fields[name], [(fetched[name], slots) for fetched, slots in pieces])
            for name in names
            if name in pieces[0][0]  # a Dataset returns no columns for no samples
        }
        return Columns(combined, len(ids))

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        ids = check_ids(sample_ids, len(self))
        wanted = self._wanted if columns is None else with_derived(check_names("columns", columns), self.derived)
        pieces = by_chunk(ids, self.starts)
        return _in_slots([(self.sources[index].samples(rows, wanted), slots) for index, rows, slots in pieces])

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        for index, rows, _ in by_chunk(check_ids(sample_ids, len(self)), self.starts):
            self.sources[index].expect(rows, self._wanted if columns is None else columns)


def concat(
    sources: Sequence[Source] | Mapping[str, Source], *, columns: Sequence[str] | None = None
) -> ConcatSource:
    """Concatenate sources.

    The sources have the same columns of the same types, units of time and classes; a column that is dense in some
    and ragged in others is ragged. A source that is given twice is delivered twice, under different sample ids.

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
    members: Any = list(sources.values()) if isinstance(sources, Mapping) else sources
    if not isinstance(members, (list, tuple)) or not members:
        raise invalid("sources", "a list of at least one source, or a dict of them by name", sources)
    for index, source in enumerate(members):
        if not isinstance(source, Source):
            raise ArgumentError(
                "only sources can be concatenated",
                expected="what rankfeed.open() or rankfeed.from_dataset() returned",
                found=f"{type(source).__name__}: {safe_repr(source, _MOST_SHOWN)}",
                where=f"number {index}" if names is None else f"name {safe_repr(names[index])}",
            )
    combined = ConcatSource(members, check_optional(check_names, "names of sources", names), columns)
    if not combined.runs_user_code:
        combined.fields  # noqa: B018  (raises now if they do not agree)
    return combined


def agreed_fields(named: Sequence[tuple[str, Fields]], columns: Sequence[str] | None = None) -> dict[str, Field]:
    """The fields of concatenated sources; a column that is dense in one and ragged in another is ragged."""
    agreed: dict[str, Field] = {}
    for name in dict.fromkeys(name for _, fields in named for name in fields) if columns is None else columns:
        owners = [(source, fields[name]) for source, fields in named if name in fields]
        for source, fields in named:
            if name not in fields:
                raise SourceError(
                    f"column {name!r} is missing in one of the sources",
                    expected=f"{name!r} as in {owners[0][0]}" if owners else f"{name!r} in all of them",
                    found=f"{', '.join(map(repr, fields))} in {source}",
                    remedy="give columns=[...] with those that all sources have, or open the sources with the "
                    'same options, such as nulls="mask"',
                )
        # A ragged field accepts dense rows of several lengths, so it is the one to compare with.
        reference, field = next((owner for owner in owners if owner[1].kind == "ragged"), owners[0])
        for source, other in owners:
            is_accepted = other.dtype == field.dtype and element_shape(other) == element_shape(field) is not None
            if other != field and not (field.kind == "ragged" and is_accepted):
                raise SourceError(
                    f"column {name!r} is of different types",
                    expected=f"{_type(field)} as in {reference}",
                    found=f"{_type(other)} in {source}",
                    remedy=_REMEDY,
                )
        agreed[name] = field
    return agreed


def check_logical_types(named: Sequence[tuple[str, Mapping[str, str]]], columns: Iterable[str]) -> None:
    """Raise a SourceError for a column whose integers are of different units or classes in two of the sources."""
    for name in columns:
        owners = [(source, types[name]) for source, types in named if name in types]
        for source, kind in owners[1:]:
            reference, expected = owners[0]
            if kind != expected:
                column = f"column {name!r}" if name else "the labels"
                raise SourceError(
                    f"the integers of {column} have different meanings in the sources",
                    expected=f"{from_difference(expected, kind)} as in {reference}",
                    found=f"{from_difference(kind, expected)} in {source}",
                    remedy=_LABELS_REMEDY if "class labels" in expected + kind else _UNITS_REMEDY,
                )


def _type(field: Field) -> str:
    return f"{field.kind} {field}" if field.dtype else field.kind


def concat_columns(name: str, field: Field, pieces: Sequence[tuple[Column, Int64 | None]]) -> Column:
    """One column from several, each with the positions of its rows; no copy if they have the same layout."""
    stored_fields = [column.field for column, _ in pieces]
    is_alike = len(set(stored_fields)) == 1 and stored_fields[0].kind == field.kind
    pointers = [column.pointers for column, _ in pieces if isinstance(column, PointedColumn)]
    if is_alike and len(pointers) == len(pieces):
        return column_from_parts(field, pointers, [slots for _, slots in pieces])
    try:
        return make_column(name, _in_slots([(column.rows(), slots) for column, slots in pieces]), field)
    except ArgumentError as error:
        raise SourceError(
            f"rows of column {name!r} do not fit into one batch",
            expected=error.expected,
            found=error.found,
            remedy=_REMEDY,
        ) from error


def _in_slots(pieces: Sequence[tuple[Sequence[Any], Int64 | None]]) -> list[Any]:
    samples: list[Any] = [None] * sum(len(rows) for rows, _ in pieces)
    for rows, slots in pieces:
        for place, sample in zip(range(len(rows)) if slots is None else slots.tolist(), rows, strict=True):
            samples[place] = sample
    return samples
