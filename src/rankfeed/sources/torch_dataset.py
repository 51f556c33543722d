"""Any map-style torch Dataset as a source."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Branch, Columns, Field, Leaf, Mismatch, copy_sample
from rankfeed.columns.layout import flat_fields, infer_layout, map_leaves, parse_layout, resolve_dtypes
from rankfeed.errors import ArgumentError, SourceError, describe_error
from rankfeed.sources.probes import probe_ids
from rankfeed.sources.source import Declared, Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of

#: What can be iterated, but does not yield samples in the order asked for: of a dict of columns, their names.
_NO_SAMPLES = (Mapping, Set, str, bytes)


class TorchDatasetSource(Source):
    """A wrapped Dataset: `from_dataset` makes it.

    Samples that are dicts of numbers, arrays, tensors, strings and bytes become columns. All others are kept as
    they are, so that tuples stay tuples.
    """

    runs_user_code: ClassVar[bool] = True

    def __init__(self, dataset: Any, *, fields: Any = None, ragged: Sequence[str | int] = ()) -> None:
        self.dataset = dataset
        self._length = _length(dataset)
        names = Declared.names(ragged)
        if fields is not None and names:
            raise ArgumentError("fields= says what is ragged", expected='fields={"x": "float32[*]"}', found=ragged)
        layout = None if fields is None else parse_layout(fields)
        self.declared = Declared("the Dataset", "from_dataset(dataset", layout, names)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_length": self._length, "declared": self.declared}

    def _num_samples(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"from_dataset({self.dataset!r})"

    @property
    def blocks(self) -> Int64:
        """One block: nothing is known of how the samples lie."""
        return np.array([self._length], np.int64)

    @cached_property
    def _columns(self) -> Mapping[str, Field] | None:
        """The fields of samples that are dicts of columns; None of others."""
        assert self.declared is not None
        if self.declared.layout is not None:
            return flat_fields(self.declared.layout)
        known = {name: Field("ragged") for name in self.declared.ragged}
        try:
            return flat_fields(resolve_dtypes(infer_layout(self._probed(), known)))
        except ArgumentError:
            return None

    def _probed(self) -> list[Any]:
        """Some samples; without those that raise, which is told when they are asked for."""
        ids = probe_ids(self._length)
        try:
            return self._read(ids)
        except SourceError as error:
            failed = error
        samples: list[Any] = []
        for sample_id in ids:
            with suppress(SourceError):
                samples += self._read(np.array([sample_id]))
        if not samples:
            raise failed
        return samples

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds: as declared, or judged by a few samples."""
        return {"": Field("object")} if self._columns is None else self._columns

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether the Dataset has a ``__getitems__``."""
        return hasattr(self.dataset, "__getitems__")

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether samples become columns of their own."""
        return self._columns is not None

    @property
    def identified(self) -> bool:
        """Whether the fingerprint tells the content apart: only if the Dataset has one of its own."""
        return self._own_fingerprint is not None

    @property
    def _own_fingerprint(self) -> str | None:
        for name in ("fingerprint", "_fingerprint"):
            value = getattr(self.dataset, name, None)
            if isinstance(value, str) and value:
                return value
        return None

    @property
    def fingerprint(self) -> str:
        """Of the Dataset's type, length and its own ``fingerprint`` or ``_fingerprint`` if it has one."""
        kind = type(self.dataset)
        parts = [f"{kind.__module__}.{kind.__qualname__}", str(self._length), self._own_fingerprint or ""]
        if kind.__module__ in ("__main__", "__mp_main__"):  # the same script goes by both names
            parts[0] = kind.__qualname__
        return digest_of(*(part.encode() for part in parts))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Some samples, in the order given.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the Dataset raised; names the sample.
        """
        fields = self._columns
        if fields is None:
            return Columns.of_objects(self.samples(sample_ids, columns))
        check_columns(columns, fields)
        ids = check_ids(sample_ids, self._length)
        samples = self.samples(ids, columns)
        try:
            if columns is None:
                map_leaves(
                    samples, Branch(dict, dict.fromkeys(fields, Leaf(Field("object"), "list"))), lambda *_: None
                )
            return Columns.from_samples(samples, fields)
        except Mismatch as error:
            raise SourceError(
                "a sample of the Dataset is unlike the others",
                expected=error.expected,
                found=error.found,
                where=f"{error.where or 'keys'} of sample {ids[error.row]}",
                remedy=f"rankfeed.{self.declared.call}, fields={{...}}) declares other fields"
                if self.declared
                else None,
            ) from error

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        """Some samples as the Dataset returns them; of dicts, the columns wanted.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample or column, or the Dataset raised; names the sample.
        """
        ids = check_ids(sample_ids, self._length)
        samples = self._read(ids)
        if columns is None:
            return samples
        return [_chosen(sample, columns, each) for sample, each in zip(samples, ids.tolist(), strict=True)]

    def _read(self, ids: Int64) -> list[Any]:
        wanted = ids.tolist()
        if hasattr(self.dataset, "__getitems__"):
            try:
                found = self.dataset.__getitems__(wanted)
                samples = [] if isinstance(found, _NO_SAMPLES) else list(map(copy_sample, found))
            except (Exception, SystemExit) as error:
                raise _raised(error, f"one of samples {_some(ids)}") from error
            if isinstance(found, _NO_SAMPLES):
                raise SourceError(
                    "the Dataset's __getitems__ returned no list of samples",
                    expected="a list with a sample for each index, in their order",
                    found=type(found).__name__,
                )
            if len(samples) != len(wanted):
                raise SourceError(
                    "the Dataset's __getitems__ returned another number of samples",
                    expected=len(wanted),
                    found=len(samples),
                )
            return samples
        samples = []
        for each in wanted:
            try:
                samples.append(copy_sample(self.dataset[each]))
            except (Exception, SystemExit) as error:
                raise _raised(error, f"sample {each}") from error
        return samples


def from_dataset(dataset: Any, *, fields: Any = None, ragged: Sequence[str | int] = (), **options: Any) -> Source:
    """Any map-style torch Dataset as a source.

    Its ``__getitems__`` is used where it has one. It travels to worker processes by pickle. Graphs of PyTorch
    Geometric come in batches of its own kind; a Dataset of Hugging Face is read as the Arrow table that it is.

    The fields of the batches (names, types, what is ragged) are the same in all of them. A Loader learns them from
    eight samples, evenly spaced, that it reads (and transforms) before its first batch. A sample that does not fit
    is an error that says which, and what to declare here.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        fields: what the samples hold, instead of looking at eight: a dict by name, or a tuple for samples that are
            tuples, of types such as "int64", "float32[3, 32, 32]", "float32[*, 64]" (rows that differ in their
            first dimension), "str", "bytes". Under a Loader's ``transform``, what that returns.
        ragged: names of fields (positions, in a tuple) whose first dimension differs, though eight samples might
            not show it.
        options: for graphs, ``follow_batch`` and ``exclude_keys``; for Hugging Face's, ``columns`` and ``nulls``.

    Raises:
        SourceError: it has no length, or is empty.
        ArgumentError: an option that its kind does not have; ``fields`` or ``ragged`` cannot be meant.

    Examples:
        >>> source = from_dataset([{"x": 1.5}, {"x": 2.5}])
        >>> len(source), source.fetch([1, 0])["x"].gather()
        (2, array([2.5, 1.5]))
        >>> from_dataset([{"x": [1]}, {"x": []}], fields={"x": "int32[*]"}).fetch([0, 1])["x"].pad().tolist()
        [[1], [0]]
    """
    names = Declared.names(ragged)
    declared = {"fields": fields} if fields is not None else {"ragged": ragged} if names else {}
    if "torch_geometric" in sys.modules:  # else nobody can have made graphs
        from rankfeed.sources.pyg.source import PyGSource, is_graphs

        if is_graphs(dataset):
            return PyGSource(dataset, **_undeclared(declared, options))
    if "datasets" in sys.modules:
        from rankfeed.sources.hf.source import HuggingFaceSource, is_dataset

        if is_dataset(dataset):
            return HuggingFaceSource(dataset, **_undeclared(declared, options))
    if options:
        raise ArgumentError("a plain Dataset has no options", found=", ".join(options))
    return TorchDatasetSource(dataset, fields=fields, ragged=names)


def _undeclared(declared: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a Dataset that knows its fields."""
    for name in declared:
        raise ArgumentError(
            f"{name} is for plain Datasets: this one says what its samples hold", found=declared[name]
        )
    return options


def _length(dataset: Any) -> int:
    remedy = "give a map-style Dataset with __len__ and __getitem__; a stream goes to rankfeed.from_iterable"
    found = type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, (str, bytes, Mapping)):
        raise SourceError("this is no map-style Dataset", found=found, remedy=remedy)
    # torch's own base class has a __getitem__ that is not implemented, also for streams.
    if any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__):
        raise SourceError("an iterable Dataset has no samples to pick", found=found, remedy=remedy)
    try:
        length = len(dataset)
    except Exception as error:  # of the user's __len__ anything
        raise SourceError("the Dataset has no length", found=found, remedy=remedy) from error
    if length < 1:
        raise SourceError("the Dataset is empty", found=found)
    return length


def _chosen(sample: Any, columns: Sequence[str], sample_id: int) -> dict[str, Any]:
    if isinstance(sample, Mapping) and all(name in sample for name in columns):
        return {name: sample[name] for name in columns}
    raise SourceError(
        "a sample of the Dataset lacks a column",
        expected="a dict with " + ", ".join(map(repr, columns)),
        found=", ".join(map(repr, sample)) if isinstance(sample, Mapping) else type(sample).__name__,
        where=f"sample {sample_id}",
    )


def _raised(error: BaseException, where: str) -> SourceError:
    return SourceError("the Dataset raised", found=describe_error(error), where=where)


def _some(ids: Int64) -> str:
    shown = ", ".join(map(str, ids[:8].tolist()))
    return shown + (f", ... ({len(ids)})" if len(ids) > 8 else "")
