"""Concatenation of sources: the fields they agree on, and their rows in one batch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names, invalid
from rankfeed.columns import Bytes, Column, Columns, Dense, Field, Objects, Ragged, RowSlices, RowTake
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.source import Int64, Source, SourceView, by_chunk, check_columns, check_ids, starts_of
from rankfeed.storage import digest_of

Fields = Mapping[str, Field]

_REMEDY = "leave the column out with columns=[...], or write one of the sources again with rankfeed.pack"

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


def agreed_fields(named: Sequence[tuple[str, Fields]], columns: Sequence[str] | None = None) -> dict[str, Field]:
    """The fields of concatenated sources; a column that is dense in one and ragged in another is ragged.

    Args:
        named: for each source its name in error messages, and its fields.
        columns: names of the columns to compare; None for all.

    Raises:
        SourceError: a column is missing in a source, or has another type; names the column and both sources.

    Examples:
        >>> frames = {"x": Field("dense", "float32", (7, 2))}
        >>> agreed_fields([("a", frames), ("b", {"x": Field("ragged", "float32", (2,))})])
        {'x': Field(kind='ragged', dtype='float32', shape=(2,))}
    """
    _check_names(named, columns)
    first = named[0]
    agreed: dict[str, Field] = {}
    for name in first[1] if columns is None else columns:
        # A ragged field accepts dense rows of several lengths, so it is the one to compare with.
        reference, fields_there = next((each for each in named if each[1][name].kind == "ragged"), first)
        agreed[name] = fields_there[name]
        for source, fields in named:
            if not _accepts(fields_there[name], fields[name]):
                raise SourceError(
                    f"column {name!r} is of different types",
                    expected=f"{_type(fields_there[name])} as in {reference}",
                    found=f"{_type(fields[name])} in {source}",
                    remedy=_REMEDY,
                )
    return agreed


def _check_names(named: Sequence[tuple[str, Fields]], columns: Sequence[str] | None) -> None:
    wanted = {name: source for source, fields in named for name in fields} if columns is None else columns
    for name in wanted:
        owners = [source for source, fields in named if name in fields]
        for source, fields in named:
            if name not in fields:
                raise SourceError(
                    f"column {name!r} is missing in one of the sources",
                    expected=f"{name!r} as in {owners[0]}" if owners else f"{name!r} in all of them",
                    found=f"{', '.join(map(repr, fields))} in {source}",
                    remedy="give columns=[...] with those that all sources have",
                )


def _type(field: Field) -> str:
    return f"{field.kind} {field}" if field.dtype else field.kind


def _accepts(field: Field, other: Field) -> bool:
    """Whether a column of ``field`` can hold rows of ``other``."""
    if field == other:
        return True
    fits = (field.kind, other.kind) == ("ragged", "dense") and other.shape and other.shape[1:] == field.shape
    return bool(fits) and field.dtype == other.dtype


def concat_columns(name: str, field: Field, pieces: Sequence[tuple[Column, Int64 | None]]) -> Column:
    """One column from several, without a copy if their rows have the same layout.

    Args:
        name: of the column, for error messages.
        field: of the result.
        pieces: columns, each with the positions of its rows in the result; None for the only column.

    Raises:
        SourceError: rows differ in type, or in more than their first dimension.

    Examples:
        >>> one, two = Dense.of(np.array([1, 2])), Dense.of(np.array([3]))
        >>> concat_columns("x", Field("dense", "int64"), [(one, np.array([2, 0])), (two, np.array([1]))]).gather()
        array([2, 3, 1])
    """
    columns = [column for column, _ in pieces]
    if all(isinstance(column, Objects) for column in columns):
        return _objects(pieces)
    if all(isinstance(column, Bytes) for column in columns):
        kinds = {column.field.kind for column in columns}
        if len(kinds) == 1:
            return Bytes([part for piece in pieces for part in _moved(*piece)], text=kinds == {"str"})
    if all(isinstance(column, (Dense, Ragged)) for column in columns):
        found = {column.field for column in columns}
        if len(found) == 1 and isinstance(columns[0], Dense) and field.kind != "ragged":
            return Dense([part for piece in pieces for part in _moved(*_native(*piece))])
        elements = {_element_shape(each) for each in found}
        if len({each.dtype for each in found}) == 1 and len(elements) == 1 and None not in elements:
            return Ragged([part for piece in pieces for part in _moved(*_as_ragged(*_native(*piece)))])
    raise SourceError(
        f"rows of column {name!r} do not fit into one batch",
        found=", ".join(sorted({_type(column.field) for column in columns})),
        remedy=_REMEDY,
    )


def _objects(pieces: Sequence[tuple[Column, Int64 | None]]) -> Objects:
    values: list[Any] = [None] * sum(len(column) for column, _ in pieces)
    for column, slots in pieces:
        places = range(len(column)) if slots is None else slots.tolist()
        for place, value in zip(places, column.rows(), strict=True):
            values[place] = value
    return Objects(values)


def _element_shape(field: Field) -> tuple[int, ...] | None:
    """Shape of an element along the first dimension; None for a scalar."""
    if field.kind == "ragged":
        return field.shape
    return field.shape[1:] if field.shape else None


def _moved(column: Any, slots: Int64 | None) -> list[Any]:
    """The parts of a column with their positions in the result."""
    if slots is None:
        return list(column.parts)
    return [part._replace(slots=slots if part.slots is None else slots[part.slots]) for part in column.parts]


def _native(column: Any, slots: Int64 | None) -> tuple[Any, Int64 | None]:
    """The same rows in native byte order: a batch may combine files of both orders."""
    if all(part.values.dtype.isnative for part in column.parts):
        return column, slots
    native = column.parts[0].values.dtype.newbyteorder("=")
    if isinstance(column, Dense):
        return Dense.of(column.gather().astype(native)), slots
    values, offsets = column.compact()
    return Ragged([RowSlices(values.astype(native), offsets[:-1], np.diff(offsets))]), slots


def _as_ragged(column: Any, slots: Int64 | None) -> tuple[Any, Int64 | None]:
    """Dense rows as runs of their elements."""
    if isinstance(column, Ragged):
        return column, slots
    parts = column.parts
    if not all(part.values.flags.c_contiguous for part in parts):
        parts = Dense.of(column.gather()).parts
    return Ragged([_runs(part) for part in parts]), slots


def _runs(part: RowTake) -> RowSlices:
    length, *inner = part.values.shape[1:]
    flat = part.values.reshape(len(part.values) * length, *inner)
    return RowSlices(flat, part.rows * length, np.full(len(part.rows), length, np.int64), part.slots)
