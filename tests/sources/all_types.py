"""A table with a column of every Arrow type that is read, and its rows as plain samples."""

from decimal import Decimal
from typing import Any

import pyarrow as pa

TYPES = {
    "x": pa.float32(),
    "n": pa.int64(),
    "small": pa.uint8(),
    "half": pa.float16(),
    "flag": pa.bool_(),
    "text": pa.string(),
    "large": pa.large_string(),
    "raw": pa.binary(),
    "ragged": pa.list_(pa.int32()),
    "wide": pa.large_list(pa.float64()),
    "vector": pa.list_(pa.float32(), 3),
    "matrix": pa.list_(pa.list_(pa.int16(), 2), 3),
    "rows": pa.list_(pa.list_(pa.float32(), 2)),
    "deep": pa.list_(pa.list_(pa.int64())),
    "words": pa.list_(pa.string()),
    "kind": pa.dictionary(pa.int8(), pa.string()),
    "when": pa.timestamp("us"),
    "day": pa.date32(),
    "price": pa.decimal128(8, 2),
    "pair": pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.string())]))]),
    "nothing": pa.list_(pa.null()),
    "more": pa.binary(3),
}
SCHEMA = pa.schema([pa.field(name, kind) for name, kind in TYPES.items()])


def row(i: int) -> dict[str, Any]:
    return {
        "x": i / 2, "n": -i, "small": i % 256, "half": i, "flag": i % 3 == 0, "text": "é" * (i % 4),
        "large": f"row {i}", "raw": bytes([i % 256]) * (i % 3), "ragged": list(range(i % 5)),
        "wide": [i / 3] * (i % 4), "vector": [i, i + 1, i + 2], "matrix": [[i, 1], [2, 3], [4, i]],
        "rows": [[i, 1.0]] * (i % 3), "deep": [[i] * (i % 2), [1, 2]], "words": ["a", "b" * (i % 3)],
        "kind": f"kind {i % 7}", "when": i * 10**6, "day": i, "price": Decimal(i) / 4,
        "pair": {"a": i % 100, "b": {"c": str(i)}}, "nothing": [], "more": b"%03d" % (i % 1000),
    }  # fmt: skip


def table_of_all_types(rows: int, first: int = 0) -> pa.Table:
    return pa.Table.from_pylist([row(i) for i in range(first, first + rows)], SCHEMA)


def as_samples(whole: pa.Table) -> list[dict[str, Any]]:
    """What pyarrow gives, with structs taken apart and times as the numbers that they are stored as."""
    whole = whole.flatten().flatten()
    for name, kind in (("when", pa.int64()), ("day", pa.int32())):
        if name in whole.column_names:
            index = whole.column_names.index(name)
            whole = whole.set_column(index, name, whole[name].cast(kind).cast(pa.int64()))
    rows: list[dict[str, Any]] = whole.to_pylist()
    return [{name: float(v) if isinstance(v, Decimal) else v for name, v in item.items()} for item in rows]
