"""Appending to a written dataset: existing shards stay unchanged, and rows are added once."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.values import column_of, contents

import rankfeed as rf
from rankfeed.errors import SourceError, WriteError
from rankfeed.writer import coordinator


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"id": i, "x": np.full(3, i, np.int32)} for i in range(first, last)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    rf.write(rows(0, 100), tmp_path / "p", shard_bytes=500, progress=False)
    return tmp_path / "p"


def test_an_append_adds_rows_and_leaves_the_existing_shards_unchanged(base: Path) -> None:
    shards = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.glob("*.arrow")}
    opened = rf.open(base)
    packed = rf.write(rows(100, 150), base, shard_bytes=500, append=True, key="new", progress=False)
    assert column_of(packed, "id") == list(range(150))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in shards} == shards
    assert column_of(opened, "id") == list(range(100))  # a source that was open still reads the old rows
    more = rf.write(rf.open(base).select(range(20, 40)), base, append=True, workers=0, progress=False)
    assert Counter(column_of(more, "id")) == Counter([*range(150), *range(20, 40)])
    assert not (base / ".rankfeed-write").exists()


def test_an_append_of_an_input_that_was_appended_before_adds_nothing(base: Path, tmp_path: Path) -> None:
    first = rf.write(rows(100, 130), tmp_path / "first", progress=False)
    second = rf.write(rows(130, 160), tmp_path / "second", progress=False)
    for source in (first, second, first, second):
        packed = rf.write(source, base, append=True, progress=False)
    assert column_of(packed, "id") == list(range(160))
    rf.write(first, base, append=True, progress=False, shard_bytes=200)
    packed = rf.write(first, base, append=True, progress=False, order="shuffled")
    assert column_of(packed, "id") == list(range(160))
    for _ in range(2):
        packed = rf.write(iter(rows(160, 170)), base, append=True, key="friday", progress=False)
    assert column_of(packed, "id") == list(range(170))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"id": 1, "x": np.zeros(4, np.int32)}, "'x'"),
        ({"id": 1, "x": np.zeros(3)}, "'x'"),
        ({"id": 1}, "'x'"),
        ({"id": "one", "x": np.zeros(3, np.int32)}, "'id'"),
    ],
    ids=["another shape", "another dtype", "missing field", "another kind"],
)
def test_an_append_of_a_row_with_another_schema_raises(row: dict[str, Any], field: str, base: Path) -> None:
    before = contents(base)
    with pytest.raises(WriteError, match=field):
        rf.write([row], base, append=True, key="new", progress=False)
    assert column_of(rf.open(base), "id") == list(range(100))
    assert contents(base).items() >= before.items()
    rf.write(rows(100, 101), base, append=True, key="new", progress=False, resume=False)
    assert column_of(rf.open(base), "id") == list(range(101))


def test_int8_rows_appended_to_an_int64_column_keep_their_values(tmp_path: Path) -> None:
    rf.write([{"x": np.arange(n, dtype=np.int64)} for n in (1, 2)], tmp_path / "p", progress=False)
    narrow = [{"x": np.arange(3, dtype=np.int8)}] * 2
    packed = rf.write(narrow, tmp_path / "p", append=True, key="new", progress=False)
    assert [sample["x"].tolist() for sample in packed] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_an_append_of_integers_that_a_float_column_cannot_hold_exactly_raises(tmp_path: Path) -> None:
    rf.write([{"x": 0.5}], tmp_path / "p", progress=False)
    before = contents(tmp_path / "p")
    with pytest.raises(WriteError, match="digits"):
        rf.write([{"x": 2**53 + 1}], tmp_path / "p", append=True, key="new", progress=False)
    assert contents(tmp_path / "p") == before


@pytest.mark.parametrize("state", ["missing", "empty", "unfinished"])
def test_an_append_to_a_missing_empty_or_unfinished_dataset_raises(state: str, tmp_path: Path) -> None:
    if state == "empty":
        (tmp_path / "p").mkdir()
    elif state == "unfinished":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coordinator, "commit", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rf.write(rows(0, 9), tmp_path / "p", progress=False)
    with pytest.raises(WriteError, match="no finished dataset"):
        rf.write(rows(0, 1), tmp_path / "p", append=True, key="new", progress=False)
    assert (tmp_path / "p").exists() == (state != "missing")


def test_a_write_of_only_the_first_rows_after_an_append_raises(base: Path) -> None:
    rf.write(rows(100, 110), base, append=True, key="new", progress=False)
    with pytest.raises(WriteError, match="another input"):
        rf.write(rows(0, 100), base, shard_bytes=500, progress=False)
    assert len(rf.open(base)) == 110


@pytest.mark.parametrize(("old", "new"), [("ms", "us"), ("us", None), (None, "us")])
def test_an_append_of_timestamps_in_another_unit_raises(old: str | None, new: str | None, tmp_path: Path) -> None:
    kinds = [pa.int64() if unit is None else pa.timestamp(unit) for unit in (old, new)]
    for name, kind in zip(("old", "new"), kinds, strict=True):
        table = pa.table({"t": pa.array([1, 2]).cast(kind), "in": [{"t": 1}, {"t": 2}]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    first, second = rf.open(tmp_path / "old.parquet"), rf.open(tmp_path / "new.parquet")
    base = tmp_path / "base"
    rf.write(first, base, workers=0, progress=False)
    before = contents(base)
    with pytest.raises(WriteError) as caught:
        rf.write(second, base, append=True, workers=0, progress=False)
    assert all(word in str(caught.value) for word in ("cannot append", "'t'", *map(str, kinds), "map="))
    assert contents(base) == before
    assert not (base / ".rankfeed-write").exists()
    assert len(rf.write(first.select([1]), base, append=True, workers=0, progress=False)) == 3
    # A function may have converted the values.
    converted = rf.write(second, base, map=dict, key="new", append=True, workers=0, progress=False)
    assert converted.fetch(range(5))["t"].gather().tolist() == [1, 2, 2, 1, 2]
    assert len(rf.write([{"t": 3, "in.t": 3}], base, key="dicts", append=True, progress=False)) == 6
    with pytest.raises(SourceError, match="meanings"):
        rf.concat([rf.open(base), second])


def test_an_append_of_timestamps_to_a_dataset_without_logical_types_succeeds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": pa.array([1], pa.timestamp("us"))}), tmp_path / "t.parquet")
    rf.write([{"t": 1}], tmp_path / "base", progress=False)
    assert b"logical_types" not in (tmp_path / "base" / "rankfeed.json").read_bytes()
    source = rf.open(tmp_path / "t.parquet")
    assert len(rf.write(source, tmp_path / "base", append=True, workers=0, progress=False)) == 2
    assert b"logical_types" not in (tmp_path / "base" / "rankfeed.json").read_bytes()


def test_an_append_of_labels_of_other_classes_raises(tmp_path: Path) -> None:
    for name in ("A/cat", "A/dog", "B/bird", "B/cat"):
        (tmp_path / name).mkdir(parents=True)
        np.save(tmp_path / name / "0.npy", np.zeros(2))
    base = tmp_path / "base"
    rf.write(rf.open(tmp_path / "A", labels="folder"), base, workers=0, progress=False)
    with pytest.raises(WriteError, match=r"(?s)'cat', 'dog'.*'bird', 'cat'.*labels="):
        rf.write(rf.open(tmp_path / "B", labels="folder"), base, append=True, workers=0, progress=False)
    labels = ["cat", "dog", "bird"]
    with pytest.raises(WriteError, match="labels"):
        rf.write(rf.open(tmp_path / "B", labels=labels), base, append=True, workers=0, progress=False)
