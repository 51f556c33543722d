"""Columns that are derived from others, such as masks of nulls, are read with them, in every format."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lance
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import soundfile

import rankfeed as rf
from rankfeed.errors import SourceError

ROWS = 12
#: Every third value is null.
VALID = [row % 3 > 0 for row in range(ROWS)]
X = [row + 1 if valid else None for row, valid in enumerate(VALID)]
TABLE = pa.table({"id": range(ROWS), "x": pa.array(X, pa.int64()), "y": pa.array(X, pa.float64())})


def _write_stream(path: str) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        for batch in TABLE.to_batches(max_chunksize=5):
            writer.write_batch(batch)


def _write_hive(path: str) -> None:
    partition = pa.array([None if x is None else f"part{x % 2}" for x in X])
    table = TABLE.set_column(2, "y", partition)
    layout = ds.partitioning(pa.schema({"y": pa.string()}), flavor="hive")
    ds.write_dataset(table, path, format="parquet", partitioning=layout)


def _write_json_lines(path: str) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))


def _write_tar(path: str) -> None:
    with tarfile.open(path, "w") as tar:
        for row in TABLE.to_pylist():
            for name, value in row.items():
                if value is not None:
                    content = str(int(value)).encode()
                    member = tarfile.TarInfo(f"{row['id']:03d}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


WRITERS: dict[str, Callable[[str], Any]] = {
    "t.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=5),
    "hive": _write_hive,
    "t.feather": lambda path: feather.write_feather(TABLE, path, compression="lz4"),
    "t.arrow": lambda path: feather.write_feather(TABLE, path, compression="uncompressed"),
    "t.arrows": _write_stream,
    "t.csv": lambda path: pc.write_csv(TABLE, path),
    "t.jsonl": _write_json_lines,
    "t.lance": lambda path: lance.write_dataset(TABLE, path),
    "saved": lambda path: datasets.Dataset(TABLE).save_to_disk(path),
    "t.tar": _write_tar,
}


@pytest.fixture(scope="module", params=[*WRITERS, "in memory"])
def open_masked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    if request.param == "in memory":
        return lambda **options: rf.from_dataset(datasets.Dataset(TABLE), nulls="mask", **options)
    path = str(tmp_path_factory.mktemp("masked") / request.param)
    WRITERS[request.param](path)
    option = {"missing" if path.endswith(".tar") else "nulls": "mask"}
    return lambda **options: rf.open(path, **option, **options)


def _valid_rows(values: Any) -> int:
    return sum(map(bool, values))


def test_a_mask_is_read_with_its_column(open_masked: Callable[..., Any]) -> None:
    whole = open_masked()
    every = range(ROWS)
    for source, columns in ((whole, ["x"]), (open_masked(columns=["x"]), None)):
        batch = source.fetch(every, columns)
        assert list(batch) == ["x", "x_valid"]
        assert _valid_rows(batch["x_valid"].rows()) == sum(VALID)
        assert all(
            bool(sample["x_valid"]) == (sample["x"] not in (0, b"")) for sample in source.samples(every, columns)
        )
    assert list(open_masked(columns=["y", "x"]).fields) == ["y", "y_valid", "x", "x_valid"]
    assert list(whole.fetch([1], ["x_valid", "y", "x"])) == ["x_valid", "y", "y_valid", "x"]
    assert list(whole.fetch([1], ["y_valid"])) == list(open_masked(columns=["y_valid"])[0]) == ["y_valid"]
    assert list(pickle.loads(pickle.dumps(open_masked(columns=["x"]))).fetch([0], ["x"])) == ["x", "x_valid"]


def test_a_mask_is_read_with_its_column_by_loaders_and_views(open_masked: Callable[..., Any]) -> None:
    source = open_masked()
    first, second = rf.train_test_split(source, 0.5, seed=1)
    parts = rf.concat([first, second], columns=["x"])
    assert list(parts.fields) == ["x", "x_valid"]
    for view in (source, source.select(range(ROWS - 1, -1, -1)), parts, rf.concat([first, second])):
        assert list(view.fetch([0], ["x"])) == ["x", "x_valid"]
        for loader in (
            rf.Loader(view, 4, columns=["x"], topology=rf.Topology()),
            rf.Loader(view, 4, columns=["x"], num_workers=1, worker_kind="thread", topology=rf.Topology()),
        ):
            batches = list(loader)
            assert {tuple(batch) for batch in batches} == {("x", "x_valid")}
            assert sum(_valid_rows(batch["x_valid"]) for batch in batches) == sum(VALID)
    chosen = source.select(lambda sample: bool(sample["x_valid"]), columns=["x"], progress=False)
    assert len(chosen) == sum(VALID)


def test_a_mask_that_another_source_lacks_is_not_dropped(tmp_path: Path) -> None:
    for name in ("masked", "complete"):
        pq.write_table(TABLE.select(["x"]), tmp_path / f"{name}.parquet")
    masked, complete = rf.open(tmp_path / "masked.parquet", nulls="mask"), rf.open(tmp_path / "complete.parquet")
    with pytest.raises(SourceError, match=r"'x_valid' is missing[\s\S]*same options, such as nulls=\"mask\""):
        rf.concat([complete, masked], columns=["x"])


def test_a_stored_column_with_the_name_of_a_mask_is_refused(tmp_path: Path) -> None:
    table = pa.table({"x": [1, None], "x_valid": ["a", "b"], "y": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"one name[\s\S]*'x_valid'[\s\S]*nulls=\"error\""):
        rf.open(tmp_path / "t.parquet", nulls="mask", columns=["x"])
    assert list(rf.open(tmp_path / "t.parquet", nulls="mask", columns=["y"]).fields) == ["y", "y_valid"]
    assert [row["x_valid"] for row in rf.open(tmp_path / "t.parquet", columns=["x_valid"])] == ["a", "b"]


def test_the_rate_of_sound_is_read_with_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for row, rate in enumerate((8000, 16000)):
            content = io.BytesIO()
            soundfile.write(content, np.zeros((20, 1), np.float32), rate, format="WAV")
            member = tarfile.TarInfo(f"{row}.wav")
            member.size = len(content.getvalue())
            tar.addfile(member, io.BytesIO(content.getvalue()))
    source = rf.open(tmp_path / "t.tar", columns=["wav"])
    assert list(source.fields) == ["wav", "wav.rate"]
    assert source.fetch([1, 0], ["wav"])["wav.rate"].gather().tolist() == [16000, 8000]
