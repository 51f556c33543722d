"""Some of the samples of a source, as a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool
from rankfeed.columns import Columns, Field
from rankfeed.errors import ArgumentError, SourceError, describe_error, safe_repr, safe_str
from rankfeed.sources.indices import Picks, blocks_of, composed, picks_of, picks_of_range
from rankfeed.sources.scan import read_in_order
from rankfeed.sources.source import Annotate, Collate, Declared, Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of

#: What a selection is made by.
Chosen = npt.ArrayLike | slice | range | Callable[[Any], Any]


class SelectSource(Source):
    """Some of the samples of a source, in an order of their own: `Source.select` makes it.

    Its sample ids are positions in the selection; `origin_ids` says which samples of the source they are. It
    pickles as the source and the ids, as compactly as they allow.

    Args:
        source: where the samples are.
        picks: which.
        splits: how many times what is left was split at random, so that the next split draws anew.
    """

    def __init__(self, source: Source, picks: Picks, *, splits: int = 0) -> None:
        self.source = source
        self.picks = picks
        self.splits = splits

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.source, self.picks, self.splits)

    def _num_samples(self) -> int:
        return len(self.picks)

    def __repr__(self) -> str:
        return f"{len(self)} of the samples of {self.source!r}"

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """The source's."""
        return self.source.default_shuffle

    @property
    def best_window(self) -> int | None:  # type: ignore[override]
        """The source's."""
        return self.source.best_window

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        """Whether the source does."""
        return self.source.runs_user_code

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether the source does."""
        return self.source.takes_batches

    @property
    def collate(self) -> Collate | None:  # type: ignore[override]
        """The source's."""
        return self.source.collate

    @property
    def annotate(self) -> Annotate | None:  # type: ignore[override]
        """The source's."""
        return self.source.annotate

    @property
    def looks_ahead(self) -> int:  # type: ignore[override]
        """As far as the source."""
        return self.source.looks_ahead

    @property
    def identified(self) -> bool:
        """Whether the source's fingerprint tells its samples from all others."""
        return self.source.identified

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether the source's samples are dicts of columns."""
        return self.source.as_dicts

    @property
    def declared(self) -> Declared | None:  # type: ignore[override]
        """What the source knows of its fields before it reads samples."""
        return self.source.declared

    @cached_property
    def blocks(self) -> Int64:
        """Samples in each block: those next to each other that lie in one block of the source. int64."""
        return blocks_of(self.picks, np.asarray(self.source.blocks, np.int64))

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self.source.fields

    @cached_property
    def fingerprint(self) -> str:
        """Of the source's and of the ids."""
        return digest_of(b"select", self.source.fingerprint.encode(), self.picks.digest.encode())

    def origin_ids(self, sample_ids: npt.ArrayLike) -> Int64:
        """Which samples of the source these are.

        Args:
            sample_ids: ints in [0, len(self)).

        Raises:
            SourceError: no such sample.
        """
        return self.picks.ids(check_ids(sample_ids, len(self)))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples, in the order given.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the source cannot be read.
        """
        return self.source.fetch(self.origin_ids(sample_ids), columns)

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """Some samples one by one, as the source gives them."""
        return self.source.samples(self.origin_ids(sample_ids), columns)

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """What will be read next, handed on to the source."""
        self.source.expect(self.origin_ids(sample_ids), columns)

    def check_unchanged(self) -> None:
        """Find that a file of the source was rewritten in place.

        Raises:
            CorruptError: one was; names it.
        """
        self.source.check_unchanged()


def select(
    source: Source, chosen: Chosen, *, columns: Sequence[str] | None = None, progress: bool = True
) -> SelectSource:
    """Some of the samples of a source, in the order given: what `Source.select` does.

    Args:
        source: to select from.
        chosen: sample ids (each once), a bool mask with a value for each sample, a slice or range, or a predicate:
            called with each sample once, now, in order; those for which it returns True are selected.
        columns: names of the columns that the predicate reads; None for all.
        progress: a bar on standard error while a predicate reads, if that is a terminal.

    Raises:
        ArgumentError: these are no ids of the source, or the predicate returned something else than a truth value.
        SourceError: nothing is selected, the predicate raised, or the source cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": number * number} for number in range(10)])
        >>> int(select(source, [7, 2])[0]["x"]), len(select(source, slice(0, None, 3)))
        (49, 4)
        >>> select(source, lambda sample: sample["x"] > 50, columns=["x"]).origin_ids([0, 1])
        array([8, 9])
    """
    size, progress = len(source), check_bool("progress", progress)
    if isinstance(chosen, type):
        raise _not_ids(safe_repr(chosen))
    if callable(chosen):
        check_columns(columns, source.fields)
        picks = _some(picks_of, _accepted(source, chosen, columns, progress), size)
    elif columns is not None:
        raise ArgumentError(
            "columns are chosen for a predicate alone", remedy="rankfeed.open(..., columns=[...]) restricts them"
        )
    elif isinstance(chosen, slice):
        picks = _some(picks_of_range, _range_of(chosen, size), size)
    elif isinstance(chosen, range):
        picks = _some(picks_of_range, _inside(chosen, size), size)
    else:
        picks = _some(picks_of, _ids_of(chosen, size), size)
    if isinstance(source, SelectSource):
        return SelectSource(source.source, composed(source.picks, picks), splits=source.splits)
    return SelectSource(source, picks, splits=getattr(source, "splits", 0))


def _some(form: Callable[[Any], Picks], ids: Any, size: int) -> Picks:
    if not len(ids):
        raise SourceError("no sample is selected", expected=f"at least one of {size}", found="none")
    return form(ids)


def _range_of(chosen: slice, size: int) -> range:
    try:
        return range(*chosen.indices(size))
    except Exception as error:
        raise ArgumentError("a slice has whole numbers, and a step that is not 0", found=chosen) from error


def _inside(chosen: range, size: int) -> range:
    for each in (chosen[0], chosen[-1]) if chosen else ():
        if not 0 <= each < size:
            raise _outside(each, size)
    return chosen


def _ids_of(chosen: Any, size: int) -> Int64:
    """Sample ids out of ids or a mask."""
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
        line = np.sort(ids)
        again = np.flatnonzero(line[1:] == line[:-1])
        if len(again):
            raise ArgumentError(
                "a sample is selected twice",
                expected="each id once, as each sample is delivered once in an epoch",
                found=f"{line[again[0]]} at positions {np.flatnonzero(ids == line[again[0]])[:4].tolist()}",
                remedy="leave repeats out (np.unique); rankfeed.concat of two selections delivers a sample twice",
            )
    return ids


def _not_ids(found: str) -> ArgumentError:
    return ArgumentError(
        "this selects no samples",
        expected="a list or 1-D array of whole numbers, a bool mask, a slice, a range or a function",
        found=found,
    )


def _outside(found: int, size: int) -> ArgumentError:
    remedy = "count from the start: a negative id is more often a mistake than meant" if found < 0 else None
    return ArgumentError("no such sample", expected=f"ids from 0 to {size - 1}", found=found, remedy=remedy)


def _accepted(
    source: Source, predicate: Callable[[Any], Any], columns: Sequence[str] | None, progress: bool
) -> Int64:
    """Ids of the samples for which a predicate returns True."""
    found = []
    for ids, rows in read_in_order(source, columns, "selecting", progress=progress):
        pairs = zip(ids.tolist(), rows.samples(), strict=True)
        mask = [_truth(predicate, sample, sample_id) for sample_id, sample in pairs]
        found.append(ids[mask])
    return np.concatenate(found)


def _truth(predicate: Callable[[Any], Any], sample: Any, sample_id: int) -> bool:
    try:
        answer = predicate(sample)
    except Exception as error:
        raise SourceError(
            "the predicate raised", found=describe_error(error), where=f"sample {sample_id}"
        ) from error
    if getattr(answer, "shape", None) == ():  # of numpy, or a tensor
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


def _again(source: Source, picks: Picks, splits: int) -> SelectSource:
    return SelectSource(source, picks, splits=splits)
