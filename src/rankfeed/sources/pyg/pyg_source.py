"""Graphs of PyTorch Geometric, which the loader joins to a PyG ``Batch``."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names, check_optional
from rankfeed.columns.buffers import retain_heap
from rankfeed.columns.columns import Column, Columns, Objects
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.extras import need
from rankfeed.sources.pyg.batch import join_graphs
from rankfeed.sources.pyg.readers import GraphReader, Graphs, compose, reader_of
from rankfeed.sources.source import Int64, Source
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles


class PyGSource(Source):
    """Graphs; `from_dataset` makes it from a dataset of graphs.

    A batch equals that of ``torch_geometric.loader.DataLoader``. Graphs of an ``InMemoryDataset`` without a
    ``transform`` are gathered directly from its tensors. The database of an ``OnDiskDataset`` is opened in each
    process and thread that reads. A ``transform`` of the dataset is applied at every access.

    Args:
        dataset: a PyG ``Dataset`` (or a part of one, ``dataset[ids]``), a list of ``Data`` or ``HeteroData``, a
            torch ``Subset`` of these, or any map-style Dataset whose samples are graphs, or tuples of graphs.
        follow_batch: attributes for which a batch gets ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that batches leave out.

    Raises:
        SourceError: the dataset is empty, or has no length.
        MissingExtraError: PyTorch Geometric is not installed.

    Examples:
        >>> import torch, rankfeed as rf
        >>> from torch_geometric.data import Data
        >>> source = PyGSource([Data(x=torch.ones(nodes, 8)) for nodes in (1, 2, 3)])
        >>> source[2]
        Data(x=[3, 8])
        >>> source.collate(source[0:2])
        DataBatch(x=[3, 8], batch=[3], ptr=[3])
    """

    as_dicts: bool = False

    def __init__(
        self,
        dataset: Any,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        need("torch_geometric", extra="pyg")
        self._follow = tuple(check_optional(check_names, "follow_batch", follow_batch) or ())
        self._exclude = tuple(check_optional(check_names, "exclude_keys", exclude_keys) or ())
        dataset, subset = _without_subsets(dataset)
        try:
            self._reader: GraphReader = reader_of(dataset)
            length = len(self._reader)
        except TypeError as error:
            raise SourceError(
                "the dataset has no length",
                found=type(dataset).__name__,
                remedy="give a map-style Dataset; for a stream, use rf.split",
            ) from error
        self.supports_batched_getitem = self._reader.supports_batched_getitem
        if self._reader.path is not None:
            self.files = DataFiles([self._reader.path])
        #: Numbers of the graphs in the dataset; None for all in order.
        self._indices = compose(self._reader.indices, subset, length)
        blocks = np.array([length if self._indices is None else len(self._indices)], np.int64)
        self._init_samples(type(dataset).__name__, {"": Field("object")}, blocks)

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        return self._reader.runs_user_code

    @cached_property
    def _identity(self) -> list[bytes] | None:
        return self._reader.identity()

    @property
    def identified(self) -> bool:
        return self._identity is not None

    @cached_property
    def fingerprint(self) -> str:
        files = [] if self.files is None else [self.files.fingerprint.encode()]
        kind = type(self._reader.dataset).__qualname__
        indices = b"" if self._indices is None else self._indices.tobytes()
        return digest_of(kind.encode(), str(len(self)).encode(), indices, *(self._identity or ()), *files)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Graphs in the given order; graphs in memory are cut out when they are used. ``columns`` must be None."""
        check_no_columns(columns)
        return super().fetch(sample_ids)

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        graphs = self._reader.read(ids if self._indices is None else self._indices[ids])
        if self.files is not None and self._reader.path is not None:  # a database, opened when it is first read
            self.files.check(0)
        return {"": Objects(graphs)}

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(len(self))))[""].rows()
        return super().__getitem__(index)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Join graphs to a ``Batch``, as ``torch_geometric.loader.DataLoader`` does."""
        retain_heap()
        if isinstance(samples, Graphs):
            return samples.layout.collate(samples.numbers, self._follow, self._exclude)
        from torch_geometric.data.data import BaseData
        from torch_geometric.loader.dataloader import Collater

        batch = join_graphs(samples, self._follow, self._exclude) if isinstance(samples[0], BaseData) else None
        return batch if batch is not None else Collater(None, self._follow, self._exclude)(list(samples))

    def annotate(self, batch: Any, name: str, values: Any) -> None:
        setattr(batch, name, values)


def check_no_columns(columns: Sequence[str] | None) -> None:
    """Refuse ``columns=``, which graphs do not have."""
    if columns is not None and list(columns) != [""]:
        remedy = "leave columns out; exclude_keys= leaves attributes out of the batches"
        raise ArgumentError("graphs have no columns", found=columns, remedy=remedy)


def is_graphs(dataset: Any) -> bool:
    """Whether a dataset has graphs; does not import PyTorch Geometric."""
    if "torch_geometric" not in sys.modules:
        return False
    from torch.utils.data import ConcatDataset, Subset
    from torch_geometric.data import Dataset
    from torch_geometric.data.data import BaseData

    if isinstance(dataset, Subset):
        return is_graphs(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_graphs, dataset.datasets))
    if type(dataset) in (list, tuple):  # not a subclass, which may do anything when it is read
        return len(dataset) > 0 and isinstance(dataset[0], BaseData)
    return isinstance(dataset, Dataset)


def _without_subsets(dataset: Any) -> tuple[Any, Int64 | None]:
    """The dataset in torch's ``Subset``, and the selected indices."""
    from torch.utils.data import Subset

    if type(dataset) is not Subset:
        return dataset, None
    inner, indices = _without_subsets(dataset.dataset)
    return inner, compose(indices, dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
