"""The samples that go into each format, and Arrow tables as plain samples again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

COUNT = 103
#: Where the samples are cut: unequal pieces, one of a single sample.
CUTS = (0, 40, 41, 77, 103)

Samples = list[dict[str, Any]]


def samples(count: int = COUNT) -> Samples:
    """A number, a vector, ragged 1-D and 2-D arrays, text and bytes: each may be empty."""
    rng = np.random.default_rng(7)
    return [
        {
            "y": np.int64(i),
            "flag": np.bool_(i % 3 == 0),
            "v": rng.standard_normal(4).astype(np.float32),
            "x": rng.standard_normal((int(rng.integers(0, 9)), 3)).astype(np.float32),
            "tokens": rng.integers(0, 50_000, int(rng.integers(0, 30))).astype(np.int32),
            "text": f"row {i} " + "é" * (i % 4) if i % 10 else "",
            "raw": rng.bytes(int(rng.integers(0, 60))),
        }
        for i in range(count)
    ]


SCHEMA = pa.schema(
    {
        "y": pa.int64(),
        "flag": pa.bool_(),
        "v": pa.list_(pa.float32(), 4),
        "x": pa.list_(pa.list_(pa.float32(), 3)),
        "tokens": pa.list_(pa.int32()),
        "text": pa.string(),
        "raw": pa.binary(),
    }
)


def table(rows: Samples, schema: pa.Schema = SCHEMA) -> pa.Table:
    lists = [{name: v.tolist() if hasattr(v, "tolist") else v for name, v in row.items()} for row in rows]
    return pa.Table.from_pylist(lists, schema)


def pieces(rows: Samples) -> list[Samples]:
    return [rows[first:last] for first, last in pairwise([*CUTS[:-1], len(rows)])]


def rows_of(whole: pa.Table) -> Samples:
    """An Arrow table as plain samples, by pyarrow's own Python values."""
    columns = [[_value(item, one.type) for item in one.to_pylist()] for one in whole.columns]
    return [dict(zip(whole.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _value(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, (str, bytes)):
        return value
    inner: list[int] = []
    lists = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        lists += not fixed
        inner.append(kind.list_size if fixed else -1)
        kind = kind.value_type
    if lists > 1:  # lists of lists have no shape: a list of arrays
        return [np.array(item, kind.to_pandas_dtype()) for item in value]
    return np.array(value, kind.to_pandas_dtype()).reshape(inner)
