"""Any map-style torch Dataset as a source."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field, Objects
from rankfeed.errors import ArgumentError, SourceError, describe_error
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of

#: Samples that are looked at to learn what a sample is.
_PROBES = 4
#: The name of the one column of samples that are no dicts of arrays.
_WHOLE = ""


class TorchDatasetSource(Source):
    """A wrapped Dataset: `from_dataset` makes it.

    Samples that are dicts of numbers, arrays, tensors, strings and bytes become columns. All others are kept as
    they are, in one column named "", so that tuples stay tuples.
    """

    runs_user_code: ClassVar[bool] = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._length = _length(dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_length": self._length}

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"from_dataset({self.dataset!r})"

    @property
    def blocks(self) -> Int64:
        """One block: nothing is known of how the samples lie."""
        return np.array([self._length], np.int64)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds, judged by a few samples."""
        probes = sorted({self._length * number // _PROBES for number in range(_PROBES)})
        samples = self._read(np.array(probes, np.int64))
        if not all(isinstance(sample, dict) for sample in samples):
            return {_WHOLE: Field("object")}
        try:
            columns = Columns.from_samples(samples)
        except (ArgumentError, TypeError):
            return {_WHOLE: Field("object")}
        return {name: column.field for name, column in columns.items()}

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether the Dataset has a ``__getitems__``."""
        return hasattr(self.dataset, "__getitems__")

    @property
    def as_dicts(self) -> bool:
        """Whether samples become columns of their own."""
        return _WHOLE not in self.fields

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
        ids = check_ids(sample_ids, self._length)
        names = check_columns(columns, self.fields)
        samples = self._read(ids)
        if not self.as_dicts:
            return Columns({_WHOLE: Objects(samples)}, len(samples))
        chosen = [
            self._chosen(sample, names, sample_id) for sample, sample_id in zip(samples, ids.tolist(), strict=True)
        ]
        try:
            return Columns.from_samples(chosen, self.fields)
        except ArgumentError as error:
            raise SourceError(
                "samples of the Dataset do not fit together", found=error, where=f"samples {_some(ids)}"
            ) from error

    def _chosen(self, sample: Any, names: list[str], sample_id: int) -> dict[str, Any]:
        if not isinstance(sample, dict) or sample.keys() != self.fields.keys():
            raise SourceError(
                "a sample of the Dataset is unlike the others",
                expected="a dict with " + ", ".join(map(repr, self.fields)),
                found=list(sample) if isinstance(sample, dict) else type(sample).__name__,
                where=f"sample {sample_id}",
            )
        return {name: sample[name] for name in names}

    def _read(self, ids: Int64) -> list[Any]:
        wanted = ids.tolist()
        if hasattr(self.dataset, "__getitems__"):
            try:
                samples = list(self.dataset.__getitems__(wanted))
            except Exception as error:
                raise _raised(error, f"one of samples {_some(ids)}") from error
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
                samples.append(self.dataset[each])
            except Exception as error:
                raise _raised(error, f"sample {each}") from error
        return samples


def from_dataset(dataset: Any, **options: Any) -> Source:
    """Any map-style torch Dataset as a source.

    Its ``__getitems__`` is used where it has one. It travels to worker processes by pickle. Graphs of PyTorch
    Geometric come in batches of its own kind; a Dataset of Hugging Face is read as the Arrow table that it is.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        options: for graphs, ``follow_batch`` and ``exclude_keys``; for Hugging Face's, ``columns`` and ``nulls``.

    Raises:
        SourceError: it has no length, or is empty.
        ArgumentError: an option that its kind does not have.

    Examples:
        >>> source = from_dataset([{"x": 1.5}, {"x": 2.5}])
        >>> len(source), source.fetch([1, 0])["x"].gather()
        (2, array([2.5, 1.5]))
    """
    if "torch_geometric" in sys.modules:  # else nobody can have made graphs
        from rankfeed.sources.pyg import PyGSource, is_graphs

        if is_graphs(dataset):
            return PyGSource(dataset, **options)
    if "datasets" in sys.modules:
        from rankfeed.sources.huggingface import HuggingFaceSource, is_dataset

        if is_dataset(dataset):
            return HuggingFaceSource(dataset, **options)
    if options:
        raise ArgumentError("a plain Dataset has no options", found=", ".join(options))
    return TorchDatasetSource(dataset)


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


def _raised(error: Exception, where: str) -> SourceError:
    return SourceError("the Dataset raised", found=describe_error(error), where=where)


def _some(ids: Int64) -> str:
    shown = ", ".join(map(str, ids[:8].tolist()))
    return shown + (f", ... ({len(ids)})" if len(ids) > 8 else "")
