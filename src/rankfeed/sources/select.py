"""A source of some of the samples of another source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool
from rankfeed.columns import Columns, Field
from rankfeed.errors import ArgumentError, SourceError, describe_error, safe_repr, safe_str
from rankfeed.sources.indices import Indices, block_sizes, compose, indices_of, indices_of_range
from rankfeed.sources.scan import scan
from rankfeed.sources.source import Int64, Source, SourceView, check_columns, check_ids, starts_of
from rankfeed.storage import digest_of

#: Sample ids, a mask, a slice, a range or a predicate.
Selection = npt.ArrayLike | slice | range | Callable[[Any], Any]


class SelectSource(SourceView):
    """Some samples of a source in an order of their own, made by `Source.select`.

    Sample ids are positions in the selection; `origin_ids` returns the ids in the source. It pickles as the source
    and the ids, in their smallest representation.

    Attributes:
        source: the source of the samples.
        indices: which of its samples are selected.
    """

    def __init__(self, source: Source, indices: Indices, splits: int | None = None) -> None:
        super().__init__(source, splits=splits)
        self.source = source
        self.indices = indices

    def __reduce__(self) -> tuple[Any, ...]:
        return SelectSource, (self.source, self.indices, self.splits)

    def _num_samples(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"{len(self)} of the samples of {self.source!r}"

    @cached_property
    def blocks(self) -> Int64:
        """Consecutive samples that are in the same block of the source: int64."""
        return block_sizes(self.indices, starts_of(self.source.blocks))

    @property
    def fields(self) -> Mapping[str, Field]:
        return self.source.fields

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(b"select", self.source.fingerprint.encode(), self.indices.digest.encode())

    def origin_ids(self, sample_ids: npt.ArrayLike) -> Int64:
        """Ids of the given samples in the source.

        Args:
            sample_ids: integers in [0, len(self)).

        Raises:
            SourceError: no such sample.
        """
        return self.indices.ids(check_ids(sample_ids, len(self)))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        return self.source.fetch(self.origin_ids(sample_ids), columns)

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        return self.source.samples(self.origin_ids(sample_ids), columns)

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        self.source.expect(self.origin_ids(sample_ids), columns)


def select(
    source: Source, chosen: Selection, *, columns: Sequence[str] | None = None, progress: bool = True
) -> SelectSource:
    """Select samples of a source; see `Source.select`.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": number * number} for number in range(10)])
        >>> int(select(source, [7, 2])[0]["x"]), len(select(source, slice(0, None, 3)))
        (49, 4)
        >>> select(source, lambda sample: sample["x"] > 50, columns=["x"]).origin_ids([0, 1])
        array([8, 9])
    """
    size, progress = len(source), check_bool("progress", progress)
    ids: range | Int64
    if isinstance(chosen, type):
        raise _not_ids(safe_repr(chosen))
    if callable(chosen):
        check_columns(columns, source.fields)
        ids = _matching_ids(source, chosen, columns, progress)
    elif columns is not None:
        raise ArgumentError(
            "columns= is for a predicate only", remedy="rankfeed.open(..., columns=[...]) restricts the columns"
        )
    elif isinstance(chosen, slice):
        ids = _range_of(chosen, size)
    elif isinstance(chosen, range):
        ids = _check_range(chosen, size)
    else:
        ids = _check_selected_ids(chosen, size)
    if not len(ids):
        raise SourceError("no sample is selected", expected=f"at least one of {size}", found="none")
    indices = indices_of_range(ids) if isinstance(ids, range) else indices_of(ids)
    if isinstance(source, SelectSource):
        return SelectSource(source.source, compose(source.indices, indices), source.splits)
    return SelectSource(source, indices)


def _range_of(chosen: slice, size: int) -> range:
    try:
        return range(*chosen.indices(size))
    except Exception as error:
        raise ArgumentError("invalid slice: it needs integers and a step other than 0", found=chosen) from error


def _check_range(chosen: range, size: int) -> range:
    for each in (chosen[0], chosen[-1]) if chosen else ():
        if not 0 <= each < size:
            raise _outside(each, size)
    return chosen


def _check_selected_ids(chosen: Any, size: int) -> Int64:
    """Sample ids from ids or a mask."""
    try:
        given = np.asarray(chosen)
    except Exception as error:  # RuntimeError is torch's
        raise _not_ids(f"{type(chosen).__name__}: {safe_str(error)}") from error
    if given.ndim != 1 or (given.dtype.kind not in "biu" and given.size):
        raise _not_ids(f"{type(chosen).__name__} of dtype {given.dtype} with shape {given.shape}")
    if given.dtype.kind == "b":
        if len(given) != size:
            raise ArgumentError(
                "a mask has a value for each sample", expected=f"{size} values", found=f"{len(given)} values"
            )
        return np.flatnonzero(given)
    if given.size:
        for each in (int(given.min()), int(given.max())):
            if not 0 <= each < size:
                raise _outside(each, size)
    ids = given.astype(np.int64)
    if not (ids[1:] > ids[:-1]).all():
        in_order = np.sort(ids)
        repeated = np.flatnonzero(in_order[1:] == in_order[:-1])
        if len(repeated):
            twice = in_order[repeated[0]]
            raise ArgumentError(
                "a sample is selected twice",
                expected="each id once, as each sample is delivered once in an epoch",
                found=f"{twice} at positions {np.flatnonzero(ids == twice)[:4].tolist()}",
                remedy="remove repeats (np.unique); rankfeed.concat of two selections delivers a sample twice",
            )
    return ids


def _not_ids(found: str) -> ArgumentError:
    return ArgumentError(
        "this selects no samples",
        expected="a list or 1-D array of integers, a bool mask, a slice, a range or a function",
        found=found,
    )


def _outside(found: int, size: int) -> ArgumentError:
    remedy = "count from the start: negative ids are refused" if found < 0 else None
    return ArgumentError("no such sample", expected=f"ids from 0 to {size - 1}", found=found, remedy=remedy)


def _matching_ids(
    source: Source, predicate: Callable[[Any], Any], columns: Sequence[str] | None, progress: bool
) -> Int64:
    found = []
    for ids, rows in scan(source, columns, "selecting", progress=progress):
        pairs = zip(ids.tolist(), rows.samples(), strict=True)
        mask = [_matches(predicate, sample, sample_id) for sample_id, sample in pairs]
        found.append(ids[mask])
    return np.concatenate(found)


def _matches(predicate: Callable[[Any], Any], sample: Any, sample_id: int) -> bool:
    try:
        answer = predicate(sample)
    except Exception as error:
        raise SourceError(
            "the predicate raised", found=describe_error(error), where=f"sample {sample_id}"
        ) from error
    if getattr(answer, "shape", None) == ():  # a numpy scalar or a tensor
        answer = answer.item()
    if isinstance(answer, bool):
        return answer
    raise ArgumentError(
        "the predicate returned no truth value",
        expected="True or False",
        found=f"{type(answer).__name__}",
        where=f"sample {sample_id}",
        remedy="return a comparison; for an array, .any() or .all() of it",
    )
