"""Columns that are derived from others, such as masks of nulls, are read with them, in every format."""

import io
import pickle
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import soundfile
from tests.support.tables import write_table
from tests.support.tar import write_tar
from tests.support.values import column_of, samples_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError

ROWS = 12
#: Every third value is null.
VALID = [row % 3 > 0 for row in range(ROWS)]
X = [row + 1 if valid else None for row, valid in enumerate(VALID)]
TABLE = pa.table({"id": range(ROWS), "x": pa.array(X, pa.int64()), "y": pa.array(X, pa.float64())})


def _write_hive(path: Path) -> None:
    partition = pa.array([None if x is None else f"part{x % 2}" for x in X])
    table = TABLE.set_column(2, "y", partition)
    layout = ds.partitioning(pa.schema({"y": pa.string()}), flavor="hive")
    ds.write_dataset(table, path, format="parquet", partitioning=layout)


#: Of each container how an error names the null in row 6, or the first one where all rows are read at once.
CONTAINERS = {
    "t.parquet": r"t\.parquet, row group 1, row 6, column 'x'",
    "hive": r"part-0\.parquet[\s\S]*column 'x'",
    "t.feather": r"t\.feather, record batch 0, row 6, column 'x'",
    "t.arrow": r"t\.arrow, record batch 1, row 6, column 'x'",
    "t.arrows": r"t\.arrows, record batch 1, row 6, column 'x'",
    "t.csv": r"t\.csv, row 0, column 'x'",
    "t.jsonl": r"t\.jsonl, row 0, column 'x'",
    "t.lance": r"t\.lance[\s\S]*version 1, fragment 0, row 6, column 'x'",
    "t.hf": r"data\.arrow, record batch 0, row 6, column 'x'",
    "t.tar": r"\.x[\s\S]*'000'[\s\S]*t\.tar, offset 0",
    "in memory": r"row 6, column 'x'",
}


class Container:
    """The table in one format, opened with the option of that format for values that are missing."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path = name, folder / name
        if name == "hive":
            _write_hive(self.path)
        elif name != "in memory":
            rows = {"t.parquet": "row_group_size", "t.arrow": "rows", "t.arrows": "rows"}
            options: dict[str, Any] = {rows[name]: 5} if name in rows else {}
            write_table(TABLE, self.path, **options)

    def open(self, nulls: str = "error", **options: Any) -> Any:
        if self.name == "in memory":
            return rf.from_dataset(datasets.Dataset(TABLE), nulls=nulls, **options)
        options["missing" if self.name == "t.tar" else "nulls"] = nulls
        return rf.open(self.path, **options)


@pytest.fixture(scope="module", params=CONTAINERS)
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Container:
    return Container(request.param, tmp_path_factory.mktemp("container"))


@pytest.fixture
def open_masked(container: Container) -> Callable[..., Any]:
    return partial(container.open, "mask")


def test_the_error_for_a_null_names_its_row_and_the_options_columns_and_nulls(container: Container) -> None:
    with pytest.raises(SourceError, match=r"null|lacks a member") as caught:
        container.open().fetch(range(ROWS) if container.name == "hive" else [5, 6], ["x"])
    assert re.search(CONTAINERS[container.name], str(caught.value))
    assert "columns=" in str(caught.value.remedy)
    assert re.search("nulls=|missing=", str(caught.value.remedy))
    assert Counter(map(int, column_of(container.open(columns=["id"]), "id"))) == Counter(range(ROWS))
    if container.name not in ("t.csv", "t.jsonl", "t.tar", "hive"):  # which read all rows, or in another order
        assert container.open().fetch([7, 2], ["x"])["x"].rows() == [8, 3]
    with pytest.raises(ArgumentError, match=r"nulls|missing"):
        container.open("perhaps")


def test_a_mask_of_nulls_is_read_with_its_column(open_masked: Callable[..., Any]) -> None:
    whole = open_masked()
    for source, columns in ((whole, ["x"]), (open_masked(columns=["x"]), None)):
        batch = source.fetch(range(ROWS), columns)
        assert list(batch) == ["x", "x_valid"]
        assert sum(map(bool, batch["x_valid"].rows())) == sum(VALID)
        for sample in source.samples(range(ROWS), columns):
            assert bool(sample["x_valid"]) == (sample["x"] not in (0, b""))
    assert list(open_masked(columns=["y", "x"]).fields) == ["y", "y_valid", "x", "x_valid"]
    assert list(whole.fetch([1], ["x_valid", "y", "x"])) == ["x_valid", "y", "y_valid", "x"]
    assert list(whole.fetch([1], ["y_valid"])) == list(open_masked(columns=["y_valid"])[0]) == ["y_valid"]
    assert list(pickle.loads(pickle.dumps(open_masked(columns=["x"]))).fetch([0], ["x"])) == ["x", "x_valid"]


def test_loaders_and_views_read_a_mask_of_nulls_with_its_column(open_masked: Callable[..., Any]) -> None:
    source = open_masked()
    first, second = rf.train_test_split(source, 0.5, seed=1)
    parts = rf.concat([first, second], columns=["x"])
    assert list(parts.fields) == ["x", "x_valid"]
    for view in (source, source.select(range(ROWS - 1, -1, -1)), parts, rf.concat([first, second])):
        assert list(view.fetch([0], ["x"])) == ["x", "x_valid"]
        for workers in (0, 1):
            options: Any = {"num_workers": workers, "worker_kind": "thread", "topology": rf.Topology()}
            batches = list(rf.Loader(view, 4, columns=["x"], **options))
            assert {tuple(batch) for batch in batches} == {("x", "x_valid")}
            assert sum(bool(valid) for batch in batches for valid in batch["x_valid"]) == sum(VALID)
    chosen = source.select(lambda sample: bool(sample["x_valid"]), columns=["x"], progress=False)
    assert len(chosen) == sum(VALID)


def test_concat_of_sources_with_and_without_a_mask_raises_source_error(tmp_path: Path) -> None:
    for name in ("masked", "complete"):
        pq.write_table(TABLE.select(["x"]), tmp_path / f"{name}.parquet")
    masked, complete = rf.open(tmp_path / "masked.parquet", nulls="mask"), rf.open(tmp_path / "complete.parquet")
    with pytest.raises(SourceError, match=r"'x_valid' is missing[\s\S]*same options, such as nulls=\"mask\""):
        rf.concat([complete, masked], columns=["x"])


@pytest.mark.parametrize("columns", [None, ["x"], ["x_valid"]])
def test_the_error_for_a_mask_with_the_name_of_a_column_suggests_nulls_error(columns: Any, tmp_path: Path) -> None:
    path = write_table(pa.table({"x": [1], "x_valid": [2], "y": [3]}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"one name[\s\S]*the mask of 'x'") as caught:
        rf.open(path, nulls="mask", columns=columns)
    assert 'pass nulls="error", which adds no masks' in str(caught.value.remedy)
    assert samples_of(rf.open(path, nulls="error")) == [{"x": 1, "x_valid": 2, "y": 3}]
    assert list(rf.open(path, nulls="mask", columns=["y"]).fields) == ["y", "y_valid"]


def test_the_sample_rate_of_a_sound_column_is_read_with_it(tmp_path: Path) -> None:
    files = [io.BytesIO(), io.BytesIO()]
    for file, rate in zip(files, (8000, 16000), strict=True):
        soundfile.write(file, np.zeros((20, 1), np.float32), rate, format="WAV")
    write_tar(tmp_path / "t.tar", [(f"{row}.wav", file.getvalue()) for row, file in enumerate(files)])
    source = rf.open(tmp_path / "t.tar", columns=["wav"])
    assert list(source.fields) == ["wav", "wav.rate"]
    assert source.fetch([1, 0], ["wav"])["wav.rate"].gather().tolist() == [16000, 8000]
