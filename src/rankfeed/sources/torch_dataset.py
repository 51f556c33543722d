"""Wraps a map-style torch Dataset as a source."""

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from inspect import getattr_static
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.columns import Columns, make_column
from rankfeed.columns.field import Field
from rankfeed.columns.layout import (
    Branch,
    Mismatch,
    copy_sample,
    flat_fields,
    infer_layout,
    leaf_of_field,
    map_leaves,
    parse_layout,
    resolve_dtypes,
)
from rankfeed.errors import ArgumentError, SourceError, describe_error
from rankfeed.sources.dataset_identity import OWN, DatasetNames
from rankfeed.sources.source import Declared, Int64, Source, check_columns, check_ids, class_labels, probe_ids
from rankfeed.storage.checksum import digest_of

#: Tables of other libraries, by package and class.
_TABLES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}


class TorchDatasetSource(Source):
    """A wrapped Dataset, made by `from_dataset`.

    Samples that are dicts of numbers, arrays, tensors, strings and bytes become columns; all others are delivered
    unchanged, so tuples stay tuples.
    """

    runs_user_code = True
    declared: Declared

    def __init__(self, dataset: Any, *, fields: Any = None, ragged: Sequence[str | int] = ()) -> None:
        self.dataset = dataset
        self._length: int = _length(dataset)
        self._blocks = np.array([self._length], np.int64)  # one, since the storage of the samples is unknown
        self.supports_batched_getitem = hasattr(dataset, "__getitems__")
        names = Declared.names(ragged)
        if fields is not None and names:
            raise ArgumentError("fields= says what is ragged", expected='fields={"x": "float32[*]"}', found=ragged)
        layout = None if fields is None else parse_layout(fields)
        self.declared = Declared("the Dataset", "from_dataset(dataset", layout, names)

    def __repr__(self) -> str:
        return f"from_dataset({self.dataset!r})"

    @cached_property
    def _columns(self) -> Mapping[str, Field] | None:
        """The fields if samples are dicts of columns, otherwise None."""
        if self.declared.layout is not None:
            return flat_fields(self.declared.layout)
        declared = {name: Field("ragged") for name in self.declared.ragged}
        ids = probe_ids(self._length)
        try:
            samples = self._read(ids)
        except SourceError as error:  # without those that raise: reading these reports their error
            reraise_interrupt(error)
            samples = []
            for sample_id in ids:
                try:
                    samples += self._read(np.array([sample_id]))
                except SourceError as failure:
                    reraise_interrupt(failure)
            if not samples:
                raise
        try:
            return flat_fields(resolve_dtypes(infer_layout(samples, declared)))
        except ArgumentError:
            return None

    @property
    def fields(self) -> Mapping[str, Field]:
        return {"": Field("object")} if self._columns is None else self._columns

    @cached_property
    def logical_types(self) -> Mapping[str, str]:  # type: ignore[override]
        """The classes that a Dataset such as torchvision's names, unless a function changes its labels."""
        dataset = self.dataset
        while (type(dataset).__module__, type(dataset).__name__) == ("torch.utils.data.dataset", "Subset"):
            dataset = dataset.dataset
        names = getattr_static(dataset, "classes", None)  # runs no code of the Dataset
        is_changed = getattr_static(dataset, "target_transform", None) is not None
        return {"": class_labels(names)} if isinstance(names, (list, tuple)) and not is_changed else {}

    @property
    def as_dicts(self) -> bool:  # type: ignore[override]
        """Whether samples are dicts of columns."""
        return self._columns is not None

    @property
    def identified(self) -> bool:
        """Whether the Dataset has a fingerprint of its own."""
        return self._own_fingerprint is not None

    @property
    def tells_content(self) -> bool:
        """Whether the Dataset has a fingerprint of its own, or names tell which samples it has."""
        return self.identified or self._names.are_complete

    @cached_property
    def _names(self) -> DatasetNames:
        return DatasetNames(self.dataset)

    @property
    def _own_fingerprint(self) -> str | None:
        fingerprints = (getattr(self.dataset, name, None) for name in OWN)
        return next((text for text in fingerprints if isinstance(text, str) and text), None)

    @property
    def fingerprint(self) -> str:
        """Digest of the Dataset's type, length, and its own ``fingerprint`` or ``_fingerprint`` if it has one.

        Of a Dataset without one, also of the files that it lists: see `DatasetNames`.
        """
        if self.identified or self._names.digest is None:
            return self.earlier_fingerprint
        return digest_of(self.earlier_fingerprint.encode(), self._names.digest.encode())

    @property
    def earlier_fingerprint(self) -> str:
        """The same without the names of files, as in states of earlier versions."""
        kind = type(self.dataset)
        parts = [f"{kind.__module__}.{kind.__qualname__}", str(self._length), self._own_fingerprint or ""]
        if kind.__module__ in ("__main__", "__mp_main__"):  # the same script under both names
            parts[0] = kind.__qualname__
        return digest_of(*(part.encode() for part in parts))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        fields = self._columns
        if fields is None:
            return Columns.of_objects(self.samples(sample_ids, columns))
        names = check_columns(columns, fields)
        ids = check_ids(sample_ids, self._length)
        samples = self.samples(ids, columns)
        try:
            layout = Branch(dict, {name: leaf_of_field(fields[name]) for name in names})
            made = map_leaves(samples, layout, lambda leaf, path, values: make_column(path[0], values, leaf.field))
            return Columns(made, len(ids))
        except Mismatch as error:
            raise SourceError(
                "a sample of the Dataset is unlike the others",
                expected=error.expected,
                found=error.found,
                where=f"{error.where or 'keys'} of sample {ids[error.row]}",
                remedy=f"rankfeed.{self.declared.call}, fields={{...}}) declares other fields",
            ) from error

    def samples(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> list[Any]:
        ids = check_ids(sample_ids, self._length)
        samples = self._read(ids)
        if columns is None:
            return samples
        for sample_id, sample in zip(ids.tolist(), samples, strict=True):
            if not isinstance(sample, Mapping) or not all(name in sample for name in columns):
                raise SourceError(
                    "a sample of the Dataset lacks a column",
                    expected="a dict with " + ", ".join(map(repr, columns)),
                    found=", ".join(map(repr, sample)) if isinstance(sample, Mapping) else type(sample).__name__,
                    where=f"sample {sample_id}",
                    remedy="return these keys for every sample, or leave the others out of columns=",
                )
        return [{name: sample[name] for name in columns} for sample in samples]

    def _read(self, ids: Int64) -> list[Any]:
        indices = ids.tolist()
        place = ""
        samples: list[Any] | None = None
        try:
            if not self.supports_batched_getitem:
                read = []
                for sample_id in indices:
                    place = f"sample {sample_id}"
                    read.append(copy_sample(self.dataset[sample_id]))
                return read
            shown = ", ".join(map(str, indices[:8])) + (f", ... ({len(indices)})" if len(indices) > 8 else "")
            place = f"one of samples {shown}"
            result = self.dataset.__getitems__(indices)
            # Iterating a dict of columns yields names.
            samples = None if isinstance(result, (Mapping, Set, str, bytes)) else list(map(copy_sample, result))
        except (Exception, SystemExit) as error:
            raise SourceError("the Dataset raised", found=describe_error(error), where=place) from error
        if samples is None or len(samples) != len(indices):
            raise SourceError(
                "the Dataset's __getitems__ returned no list of the samples",
                expected=f"a list with a sample for each of {len(indices)} indices, in their order",
                found=type(result).__name__ if samples is None else f"{len(samples)} samples",
            )
        return samples


def from_dataset(dataset: Any, *, fields: Any = None, ragged: Sequence[str | int] = (), **options: Any) -> Source:
    """A map-style torch Dataset as a source.

    The Dataset's ``__getitems__`` is used if it has one. It is pickled to worker processes. Graphs of PyTorch
    Geometric become PyG batches; a Hugging Face Dataset is read as its Arrow table.

    The fields of the batches (names, types, what is ragged) are the same in all of them. A Loader learns them from
    eight evenly spaced samples, which it reads (and transforms) before its first batch. A sample that does not fit
    is an error that names the sample and what to declare here.

    Args:
        dataset: an object with ``__len__`` and ``__getitem__``.
        fields: the fields of the samples, instead of reading eight: a dict by name, or a tuple for samples that
            are tuples, of types such as "int64", "float32[3, 32, 32]", "float32[*, 64]" (rows that differ in their
            first dimension), "str", "bytes". With a Loader's ``transform``, the fields of what it returns.
        ragged: names of fields (positions, in a tuple) whose first dimension varies, even if eight samples do not
            show it.
        options: for graphs, ``follow_batch`` and ``exclude_keys``; for Hugging Face, ``columns`` and ``nulls``.

    Raises:
        SourceError: the Dataset has no length, or is empty.
        ArgumentError: an option that this kind of Dataset does not have; invalid ``fields`` or ``ragged``.

    Examples:
        >>> source = from_dataset([{"x": 1.5}, {"x": 2.5}])
        >>> len(source), source.fetch([1, 0])["x"].gather()
        (2, array([2.5, 1.5]))
        >>> from_dataset([{"x": [1]}, {"x": []}], fields={"x": "int32[*]"}).fetch([0, 1])["x"].pad().tolist()
        [[1], [0]]
    """
    source: Callable[..., Source] | None = None
    if "torch_geometric" in sys.modules:  # otherwise there are no graphs
        from rankfeed.sources.pyg.pyg_source import PyGSource, is_graphs

        source = PyGSource if is_graphs(dataset) else None
    if source is None and "datasets" in sys.modules:
        from rankfeed.sources.huggingface import HuggingFaceSource, is_dataset

        source = HuggingFaceSource if is_dataset(dataset) else None
    if source is None:
        if options:
            raise ArgumentError("a plain Dataset has no options", found=", ".join(options))
        return TorchDatasetSource(dataset, fields=fields, ragged=ragged)
    for name, value in (("fields", fields), ("ragged", Declared.names(ragged) or None)):
        if value is not None:
            raise ArgumentError(f"{name} is for plain Datasets: the fields of this one are known", found=value)
    return source(dataset, **options)


def _length(dataset: Any) -> int:
    remedy = "give a map-style Dataset with __len__ and __getitem__; a stream goes to rankfeed.from_iterable"
    type_name = type(dataset).__name__
    if any((base.__module__.partition(".")[0], base.__name__) in _TABLES for base in type(dataset).__mro__):
        raise SourceError(
            "a table is not a map-style Dataset: its items are columns",
            found=f"{type(dataset).__module__}.{type_name}",
            remedy='pass its rows: frame.to_dict("records") of pandas, frame.to_dicts() of Polars, '
            "table.to_pylist() of pyarrow; or write it to a Parquet file, which rankfeed.open reads",
        )
    # torch's base class has a __getitem__ that is not implemented, also for streams.
    is_stream = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if is_stream or not hasattr(dataset, "__getitem__") or isinstance(dataset, (str, bytes, Mapping)):
        raise SourceError("this is not a map-style Dataset", found=type_name, remedy=remedy)
    try:
        length = len(dataset)
    except Exception as error:  # a user's __len__ may raise anything
        raise SourceError("the Dataset has no length", found=type_name, remedy=remedy) from error
    if length < 1:
        raise SourceError("the Dataset is empty", found=type_name)
    return length
