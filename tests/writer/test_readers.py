"""The shards are Arrow files: readers that know nothing of rankfeed read them as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import polars
import pyarrow as pa
import pytest
from tests.support.values import plain

import rankfeed as rf

ROWS = [
    {
        "number": i,
        "text": "é" * (i % 3),
        "image": bytes([i % 256]) * (i % 4),
        "tokens": np.arange(i % 5, dtype=np.int32),
        "frames": np.full((i % 3, 2), i, np.float32),
        "matrix": np.full((2, 3), i, np.float64),
    }
    for i in range(200)
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("readers") / "data"
    rf.write(ROWS, folder, shard_bytes=6000, progress=False)
    paths = sorted(map(str, folder.glob("*.arrow")))
    assert len(paths) > 2
    return paths


def by_pyarrow(shards: list[str]) -> pa.Table:
    tables = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in shards]
    for table in tables:
        table.validate(full=True)
    return pa.concat_tables(tables)


def by_duckdb(shards: list[str], _: Path) -> list[dict[str, Any]]:
    connection = duckdb.connect()
    connection.register("data", by_pyarrow(shards))
    names = list(ROWS[0])
    rows = connection.execute(f"select {', '.join(names)} from data order by number").fetchall()
    return [plain(dict(zip(names, row, strict=True))) for row in rows]


def by_datasets(shards: list[str], cache: Path) -> list[dict[str, Any]]:
    loaded = datasets.load_dataset("arrow", data_files=shards, split="train", cache_dir=str(cache))
    return list(loaded.to_list())


READERS: dict[str, Callable[[list[str], Path], list[dict[str, Any]]]] = {
    "pyarrow": lambda shards, _: by_pyarrow(shards).to_pylist(),
    "polars": lambda shards, _: polars.concat([polars.read_ipc(path) for path in shards]).to_dicts(),
    "duckdb": by_duckdb,
    "datasets": by_datasets,
}


@pytest.mark.parametrize("reader", READERS)
def test_pyarrow_polars_duckdb_datasets_read_the_shards(reader: str, shards: list[str], tmp_path: Path) -> None:
    assert READERS[reader](shards, tmp_path) == [plain(row) for row in ROWS]
