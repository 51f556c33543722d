"""Graphs of PyTorch Geometric as a source, which the loader joins to a PyG ``Batch``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_names
from rankfeed.columns import Columns, Field, retain_heap
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.extras import need
from rankfeed.sources.pyg.collate import joined
from rankfeed.sources.pyg.readers import Each, Graphs, reader_of
from rankfeed.sources.source import Int64, Source, check_ids
from rankfeed.storage import DataFiles, digest_of


class PyGSource(Source):
    """Graphs. `from_dataset` makes it where it is given some.

    A batch equals that of ``torch_geometric.loader.DataLoader``. The graphs of an ``InMemoryDataset`` without
    a ``transform`` are gathered straight from its tensors. The database of an ``OnDiskDataset`` is opened in each
    process and thread that reads. A ``transform`` of the data set is applied at every access.

    Args:
        dataset: a PyG ``Dataset`` (or a part of one, ``dataset[ids]``), a list of ``Data`` or ``HeteroData``, a
            torch ``Subset`` of these, or any map-style Dataset whose samples are graphs, or tuples of graphs.
        follow_batch: attributes for which a batch gets ``<name>_batch`` and ``<name>_ptr``.
        exclude_keys: attributes that batches leave out.

    Raises:
        SourceError: the data set is empty, or has no length.
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

    def __init__(
        self,
        dataset: Any,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        need("torch_geometric", extra="pyg")
        self._follow = _names("follow_batch", follow_batch)
        self._exclude = _names("exclude_keys", exclude_keys)
        dataset, part = _whole_of(dataset)
        try:
            self._reader: Each = reader_of(dataset)
            length = len(self._reader) if self._reader.picks is None else len(self._reader.picks)
        except TypeError as error:
            raise SourceError(
                "the data set has no length",
                found=type(dataset).__name__,
                remedy="give a map-style Dataset; for a stream, rf.split shares it out",
            ) from error
        if self._reader.path is not None:
            self.files = DataFiles([self._reader.path])
        #: Numbers of the graphs in the data set; None where they are 0, 1, 2...
        self._picks = _composed(self._reader.picks, part, length)
        self._length = length if self._picks is None else len(self._picks)
        if self._length < 1:
            raise SourceError("the data set is empty", found=type(dataset).__name__)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dataset": self._reader.portable(),
            "picks": self._picks,
            "length": self._length,
            "options": (self._follow, self._exclude),
            "files": self.files,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reader = reader_of(state["dataset"])
        self._picks, self._length = state["picks"], state["length"]
        self._follow, self._exclude = state["options"]
        self.files = state["files"]

    def _num_samples(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"PyGSource({type(self._reader.dataset).__name__}, {self._length} graphs)"

    @property
    def blocks(self) -> Int64:
        """One block: any graph is read as cheaply as the next."""
        return np.array([self._length], np.int64)

    @property
    def fields(self) -> Mapping[str, Field]:
        """One column, of graphs."""
        return {"": Field("object")}

    as_dicts: bool = False

    @property
    def runs_user_code(self) -> bool:  # type: ignore[override]
        """Whether reading calls code that may draw random numbers: a ``transform``, a Dataset's own ``get``."""
        return self._reader.runs_user_code

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether the data set reads many graphs at once."""
        return self._reader.takes_batches

    @cached_property
    def _identity(self) -> list[bytes] | None:
        return self._reader.identity()

    @property
    def identified(self) -> bool:
        """Whether the fingerprint tells these graphs from others: not for a Dataset of a kind unknown to PyG."""
        return self._identity is not None

    @cached_property
    def fingerprint(self) -> str:
        """Of counts, attributes, shapes, slices, a sample of the content, and the file where there is one."""
        files = [] if self.files is None else [self.files.fingerprint.encode()]
        kind = type(self._reader.dataset).__qualname__
        picks = b"" if self._picks is None else self._picks.tobytes()
        return digest_of(kind.encode(), str(self._length).encode(), picks, *(self._identity or ()), *files)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Some graphs, in the order given; those in memory are cut out when they are looked at.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: None: graphs are read whole.

        Raises:
            SourceError: no such graph, or the data set raised; names the graph.
        """
        if columns is not None and list(columns) != [""]:
            remedy = "leave columns out; exclude_keys= leaves attributes out of the batches"
            raise ArgumentError("graphs are read whole", found=columns, remedy=remedy)
        ids = check_ids(sample_ids, self._length)
        if self.files is not None:
            self.files.check_open(at_intervals=True)
        graphs = self._reader.read(ids if self._picks is None else self._picks[ids])
        if self.files is not None and self._reader.path is not None:  # a database, opened when it is first read
            self.files.check(0)
        return Columns.of_objects(graphs)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.fetch(range(*index.indices(self._length)))[""].rows()
        return super().__getitem__(index)

    def collate(self, samples: Sequence[Any]) -> Any:
        """Join graphs to a ``Batch``, as ``torch_geometric.loader.DataLoader`` does.

        Args:
            samples: graphs as ``fetch`` gave them, or what a transform made of them.
        """
        retain_heap()
        if isinstance(samples, Graphs):
            return samples.layout.collate(samples.numbers, self._follow, self._exclude)
        from torch_geometric.data.data import BaseData
        from torch_geometric.loader.dataloader import Collater

        batch = joined(samples, self._follow, self._exclude) if isinstance(samples[0], BaseData) else None
        return batch if batch is not None else Collater(None, self._follow, self._exclude)(list(samples))

    def annotate(self, batch: Any, name: str, values: Any) -> None:
        """Put a further tensor (the sample ids, say) on a batch."""
        setattr(batch, name, values)


def is_graphs(dataset: Any) -> bool:
    """Whether a data set is one of graphs; PyTorch Geometric is not imported to find out.

    Examples:
        >>> is_graphs([{"x": 1}])
        False
    """
    if "torch_geometric" not in sys.modules:
        return False
    from torch.utils.data import ConcatDataset, Subset
    from torch_geometric.data import Dataset
    from torch_geometric.data.data import BaseData

    if isinstance(dataset, Subset):
        return is_graphs(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_graphs, dataset.datasets))
    if type(dataset) in (list, tuple):  # a list of the user's own may do anything when it is read
        return len(dataset) > 0 and isinstance(dataset[0], BaseData)
    return isinstance(dataset, Dataset)


def _whole_of(dataset: Any) -> tuple[Any, Int64 | None]:
    """The data set under torch's ``Subset``, and which of its samples are meant."""
    from torch.utils.data import Subset

    if type(dataset) is not Subset:
        return dataset, None
    whole, part = _whole_of(dataset.dataset)
    mine = np.asarray(dataset.indices, np.int64).reshape(-1)
    return whole, _composed(part, mine, len(dataset.dataset))  # type: ignore[arg-type]


def _composed(picks: Int64 | None, part: Int64 | None, length: int) -> Int64 | None:
    """Numbers of the graphs of a part of a part."""
    if part is None:
        return picks
    part = np.where(part < 0, part + length, part)
    if len(part) and not 0 <= part.min() <= part.max() < length:
        raise SourceError(
            "a Subset names samples that its Dataset has not",
            expected=f"0 to {length - 1}",
            found=f"{part.min()} to {part.max()}",
        )
    return part if picks is None else picks[part]


def _names(option: str, names: Sequence[str] | None) -> tuple[str, ...]:
    return () if names is None else tuple(check_names(option, names))
