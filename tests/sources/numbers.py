"""A source whose samples are their own ids."""

from typing import Any

import numpy as np

import rankfeed as rf
from rankfeed.columns.columns import Columns, Dense
from rankfeed.columns.field import Field


class Numbers(rf.Source):
    """Each sample is its own id; counts what is read."""

    default_shuffle = "window"
    prefetch_distance = True

    def __init__(self, blocks: Any) -> None:
        self._blocks = np.atleast_1d(np.array(blocks, np.int64))
        self.columns_read: list[Any] = []
        self.ids_read: list[int] = []
        self.expected: list[Any] = []

    @property
    def blocks(self) -> Any:
        return self._blocks

    @property
    def fields(self) -> Any:
        return {"x": Field("dense", "int64"), "square": Field("dense", "int64"), "label": Field("dense", "int64")}

    @property
    def fingerprint(self) -> str:
        return f"numbers {self._blocks.tolist()}"

    def fetch(self, sample_ids: Any, columns: Any = None) -> Columns:
        ids = np.asarray(sample_ids, np.int64)
        assert not len(ids) or (ids.min() >= 0 and ids.max() < len(self))
        self.columns_read.append(columns)
        self.ids_read += ids.tolist()
        columns = {"x": Dense.of(ids), "square": Dense.of(ids * ids), "label": Dense.of(ids % 10)}
        return Columns({name: columns[name] for name in self.columns_read[-1] or columns}, len(ids))

    def expect(self, sample_ids: Any, columns: Any = None) -> None:
        self.expected.append((np.asarray(sample_ids).tolist(), columns))
