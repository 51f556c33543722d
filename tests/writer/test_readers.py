"""The shards are Arrow files: readers that know nothing of rankfeed read them as they are."""

from pathlib import Path

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
    folder = tmp_path_factory.mktemp("readers") / "packed"
    rf.write(ROWS, folder, shard_bytes=6000, progress=False)
    paths = sorted(map(str, folder.glob("*.arrow")))
    assert len(paths) > 2
    return paths


EXPECTED = [plain(row) for row in ROWS]


def test_pyarrow_reads_the_shards(shards: list[str]) -> None:
    tables = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in shards]
    for table in tables:
        table.validate(full=True)
    assert pa.concat_tables(tables).to_pylist() == EXPECTED


def test_polars_reads_the_shards(shards: list[str]) -> None:
    frame = polars.concat([polars.read_ipc(path) for path in shards])
    assert frame.drop("matrix", "frames").to_dicts() == [
        {name: value for name, value in row.items() if name not in ("matrix", "frames")} for row in EXPECTED
    ]
    assert frame["matrix"].to_numpy().tolist() == [row["matrix"] for row in EXPECTED]
    assert [[list(pair) for pair in frames] for frames in frame["frames"].to_list()] == [
        row["frames"] for row in EXPECTED
    ]


def test_duckdb_reads_the_shards(shards: list[str]) -> None:
    batches = pa.concat_tables([pa.ipc.open_file(pa.memory_map(path)).read_all() for path in shards])
    connection = duckdb.connect()
    connection.register("packed", batches)
    result = connection.execute("select number, text, image, tokens, frames, matrix from packed order by number")
    names = [column[0] for column in result.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    for row in rows:
        row["frames"] = [list(pair) for pair in row["frames"]]
        row["matrix"] = [list(line) for line in row["matrix"]]
    assert rows == EXPECTED


def test_hugging_face_datasets_reads_the_shards(shards: list[str], tmp_path: Path) -> None:
    loaded = datasets.load_dataset("arrow", data_files=shards, split="train", cache_dir=str(tmp_path))
    assert loaded.to_list() == EXPECTED
