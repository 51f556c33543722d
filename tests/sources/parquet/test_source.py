"""Parquet is read as its own libraries read it, in any order; damage is an error that names the place."""

import datetime
import decimal
import itertools
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import lance
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.memory import peak

import rankfeed as rf
from rankfeed.diagnostics import verify_data
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError
from rankfeed.sources.parquet import footer as parquet_footer
from rankfeed.sources.parquet import reader as parquet_rows
from rankfeed.sources.parquet import source as parquet
from rankfeed.sources.parquet.source import ParquetSource

ROWS = 700


def table_of(rows: int, start: int = 0) -> pa.Table:
    if not rows:
        return table_of(1).slice(1)  # so that types are what they are with rows
    ids = range(start, start + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "small": pa.array([i % 100 for i in ids], pa.int8()),
            "real": pa.array([i / 8 for i in ids], pa.float32()),
            "flag": [i % 3 == 0 for i in ids],
            "text": [f"é{i}" * (i % 4) for i in ids],
            "raw": [bytes([i % 256]) * (i % 5) for i in ids],
            "kind": pa.array([f"kind {i % 5}" for i in ids]).dictionary_encode(),
            "tokens": pa.array([list(range(i % 7)) for i in ids], pa.list_(pa.int32())),
            "pair": pa.array([[i, -i] for i in ids], pa.list_(pa.int16(), 2)),
            "frames": pa.array([[[i, 1.5]] * (i % 3) for i in ids], pa.list_(pa.list_(pa.float32(), 2))),
            "deep": pa.array([[[i] * j for j in range(i % 3)] for i in ids], pa.list_(pa.list_(pa.int64()))),
            "inner": pa.array([{"x": i, "name": str(i)} for i in ids]),
            "price": pa.array([decimal.Decimal(i) / 4 for i in ids], pa.decimal128(12, 2)),
            "when": pa.array([datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=i) for i in ids]),
            "day": pa.array([datetime.date(2024, 1, 1) + datetime.timedelta(i) for i in ids]),
        }
    )


def plain(value: Any) -> Any:
    """What a sample holds, as Python's own values."""
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value] if value.dtype == object else value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def expected_of(table: pa.Table) -> list[dict[str, Any]]:
    """The samples that a table makes, from pyarrow's own Python values."""
    epoch = datetime.datetime(1970, 1, 1)
    samples = []
    for row in table.to_pylist():
        sample: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, dict):
                sample.update({f"{name}.{inner}": each for inner, each in value.items()})
            elif isinstance(value, decimal.Decimal):
                sample[name] = float(value)
            elif isinstance(value, datetime.datetime):
                sample[name] = (value - epoch) // datetime.timedelta(microseconds=1)
            elif isinstance(value, datetime.date):
                sample[name] = (value - epoch.date()).days
            else:
                sample[name] = value
        samples.append(sample)
    return samples


def samples_of(source: rf.Source, ids: Any = None) -> list[dict[str, Any]]:
    fetched = source.fetch(np.arange(len(source)) if ids is None else ids).samples()
    return [{name: plain(value) for name, value in sample.items()} for sample in fetched]


def write(table: pa.Table, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"write_page_checksum": True, **options})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with row groups of unequal sizes, an empty one among them; 700 rows."""
    folder = tmp_path_factory.mktemp("data")
    write(table_of(300), folder / "part-2.parquet", row_group_size=70)
    with pq.ParquetWriter(folder / "part-9.parquet", table_of(1).schema, write_page_checksum=True) as writer:
        for rows, start in ((1, 300), (0, 301), (199, 301)):
            writer.write_table(table_of(rows, start))
    write(
        table_of(200, 500), folder / "part-10.parquet", row_group_size=64, compression="zstd", data_page_size=512
    )
    write(table_of(5), folder / "_metadata-of-no-use.parquet")
    write(table_of(5), folder / ".hidden.parquet")
    return folder


@pytest.fixture(params=["whole row groups", "parts of them"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "parts of them":
        in_parts(monkeypatch)


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_PART_BYTES", 2000)


def test_samples_are_what_pyarrow_reads(folder: Path, cut: None) -> None:
    source = rf.open(folder)
    assert isinstance(source, ParquetSource)
    assert source.blocks.tolist() == [70, 70, 70, 70, 20, 1, 0, 199, 64, 64, 64, 8]
    assert source.blocks.dtype == np.int64
    assert samples_of(source) == expected_of(table_of(ROWS))
    files = [folder / f"part-{number}.parquet" for number in (2, 9, 10)]
    assert pa.concat_tables(map(pq.read_table, files)).combine_chunks().equals(table_of(ROWS).combine_chunks())


@pytest.mark.parametrize("seed", range(3))
def test_any_order_with_repeats_gives_the_rows_asked_for(
    seed: int, folder: Path, cut: None, thorough: bool
) -> None:
    some = ROWS if thorough else 200
    rng = np.random.default_rng(seed)
    source = ParquetSource(folder, cache_bytes=(0, 30_000, 1 << 30)[seed])
    expected = expected_of(table_of(ROWS))
    orders = [rng.permutation(ROWS)[:some], np.arange(ROWS)[::-1], rng.integers(0, ROWS, some), np.full(3, 699)]
    for ids in orders:
        for start in range(0, len(ids), 97):
            batch = ids[start : start + 97]
            assert samples_of(source, batch) == [expected[each] for each in batch]
    assert source.fetch([]).num_rows == 0


def test_only_wanted_columns_are_decoded(folder: Path, tmp_path: Path) -> None:
    source = rf.open(folder, columns=["inner.x", "id"])
    assert list(source.fields) == ["inner.x", "id"]
    assert samples_of(source, [3, 650]) == [{"inner.x": 3, "id": 3}, {"inner.x": 650, "id": 650}]
    whole = rf.open(folder)
    assert list(whole.fetch([1], columns=["price"])) == ["price"]
    assert source.fingerprint == whole.fingerprint
    with pytest.raises(ArgumentError, match="no such column"):
        rf.open(folder, columns=["nothing"])
    # A column that cannot be read is no error unless it is requested.
    path = write(
        table_of(50).select(["id", "text"]), tmp_path / "t.parquet", compression="none", use_dictionary=False
    )
    content = path.read_bytes()
    place = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    path.write_bytes(content[: place + 60] + b"\xff" + content[place + 61 :])
    assert samples_of(rf.open(path, columns=["id"]))[49] == {"id": 49}
    with pytest.raises(CorruptError, match=r"t\.parquet, row group 0"):
        rf.open(path)[0]


@pytest.mark.parametrize("as_what", ["file", "list", "glob", "braces", "folder"])
def test_files_are_found_however_they_are_named(as_what: str, folder: Path) -> None:
    numbers = [2] if as_what == "file" else [10, 9] if as_what in ("list", "braces") else [2, 9, 10]
    where: Any = {
        "file": folder / "part-2.parquet",
        "list": [folder / "part-10.parquet", str(folder / "part-9.parquet")],
        "glob": f"{folder}/part-*.parquet",
        "braces": f"{folder}/part-{{10,9}}.parquet",
        "folder": folder,
    }[as_what]
    rows = [
        pq.read_table(folder / f"part-{number}.parquet", columns=["id"])["id"].to_pylist() for number in numbers
    ]
    assert [sample["id"] for sample in samples_of(rf.open(where, columns=["id"]))] == [
        each for some in rows for each in some
    ]


def test_the_fingerprint_is_of_the_data_and_not_of_their_place(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    assert rf.open(moved).fingerprint == rf.open(folder).fingerprint
    assert rf.open(moved).fingerprint == rf.open(f"{folder}/part-*").fingerprint
    write(table_of(1, 700), moved / "part-11.parquet")
    assert rf.open(moved).fingerprint != rf.open(folder).fingerprint
    (moved / "part-11.parquet").unlink()
    other = table_of(200, 501)
    write(other, moved / "part-10.parquet", row_group_size=64, compression="zstd", data_page_size=512)
    assert rf.open(moved).fingerprint != rf.open(folder).fingerprint


# Partitions.


def test_folders_called_key_value_are_columns(tmp_path: Path) -> None:
    table = pa.table({"x": range(60), "year": [2020 + i % 3 for i in range(60)], "what": ["a b/c", "ü"] * 30})
    pa.dataset.write_dataset(
        table, tmp_path / "hive", format="parquet", partitioning=["year", "what"], partitioning_flavor="hive"
    )
    source = rf.open(tmp_path / "hive")
    assert {name: str(field) for name, field in source.fields.items()} == {
        "x": "int64",
        "year": "int64",
        "what": "str",
    }
    found = Counter((row["x"], row["year"], row["what"]) for row in samples_of(source))
    assert found == Counter((row["x"], row["year"], row["what"]) for row in table.to_pylist())
    one = sorted((tmp_path / "hive" / "year=2021").rglob("*.parquet"))
    assert set(np.unique(rf.open([str(path) for path in one]).fetch([0, 1])["year"].gather())) == {2021}
    assert list(rf.open(tmp_path / "hive", columns=["year"])[0]) == ["year"]


def test_polars_and_duckdb_partitions_read_alike(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": list(range(40)), "k": [i % 4 for i in range(40)]})
    expected = Counter(map(tuple, frame.rows()))
    relation = frame.to_arrow()
    duckdb.sql(f"COPY relation TO '{tmp_path}/duck' (FORMAT parquet, PARTITION_BY (k))")
    assert relation.num_rows == 40
    for value in range(4):
        path = tmp_path / "polars" / f"k={value}" / "0.parquet"
        path.parent.mkdir(parents=True)
        frame.filter(pl.col("k") == value).write_parquet(path)  # with the column itself in the file, too
    for name in ("duck", "polars"):
        source = rf.open(tmp_path / name)
        assert Counter((row["x"], row["k"]) for row in samples_of(source)) == expected


def test_a_column_that_contradicts_its_folder_is_an_error(tmp_path: Path) -> None:
    write(pa.table({"x": [1], "k": [5]}), tmp_path / "k=5" / "a.parquet")
    write(pa.table({"x": [2], "k": [7]}), tmp_path / "k=6" / "a.parquet")
    source = rf.open(tmp_path)
    assert samples_of(source, [0]) == [{"x": 1, "k": 5}]
    with pytest.raises(SourceError, match=r"'k' contradicts its folder[\s\S]*k=6"):
        source.fetch([1])
    assert samples_of(rf.open(tmp_path, columns=["x"])) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_text_of_any_type_is_compared_with_its_folder(kind: Any, tmp_path: Path) -> None:
    for key in ("a", "b"):
        table = pa.table({"x": [1, 2], "k": pa.array(["a", None], pa.string()).cast(kind)})
        write(table, tmp_path / f"k={key}" / "a.parquet")
    source = rf.open(tmp_path, nulls="mask")
    assert samples_of(source, [0])[0]["k"] in ("a", b"a")
    with pytest.raises(SourceError, match=r"'k' contradicts its folder[\s\S]*k=b"):
        source.fetch([2])


@pytest.mark.parametrize("key", [5, "e"])
def test_a_null_in_a_column_of_the_folders_name_is_an_error_for_its_row(key: Any, tmp_path: Path) -> None:
    write(pa.table({"x": [1, 2, 3], "k": [key, None, key]}), tmp_path / f"k={key}" / "a.parquet")
    source = rf.open(tmp_path)
    assert samples_of(source, [2, 0]) == [{"x": 3, "k": key}, {"x": 1, "k": key}]
    with pytest.raises(SourceError, match=r"null[\s\S]*row 1, column 'k'"):
        source.fetch([1])


def test_folders_of_different_keys_are_refused(tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "a=1" / "a.parquet")
    write(pa.table({"x": [2]}), tmp_path / "b=1" / "a.parquet")
    with pytest.raises(SourceError, match=r"keys of their folders[\s\S]*a=1[\s\S]*b=1"):
        rf.open(tmp_path)


def test_a_key_that_is_twice_in_a_path_is_refused(tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "k=1" / "k=2" / "a.parquet")
    with pytest.raises(SourceError, match=r"(?s)same column.*k=1, k=2.*a\.parquet.*below") as caught:
        rf.open(tmp_path)
    assert "files differ" not in str(caught.value)
    assert samples_of(rf.open(tmp_path / "k=1"), [0]) == [{"x": 1, "k": 2}]


@pytest.mark.parametrize("columns", [None, ["x"], ["x_valid"]])
def test_a_mask_with_the_name_of_a_column_names_the_option_that_adds_none(columns: Any, tmp_path: Path) -> None:
    path = write(pa.table({"x": [1], "x_valid": [2], "y": [3]}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"one name[\s\S]*the mask of 'x'") as caught:
        rf.open(path, nulls="mask", columns=columns)
    assert 'pass nulls="error", which adds no masks' in str(caught.value.remedy)
    assert samples_of(rf.open(path, nulls="error"), [0]) == [{"x": 1, "x_valid": 2, "y": 3}]
    assert list(rf.open(path, nulls="mask", columns=["y"]).fields) == ["y", "y_valid"]


def test_folders_of_one_number_written_in_two_ways_are_refused(tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "y=01" / "a.parquet")
    write(pa.table({"x": [2]}), tmp_path / "y=02" / "a.parquet")
    assert [row["y"] for row in rf.open(tmp_path)] == [1, 2]
    write(pa.table({"x": [3]}), tmp_path / "y=1" / "a.parquet")
    with pytest.raises(SourceError, match=r"same value of column 'y'[\s\S]*y=01 and y=1[\s\S]*rename"):
        rf.open(tmp_path)


def test_a_folder_for_nulls_is_an_error_or_masked(tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "a=3" / "a.parquet")
    write(pa.table({"x": [2]}), tmp_path / "a=__HIVE_DEFAULT_PARTITION__" / "a.parquet")
    source = rf.open(tmp_path)
    with pytest.raises(SourceError, match=r"'a' is null[\s\S]*__HIVE[\s\S]*mask"):
        source.fetch([0, 1])
    masked = samples_of(rf.open(tmp_path, nulls="mask"))
    assert [(row["a"], row["a_valid"]) for row in masked] == [(3, True), (0, False)]


@pytest.mark.parametrize("log", ["_delta_log/", ".hoodie/", "metadata/v1.metadata.json"])
def test_a_table_with_a_log_of_its_files_is_not_read_by_their_names(log: str, tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "t" / "a.parquet")
    place = tmp_path / "t" / log
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir() if log.endswith("/") else place.write_text("{}")
    with pytest.raises(SourceError, match=r"only its log says[\s\S]*open the list of valid files"):
        rf.open(tmp_path / "t")


# Nulls.


def test_after_an_error_row_groups_are_decoded_one_by_one_within_the_cache(tmp_path: Path) -> None:
    x = pa.array([None, *range(1, 8000)])  # a null is looked for there, as damage is
    pq.write_table(pa.table({"x": x}), tmp_path / "t.parquet", row_group_size=100)
    source = ParquetSource(tmp_path / "t.parquet", cache_bytes=1 << 20)
    for wrong in ([8000], [-1]):
        with pytest.raises(SourceError, match="no such sample"):
            source.fetch(wrong)
    assert source._finer is None
    with pytest.raises(SourceError, match="null"):
        source.fetch([0])
    assert source._finer is not None
    assert samples_of(source, [7999, 100]) == [{"x": 7999}, {"x": 100}]
    assert source._finer._cache.max_bytes == 1 << 20
    assert pickle.loads(pickle.dumps(source))._cache.max_bytes == 1 << 20
    assert source._cache.max_bytes == 0


def test_a_null_is_an_error_that_names_file_row_and_column(tmp_path: Path) -> None:
    x = [1, 2, 3, 4, None, 6]
    path = write(pa.table({"x": x, "y": range(6)}), tmp_path / "n.parquet", row_group_size=2)
    source = rf.open(path)
    assert samples_of(source, [0, 1]) == [{"x": 1, "y": 0}, {"x": 2, "y": 1}]
    with pytest.raises(SourceError, match=r"n\.parquet, row group 2, row 4, column 'x'[\s\S]*columns="):
        source.fetch([5, 4])
    assert samples_of(source, [5, 3]) == [{"x": 6, "y": 5}, {"x": 4, "y": 3}]
    assert samples_of(rf.open(path, columns=["y"]), [4]) == [{"y": 4}]
    masked = samples_of(rf.open(path, nulls="mask"), [3, 4])
    assert [(row["x"], row["x_valid"]) for row in masked] == [(4, True), (0, False)]
    assert samples_of(rf.open(path, nulls="mask", columns=["x_valid"]), [4]) == [{"x_valid": False}]
    with pytest.raises(ArgumentError, match="nulls"):
        rf.open(path, nulls="perhaps")


# Through loaders, in other threads and processes.


@pytest.mark.parametrize(
    ("shuffle", "options"),
    [
        *((shuffle, {"num_workers": workers}) for shuffle in (False, True, "global") for workers in (0, 2)),
        (True, {"num_workers": 2, "worker_kind": "process"}),
    ],
)
def test_every_sample_once_an_epoch_in_every_loader(options: Any, shuffle: Any, folder: Path) -> None:
    source = rf.open(folder, columns=["id", "tokens"])
    loader = rf.Loader(source, 32, shuffle=shuffle, seed=3, topology=rf.Topology(), **options)
    for _ in range(1 if "worker_kind" in options else 2):
        seen: list[int] = []
        for batch in loader:
            ids = batch["id"].tolist()
            assert batch["tokens_lengths"].tolist() == [each % 7 for each in ids]
            seen += ids
        assert Counter(seen) == Counter(range(ROWS))
        assert (seen == list(range(ROWS))) == (shuffle is False)


def _read(source: rf.Source, results: "multiprocessing.Queue[int]") -> None:
    results.put(sum(row["id"] for row in samples_of(source)))


def test_a_forked_process_reads_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    source = rf.open(folder)
    source.fetch(range(0, ROWS, 3))  # files are open, and walks under way, when the child starts
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=_read, args=(source, results), daemon=True)
    child.start()
    assert results.get(timeout=600) == sum(range(ROWS))
    child.join(600)


def test_threads_read_at_once_with_few_files_open(
    folder: Path, cut: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "OPEN_FILES", 1)
    monkeypatch.setattr(parquet_rows, "_LOCKS", 2)
    source = ParquetSource(folder, columns=["id", "text"], cache_bytes=10_000)
    expected = table_of(ROWS)["text"].to_pylist()
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(20):
                ids = rng.integers(0, ROWS, 16)
                for each, row in zip(ids.tolist(), samples_of(source, ids), strict=True):
                    if (row["id"], row["text"]) != (each, expected[each]):
                        wrong.append(row)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert len(source._reader._files) <= 1


def test_rows_read_in_their_order_are_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch)
    walks: list[Any] = []
    walk = parquet_rows.ParquetReader._open_cursor

    def counted(self: Any, part: Any, *others: Any) -> Any:
        if part.step > 1:  # not the first row, which is read to see how large rows are
            walks.append(part)
        return walk(self, part, *others)

    monkeypatch.setattr(parquet_rows.ParquetReader, "_open_cursor", counted)
    source = ParquetSource(folder / "part-2.parquet", cache_bytes=0)
    assert len(source._parts) >= 4 * len(source.blocks)
    for start in range(0, 300, 10):
        source.fetch(range(start, start + 10))
    assert len(walks) == np.count_nonzero(source.blocks)


def test_row_groups_under_way_hold_little_of_wide_files_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "_CURSORS", 4)
    rows, columns = 20_000, 16
    table = pa.table({f"c{each}": np.arange(rows) for each in range(columns)})
    path = write(table, tmp_path / "t.parquet", row_group_size=rows // 2, compression=None, use_dictionary=False)
    before = pa.total_allocated_bytes()
    source = ParquetSource(path, cache_bytes=1 << 20)
    for first in [*range(0, rows, rows // 20)][::-1]:  # each of them begins a walk, in two row groups
        source.fetch([first])
    assert len(source._reader._cursors) == 4
    assert pa.total_allocated_bytes() - before < (4 << 20) + 4 * columns * (200 << 10)


def test_threads_that_end_row_groups_while_others_count_the_memory_of_cursors(tmp_path: Path) -> None:
    groups, rows = 100, 12_000
    table = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, groups * rows)})
    path = write(table, tmp_path / "t.parquet", row_group_size=rows, compression=None, use_dictionary=False)
    source = ParquetSource(path, cache_bytes=1 << 20)
    source.fetch(range(0, 60 * rows, rows))  # each of them begins a row group
    reader, is_done = source._reader, threading.Event()
    assert len(reader._cursors) == 60
    sizes = []

    def count() -> None:
        while not is_done.is_set():
            sizes.append(reader.nbytes)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for last in range(61 * rows - 1, groups * rows, rows):  # each of them ends one
            source.fetch([last])
        assert thread.is_alive()
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert min(sizes) > 0


# Files that changed or are not what they should be.


def test_a_file_that_was_replaced_is_not_read_on_with(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    source = rf.open(copy)
    other = pickle.loads(pickle.dumps(source))
    write(table_of(300, 7), copy / "part-2.parquet", row_group_size=70)
    with pytest.raises(CorruptError, match=r"replaced while it was in use[\s\S]*part-2[\s\S]*start the job again"):
        other.fetch([0])
    gone = Path(shutil.copytree(folder, tmp_path / "gone"))
    other = rf.open(gone)
    (gone / "part-9.parquet").unlink()
    with pytest.raises(SourceError, match=r"cannot be read[\s\S]*part-9"):
        other.fetch([300])


@pytest.mark.parametrize(
    ("other", "column"),
    [
        ({"x": ["a"], "y": [1.0]}, "'x'"),
        ({"x": [1]}, "'y'"),
        ({"x": [1], "y": [1.0], "z": [1]}, "'z'"),
        ({"x": [1], "y": pa.array([1.0], pa.float32())}, "'y'"),
    ],
)
def test_files_of_unequal_columns_are_named_both(other: dict[str, Any], column: str, tmp_path: Path) -> None:
    write(pa.table({"x": [1], "y": [1.0]}), tmp_path / "a.parquet")
    write(pa.table(other), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=rf"column {column}[\s\S]*a\.parquet[\s\S]*b\.parquet"):
        rf.open(tmp_path)


LISTS = pa.table(
    {
        "id": [0, 1, 2],
        "a": pa.array([[1], [2, 3], [4]], pa.list_(pa.int64())),
        "b": pa.array([[1.5] * 5, [], [2.5]], pa.list_(pa.float64())),
        "deep": [[[1], []], [], [[2, 3, 4]]],
        "s": [{"p": [1, 2], "q": "x"}, {"p": [], "q": "y"}, {"p": [3], "q": "z"}],
        "view": pa.array([[7], [8, 9], []], pa.list_view(pa.int64())),
        "pairs": pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int16(), 2))),
    }
)


@pytest.mark.parametrize(
    "columns", [*itertools.permutations(["a", "b"]), *itertools.permutations(["deep", "s", "a"])]
)
def test_list_columns_are_read_in_any_order(columns: tuple[str, ...], tmp_path: Path) -> None:
    write(LISTS, tmp_path / "a.parquet")
    write(LISTS.select(LISTS.column_names[::-1]), tmp_path / "b.parquet")
    expected = expected_of(LISTS) * 2
    names = [name for each in columns for name in (["s.p", "s.q"] if each == "s" else [each])]
    opened = rf.open(tmp_path, columns=names)
    assert list(opened.fields) == names
    assert samples_of(opened) == [{name: row[name] for name in names} for row in expected]
    whole = rf.open(tmp_path)
    assert samples_of(whole) == [{name: row[name] for name in whole.fields} for row in expected]
    rows = whole.fetch(range(6), names).samples()
    assert [{name: plain(value) for name, value in row.items()} for row in rows] == samples_of(opened)
    for batch in rf.Loader(whole, 6, columns=names, ragged="list", topology=rf.Topology()):
        lists = [name for name in names if name in ("a", "b", "s.p")]
        assert {name: [plain(np.asarray(row)) for row in batch[name]] for name in lists} == {
            name: [row[name] for row in expected] for name in lists
        }


def test_each_list_column_is_compared_with_its_own_number_of_values(tmp_path: Path) -> None:
    rows = [list(range(i % 4)) for i in range(40)]
    table = pa.table({"a": pa.array(rows, pa.list_(pa.int32())), "b": pa.array(rows[::-1], pa.list_(pa.int32()))})
    path = write(
        table, tmp_path / "t.parquet", use_dictionary=False, compression="none", write_page_checksum=False
    )
    content = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(1)
    refused: set[str] = set()
    for byte in range(
        column.data_page_offset, column.data_page_offset + 70
    ):  # the header of a page, and its levels
        bad = bytearray(content)
        bad[byte] ^= 1
        path.write_bytes(bad)
        for columns in (["a", "b"], ["b", "a"]):
            source = rf.open(path, columns=columns)
            try:
                source.fetch(range(40))
            except RankfeedError as error:
                refused.add(f"{columns[0]} {error.summary} {str(error.where).rpartition(' ')[2]}")
    for first in "ab":
        assert any(
            each.startswith(first) and "another number of values" in each and "'b" in each for each in refused
        )
    assert not any(each.endswith(("'a.list.element'", "'a'")) for each in refused)


def test_layouts_that_make_no_difference_are_no_difference(tmp_path: Path) -> None:
    text = pa.array(["a", "b"])
    write(pa.table({"t": text, "l": pa.array([[1], []], pa.list_(pa.int64()))}), tmp_path / "a.parquet")
    other = {"l": pa.array([[2], [3]], pa.large_list(pa.int64())), "t": text.dictionary_encode()}
    write(pa.table(other), tmp_path / "b.parquet")
    pl.DataFrame({"t": ["c"], "l": [[4, 5]]}).write_parquet(tmp_path / "c.parquet")
    duckdb.sql(f"COPY (SELECT 'd' AS t, [6::BIGINT] AS l) TO '{tmp_path}/d.parquet' (FORMAT parquet)")
    expected = [("a", [1]), ("b", []), ("a", [2]), ("b", [3]), ("c", [4, 5]), ("d", [6])]
    assert [(row["t"], row["l"]) for row in samples_of(rf.open(tmp_path))] == expected


def test_an_empty_data_set_is_an_error(tmp_path: Path) -> None:
    path = write(table_of(0), tmp_path / "e.parquet")
    with pytest.raises(SourceError, match=r"no samples[\s\S]*e\.parquet"):
        rf.open(path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SourceError, match="empty"):
        rf.open(tmp_path / "nothing")
    with pytest.raises(SourceError, match="no Parquet files"):
        ParquetSource(tmp_path / "nothing")


@pytest.mark.parametrize("keep", [0, 3, 4, 11, 12, 100, -1, -4, -8, -9, -500])
def test_a_cut_file_is_named(keep: int, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    path.write_bytes((folder / "part-2.parquet").read_bytes()[:keep])
    with pytest.raises(CorruptError, match=r"cut\.parquet[\s\S]*remedy"):
        ParquetSource(path)
    if keep not in (3,):
        with pytest.raises(CorruptError, match=r"cut\.parquet"):
            rf.open(path)


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 2**31, 2**32 - 1])
def test_a_footer_of_an_impossible_length_is_an_error_and_no_allocation(
    length: int, folder: Path, tmp_path: Path
) -> None:
    content = (folder / "part-2.parquet").read_bytes()
    path = tmp_path / "f.parquet"
    path.write_bytes(content[:-8] + length.to_bytes(4, "little") + b"PAR1")
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptError, match=r"f\.parquet"):
        rf.open(path)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_list_longer_than_its_footer_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    # Thrift's compact protocol: field 2 (the schema) is a list of 2**31 - 1 structs.
    footer = bytes([0x15, 0x02, 0x19, 0xFC, 0xFF, 0xFF, 0xFF, 0xFF, 0x07])
    path = tmp_path / "bomb.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(CorruptError, match=r"bomb\.parquet"):
        rf.open(path)


def test_a_corrupt_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = write(
        table_of(100).select(["id", "real"]), tmp_path / "p.parquet", row_group_size=50, use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(1).column(1)
    for place in (chunk.data_page_offset + chunk.total_compressed_size - 3,):
        content[place] ^= 1
    path.write_bytes(content)
    source = rf.open(path)
    assert samples_of(source, [49])[0]["id"] == 49
    with pytest.raises(CorruptError, match=r"p\.parquet, row group 1[\s\S]*'real'"):
        source.fetch([50])


def test_encrypted_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    content = write(table_of(3), path).read_bytes()
    path.write_bytes(b"PARE" + content[4:-4] + b"PARE")
    with pytest.raises(SourceError, match=r"encrypted[\s\S]*e\.parquet[\s\S]*decrypt"):
        rf.open(path)


def test_a_file_that_lists_the_rows_of_others_is_no_data(tmp_path: Path) -> None:
    metadata: list[Any] = []
    pq.write_table(table_of(5).select(["id"]), tmp_path / "a.parquet", metadata_collector=metadata)
    metadata[0].set_file_path("a.parquet")
    pq.write_metadata(table_of(5).select(["id"]).schema, tmp_path / "_metadata", metadata_collector=metadata)
    assert samples_of(rf.open(tmp_path), [4]) == [{"id": 4}]
    with pytest.raises(SourceError, match=r"row groups of other files[\s\S]*_metadata[\s\S]*open its folder"):
        rf.open(tmp_path / "_metadata")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    path = write(table, tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"one name[\s\S]*'x'"):
        rf.open(path)


def test_many_footers_are_read_and_the_first_bad_one_is_named(tmp_path: Path) -> None:
    content = write(pa.table({"x": [1, 2]}), tmp_path / "0.parquet").read_bytes()
    for number in range(1, 120):
        (tmp_path / f"{number}.parquet").write_bytes(content)
    assert len(rf.open(tmp_path)) == 240
    assert rf.open(tmp_path).blocks.tolist() == [2] * 120
    (tmp_path / "77.parquet").write_bytes(content[:-1])
    with pytest.raises(CorruptError, match=r"/77\.parquet"):
        rf.open(tmp_path)


def test_a_bar_is_shown_for_many_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(parquet_footer, "_MANY", 2)
    assert len(rf.open(folder)) == ROWS


# Other writers.


def test_files_of_polars_and_duckdb_are_read_as_they_read_them(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "i": list(range(500)),
            "f": [i / 3 for i in range(500)],
            "s": [f"s{i % 9}" for i in range(500)],
            "l": [[float(j) for j in range(i % 4)] for i in range(500)],
            "c": pl.Series([f"c{i % 3}" for i in range(500)], dtype=pl.Categorical),
        }
    )
    frame.write_parquet(tmp_path / "polars.parquet", row_group_size=130)
    plain_frame = frame.with_columns(pl.col("c").cast(pl.String)).to_arrow()
    duckdb.sql(f"COPY plain_frame TO '{tmp_path}/duck.parquet' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    assert plain_frame.num_rows == 500
    for name in ("polars", "duck"):
        path = tmp_path / f"{name}.parquet"
        assert samples_of(rf.open(path)) == pl.read_parquet(path).to_dicts()
        read = duckdb.sql(f"SELECT * FROM '{path}'").to_arrow_table()
        assert samples_of(rf.open(path)) == read.to_pylist()


# Properties.

NUMBERS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint8(), st.integers(0, 255)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.bool_(), st.booleans()),
]
LEAVES = [*NUMBERS, (pa.string(), st.text(max_size=5)), (pa.binary(), st.binary(max_size=5))]


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    shape = draw(
        st.sampled_from(["leaf", "list", "fixed", "fixed in list", "list in list", "struct", "dictionary"])
    )
    kind, values = draw(st.sampled_from(LEAVES if shape in ("leaf", "struct", "dictionary") else NUMBERS))
    if shape == "list":
        return pa.list_(kind), st.lists(values, max_size=4)
    if shape == "fixed":
        return pa.list_(kind, 3), st.lists(values, min_size=3, max_size=3)
    if shape == "fixed in list":
        return pa.list_(pa.list_(kind, 2)), st.lists(st.lists(values, min_size=2, max_size=2), max_size=3)
    if shape == "list in list":
        return pa.list_(pa.list_(kind)), st.lists(st.lists(values, max_size=2), max_size=3)
    if shape == "struct":
        return pa.struct({"p": kind}), st.fixed_dictionaries({"p": values})
    return kind, values


@settings(max_examples=40)
@given(data=st.data())
def test_any_schema_in_any_row_groups_reads_as_pyarrow_reads_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = data.draw(st.integers(1, 12))
    table = {}
    for number in range(data.draw(st.integers(1, 3))):
        kind, values = data.draw(columns())
        table[f"c{number}"] = pa.array(data.draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    path = tmp_path_factory.mktemp("any") / "t.parquet"
    write(
        pa.table(table),
        path,
        row_group_size=data.draw(st.integers(1, 12)),
        use_dictionary=data.draw(st.booleans()),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        compression=data.draw(st.sampled_from(["none", "snappy", "zstd"])),
        store_schema=data.draw(st.booleans()) or any(pa.types.is_list(c.type) for c in table.values()),
    )
    source = rf.open(path)
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=20))
    expected = expected_of(pq.read_table(path))
    assert samples_of(source, ids) == [expected[each] for each in ids]
    assert source.blocks.sum() == rows


# Damage.

FUZZED = ["id", "real", "text", "tokens", "kind", "inner", "pair"]


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for _ in range(count):
        bad = bytearray(content)
        start = footer if rng.random() < 0.5 else 4
        place = int(rng.integers(start, len(bad)))
        what = rng.integers(0, 5)
        if what <= 1:
            bad[place] ^= 1 << int(rng.integers(0, 8))
        elif what == 2:
            bad[place] = int(rng.integers(0, 256))
        elif what == 3:
            size = int(rng.integers(1, 40))
            bad[place : place + size] = bad[place - size : place]
        else:
            del bad[place : place + int(rng.integers(1, 20))]
        yield bytes(bad)


def _try_all(path: str, content: bytes, seed: int, count: int, results: Any) -> None:
    wrong, refused = 0, 0
    for bad in mutations(content, seed, count):
        Path(path).write_bytes(bad)
        try:
            rows = samples_of(ParquetSource(path))
        except RankfeedError:
            refused += 1
            continue
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        intact = bad[footer:] == content[footer:]
        # Pages have checksums, the footer has none: behind a footer that is as it was, no other row is delivered.
        wrong += intact and rows != expected_of(table_of(60).select(FUZZED))
    results.put((wrong, refused))


def test_damaged_bytes_are_refused_or_do_no_harm(tmp_path: Path) -> None:
    path = write(table_of(60).select(FUZZED), tmp_path / "t.parquet", row_group_size=25)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[int, int]] = context.Queue()
    seed = int.from_bytes(os.urandom(4), "little") if not os.environ.get("CI") else 1
    child = context.Process(target=_try_all, args=(str(path), path.read_bytes(), seed, 300, results), daemon=True)
    child.start()
    child.join(600)
    assert child.exitcode == 0, f"seed {seed}: the process ended with {child.exitcode}"
    wrong, refused = results.get(timeout=600)
    assert wrong == 0, f"seed {seed}"
    assert refused > 100


@pytest.mark.parametrize("groups", [1, 2])
def test_a_damaged_dictionary_header_gives_no_index_beyond_the_dictionary(tmp_path: Path, groups: int) -> None:
    table = pa.table({"kind": pa.array(["cat", "dog"] * 10 + ["bird"] * 20).dictionary_encode()})
    path = write(table, tmp_path / "t.parquet", row_group_size=40 // groups)
    content, column = path.read_bytes(), pq.read_metadata(path).row_group(0).column(0)
    start, end = column.dictionary_page_offset, column.data_page_offset
    expected, refused = table["kind"].to_pylist(), 0
    for place, bit in itertools.product(range(start, end), range(8)):
        bad = bytearray(content)
        bad[place] ^= 1 << bit
        path.write_bytes(bad)
        try:
            assert [row["kind"] for row in samples_of(ParquetSource(path))] == expected
        except RankfeedError:
            refused += 1
    assert refused


# Small row groups.


def test_small_row_groups_are_decoded_together_and_stay_blocks(tmp_path: Path) -> None:
    source = ParquetSource(write(table_of(500), tmp_path / "t.parquet", row_group_size=5))
    assert source.blocks.tolist() == [5] * 100
    assert len(source._parts) == 1
    assert samples_of(source) == expected_of(table_of(500))


def test_damage_of_a_small_row_group_is_not_its_neighbours(tmp_path: Path) -> None:
    path = write(pa.table({"x": range(50)}), tmp_path / "t.parquet", row_group_size=5, use_dictionary=False)
    chunk = pq.read_metadata(path).row_group(3).column(0)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    source = rf.open(path)
    whole = [each for each in range(50) if each // 5 != 3]
    assert [row["x"] for row in samples_of(source, whole)] == whole
    with pytest.raises(CorruptError, match=r"t\.parquet, row group 3[\s\S]*'x'"):
        source.fetch([15])


def test_a_flipped_bit_in_list_levels_damages_only_its_own_row_group(tmp_path: Path) -> None:
    rows = [list(range(i, i + i % 4)) for i in range(60)]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    path = write(
        table,
        tmp_path / "t.parquet",
        row_group_size=20,
        compression="none",
        use_dictionary=False,
        write_page_checksum=False,
    )
    content = path.read_bytes()
    page = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    refused: Counter[str] = Counter()
    for byte in range(page, page + 70):  # the page's header, and its levels
        bad = bytearray(content)
        bad[byte] ^= 1
        path.write_bytes(bad)
        source = rf.open(path)
        assert [row["tokens"] for row in samples_of(source, range(20, 60))] == rows[20:], byte
        try:
            source.fetch(range(20))
        except RankfeedError as caught:
            error = caught
        else:
            continue
        refused[error.summary] += 1
        assert "row group 0" in str(error.where)
        if refused[error.summary] == 1:
            assert verify_data(path, resume=False).sound is False, error
    # One row too many, and one too few.
    assert refused["the lists of a column are damaged: they hold another number of values than the footer says"]
    assert refused["a row group has another number of rows than its footer says"]


def test_parts_fit_into_a_small_cache(tmp_path: Path) -> None:
    path = write(pa.table({"x": np.arange(1 << 20)}), tmp_path / "t.parquet")  # 8 MiB in one row group
    source = ParquetSource(path, cache_bytes=4 << 20)
    assert 128 <= len(source._parts) <= 160  # of 64 KiB
    assert len(ParquetSource(path, cache_bytes=16 << 20)._parts) <= 2  # nothing has to be evicted
    assert source.fingerprint == ParquetSource(path).fingerprint
    assert source.blocks.tolist() == [1 << 20]
    with pytest.raises(ArgumentError, match="cache_bytes"):
        ParquetSource(path, cache_bytes="1G")  # type: ignore[arg-type]


def test_no_rows_are_read_where_the_first_row_group_has_none(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.int64())])) as writer:
        for rows in (0, 1 << 20):
            writer.write_table(pa.table({"x": np.arange(rows)}), row_group_size=1 << 20)
    source = ParquetSource(path, cache_bytes=4 << 20)
    assert source._parts[0].rows == 0  # too much follows for one part
    assert source.fetch([]).num_rows == 0
    assert samples_of(source, [5]) == [{"x": 5}]


def test_long_texts_that_come_again_and_again_are_decoded_in_parts(tmp_path: Path) -> None:
    rows = 300_000
    table = pa.table(
        {"text": pa.DictionaryArray.from_arrays(np.arange(rows) // 7 % 10, [f"{i}" * 1000 for i in range(10)])}
    )
    path = write(table, tmp_path / "t.parquet", store_schema=False)
    assert path.stat().st_size < 1 << 20  # 300 MB of text
    source = ParquetSource(path, cache_bytes=8 << 20)
    assert source.fetch([rows // 2])["text"].rows() == [str(rows // 2 // 7 % 10) * 1000]
    assert source._cache._bytes < 8 << 20
    assert source.blocks.tolist() == ParquetSource(path).blocks.tolist() == [rows]
    assert len(ParquetSource(path)._parts) == 2


def test_a_tensors_shape_comes_through(tmp_path: Path) -> None:
    tensors = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = write(pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)}), tmp_path / "t.parquet")
    np.testing.assert_array_equal(rf.open(path)[1]["t"], tensors[1])


@pytest.mark.parametrize("container", ["t.parquet", "t.arrow", "t.feather", "hf", "packed"])
def test_a_tensor_with_a_permutation_has_its_logical_shape(container: str, tmp_path: Path) -> None:
    expected, columns = {}, {}
    for axes in itertools.permutations(range(3)):
        name = "".join(map(str, axes))
        kind = pa.fixed_shape_tensor(pa.float32(), [3, 4, 5], permutation=axes)
        stored = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
        storage = pa.FixedSizeListArray.from_arrays(stored.reshape(-1), 60)
        columns[name] = pa.ExtensionArray.from_storage(kind, storage)
        expected[name] = stored.transpose(0, *(1 + axis for axis in axes))
        if axes not in ((1, 2, 0), (2, 0, 1)):  # of these, pyarrow 26 computes strides by which elements overlap
            np.testing.assert_array_equal(columns[name].to_numpy_ndarray(), expected[name])
    lists = pa.ListArray.from_arrays(pa.array([0, 0, 2], pa.int32()), columns["102"])
    table = pa.table({**columns, "list": lists, "in": pa.StructArray.from_arrays([columns["210"]], ["t"])})
    path = tmp_path / container
    if container == "t.parquet":
        pq.write_table(table, path)
    elif container == "t.feather":
        pa.feather.write_feather(table, path, compression="zstd")
    elif container == "t.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.mkdir()
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as writer:
            writer.write_table(table)
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0"}')
        (path / "dataset_info.json").write_text("{}")
    source = rf.open(path)
    if container == "packed":
        source = rf.write(source, tmp_path / "packed-rows", progress=False)
    for row in (0, 1):
        sample = source[row]
        for name, tensors in expected.items():
            np.testing.assert_array_equal(sample[name], tensors[row])
        np.testing.assert_array_equal(sample["in.t"], expected["210"][row])
        np.testing.assert_array_equal(sample["list"], expected["102"][: 2 * row])


# Values that come again and again take next to nothing in a file: only the rows asked for may be made of them.


LONG = ["ab" * 41_500, "cd" * 41_000]
EACH = 3_000_000  # times 83 KB: 250 GB, more than any machine of ours has


def repeated() -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(np.arange(EACH) % 2, pa.int32()), LONG)


@pytest.mark.parametrize("container", ["t.parquet", "text.parquet", "t.arrow", "t.feather", "hf"])
def test_a_row_of_a_dictionary_column_does_not_decode_all_rows(container: str, tmp_path: Path) -> None:
    table = pa.table({"text": repeated()})
    path = tmp_path / container
    if container.endswith("parquet"):
        pq.write_table(table, path, row_group_size=EACH, store_schema=container == "t.parquet")
        assert path.stat().st_size < 100_000
    elif container == "t.feather":
        pa.feather.write_feather(table, path, compression="zstd", chunksize=EACH)
    elif container == "t.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.mkdir()
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as writer:
            writer.write_table(table)
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0"}')
        (path / "dataset_info.json").write_text("{}")
    source = rf.open(path)
    before = pa.total_allocated_bytes()

    def last_and_first() -> tuple[list[str], int]:
        return [row["text"] for row in source.fetch([EACH - 1, 0]).samples()], pa.total_allocated_bytes() - before

    most, (found, kept) = peak(last_and_first)
    assert found == LONG[::-1]
    assert most + kept < 200 << 20


def test_lists_of_text_in_a_dictionary_are_made_of_the_rows_asked_for(tmp_path: Path) -> None:
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, EACH + 1, 10), pa.int32()), repeated())
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"texts": lists}), path, row_group_size=EACH, store_schema=False)
    assert rf.open(path)[EACH // 10 - 1]["texts"] == LONG * 5


def test_lists_of_equal_numbers_are_decoded_in_parts(tmp_path: Path) -> None:
    rows = 20_000
    masks = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * 2048), pa.array(np.ones(rows * 2048, np.int8))
    ).cast(pa.list_(pa.int32()))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"mask": masks}), path, row_group_size=rows)
    assert path.stat().st_size < 20_000
    del masks
    before = pa.total_allocated_bytes()
    source = rf.open(path, cache_bytes=16 << 20)
    np.testing.assert_array_equal(source[rows // 2]["mask"], np.ones(2048, np.int32))
    assert pa.total_allocated_bytes() - before < 64 << 20  # of 160 MB


# Columns that share a name.


NAMELESS = {
    "fields of one struct": pa.table(
        {"s": pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["a", "a"]), "ok": [7, 8]}
    ),
    "columns": pa.table([pa.array([1, 2]), pa.array([3, 4]), pa.array([7, 8])], ["a", "a", "ok"]),
    "a struct and a column": pa.table({"a.b": [1, 2], "a": [{"b": 1}, {"b": 2}], "ok": [7, 8]}),
    "one without a name": pa.table({"": [1, 2], "unnamed": [1, 2], "ok": [7, 8]}),
}


@pytest.mark.parametrize("container", ["t.parquet", "t.arrow", "t.feather", "hf", "t.lance", "t.csv"])
@pytest.mark.parametrize("what", list(NAMELESS))
def test_columns_of_one_name_are_left_out_with_columns(what: str, container: str, tmp_path: Path) -> None:
    table = NAMELESS[what]
    path = tmp_path / container
    if container == "t.parquet":
        pq.write_table(table, path)
    elif container == "t.feather":
        pa.feather.write_feather(table, path, compression="zstd")
    elif container == "t.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif container == "t.csv":
        if "struct" in what:
            return  # there are none
        pa.csv.write_csv(table, path)
    elif container == "t.lance":
        if what in ("columns", "a struct and a column"):
            return  # Lance refuses to write these
        lance.write_dataset(table, path)
    else:
        path.mkdir()
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as writer:
            writer.write_table(table)
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0"}')
        (path / "dataset_info.json").write_text("{}")
    with pytest.raises(SourceError, match=r"one name[\s\S]*columns=") as caught:
        rf.open(path)
    assert not isinstance(caught.value, CorruptError)
    assert rf.open(path, columns=["ok"])[1] == {"ok": 8}


def test_a_lance_column_without_a_name_is_refused_or_left_out(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"": [1, 2], "ok": [7, 8]}), tmp_path / "t.lance")
    with pytest.raises(SourceError, match=r"without a name[\s\S]*columns=") as caught:
        rf.open(tmp_path / "t.lance")
    assert not isinstance(caught.value, CorruptError)
    assert rf.open(tmp_path / "t.lance", columns=["ok"])[1] == {"ok": 8}


# Rows of hundreds of kilobytes, of which a page or a dictionary has all of a row group.

LARGE_ROWS, LARGE_ROW = 240, 128 << 10


def large_rows(kind: str) -> pa.Table:
    rng = np.random.default_rng(3)
    raw = [rng.bytes(LARGE_ROW) for _ in range(LARGE_ROWS)]
    if kind == "bytes":
        column = pa.array(raw, pa.binary())
    elif kind == "text":
        column = pa.array([each[: LARGE_ROW // 2].hex() for each in raw])
    else:
        values = pa.array(np.frombuffer(b"".join(raw), np.int32))
        size = LARGE_ROW // 4
        if kind == "lists":
            column = pa.ListArray.from_arrays(np.arange(LARGE_ROWS + 1, dtype=np.int32) * size, values)
        else:
            column = pa.FixedSizeListArray.from_arrays(values, size)
        if kind == "nested":
            column = pa.StructArray.from_arrays([column, pa.array(range(LARGE_ROWS))], ["x", "y"])
    return pa.table({"id": range(LARGE_ROWS), "x": column})


def first_bytes(value: Any) -> bytes:
    """The first and last bytes of a value, and its size."""
    raw = value.encode() if isinstance(value, str) else bytes(np.asarray(value).data)
    return raw[:8] + raw[-8:] + len(raw).to_bytes(4, "little")


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often each row group was read from its start, by number."""
    counts: Counter[tuple[int, ...]] = Counter()
    read = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        counts[tuple(options["row_groups"])] += 1
        return read(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    return counts


@pytest.mark.parametrize("kind", ["bytes", "text", "lists", "fixed", "nested"])
@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_a_row_group_of_large_rows_is_decoded_once_for_any_order(
    kind: str, shuffle: Any, tmp_path: Path, decodes: Counter[tuple[int, ...]]
) -> None:
    table = large_rows(kind)
    path = write(table, tmp_path / "t.parquet")
    source = rf.open(path)
    name = "x.x" if kind == "nested" else "x"
    expected = [row[name] for row in expected_of(table.select(["x"]))]
    for number, workers in enumerate((0, 2)):
        seen: list[int] = []
        fresh = pickle.loads(pickle.dumps(source))
        loader = rf.Loader(fresh, 8, shuffle=shuffle, num_workers=workers, ragged="list", topology=rf.Topology())
        for batch in loader:
            ids = batch["id"].tolist()
            seen += ids
            if number == 0:
                wanted = [
                    first_bytes(np.asarray(expected[i], np.int32) if kind[0] in "lfn" else expected[i])
                    for i in ids
                ]
                assert [first_bytes(value) for value in batch[name]] == wanted
        assert Counter(seen) == Counter(range(LARGE_ROWS))
    # One more batch of some columns is read first, to see how large their values are.
    assert decodes[0,] <= 2 * (1 if kind in ("bytes", "text") else 2)


def test_threads_that_begin_together_decode_a_row_group_once(
    tmp_path: Path, decodes: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = parquet_rows.ParquetReader.__init__

    def slow(*args: Any) -> None:  # so that all threads read before a reader exists that one of them opens
        time.sleep(0.05)
        opened(*args)

    monkeypatch.setattr(parquet_rows.ParquetReader, "__init__", slow)
    path = write(large_rows("bytes"), tmp_path / "t.parquet")
    source, begin = pickle.loads(pickle.dumps(rf.open(path))), threading.Barrier(4)

    def read(first: int) -> None:
        begin.wait(60)
        source.fetch(range(first, first + 8))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(0, LARGE_ROWS, LARGE_ROWS // 4)))
    assert decodes[0,] == 1


@pytest.mark.parametrize("kind", ["bytes", "lists", "fixed"])
def test_large_rows_of_a_row_group_are_decoded_once_in_order(
    kind: str, tmp_path: Path, decodes: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = parquet_rows.ParquetReader._next

    def slow(*args: Any) -> Any:  # so that the next part is requested while this one is decoded
        time.sleep(0.02)
        return read(*args)

    monkeypatch.setattr(parquet_rows.ParquetReader, "_next", slow)
    path = write(large_rows(kind), tmp_path / "t.parquet", use_dictionary=False)
    source = rf.open(path, cache_bytes=64 << 20)
    for batch in rf.Loader(source, 8, ragged="list", topology=rf.Topology()):
        assert len(batch["id"]) == 8
    # The first row of lists that differ in length is read before, to see how large they are.
    assert decodes[0,] == (2 if kind == "lists" else 1)


@pytest.mark.parametrize("kind", ["bytes", "lists"])
@pytest.mark.parametrize("shuffle", [True, "global"])
def test_a_row_group_larger_than_the_cache_is_decoded_a_few_times(
    kind: str, shuffle: Any, tmp_path: Path, decodes: Counter[tuple[int, ...]]
) -> None:
    path = write(large_rows(kind), tmp_path / "t.parquet")
    source = rf.open(path, cache_bytes=8 << 20)  # of 30 MiB
    for epoch in range(2):
        loader = rf.Loader(source, 8, shuffle=shuffle, seed=epoch, ragged="list", topology=rf.Topology())
        assert Counter(i for batch in loader for i in batch["id"].tolist()) == Counter(range(LARGE_ROWS))
        assert source._cache._bytes <= 8 << 20  # type: ignore[attr-defined]
    assert decodes[0,] <= 2 * 12


def test_single_large_rows_are_kept_on_the_way_to_others(
    tmp_path: Path, decodes: Counter[tuple[int, ...]]
) -> None:
    path = write(large_rows("bytes"), tmp_path / "t.parquet")
    source = rf.open(path)
    for row in np.random.default_rng(0).permutation(LARGE_ROWS).tolist():
        assert source[row]["id"] == row
    assert decodes[0,] <= 8


def test_large_rows_of_several_row_groups_are_read_by_workers(tmp_path: Path) -> None:
    path = write(large_rows("bytes"), tmp_path / "t.parquet", row_group_size=LARGE_ROWS // 3)
    source = rf.open(path, cache_bytes=8 << 20)
    for options in ({"num_workers": 3}, {"num_workers": 2, "worker_kind": "process"}):
        loader = rf.Loader(source, 8, shuffle=True, topology=rf.Topology(), **options)  # type: ignore[arg-type]
        assert Counter(i for batch in loader for i in batch["id"].tolist()) == Counter(range(LARGE_ROWS))


def test_damage_among_large_rows_is_an_error_for_all_and_no_wrong_row(tmp_path: Path) -> None:
    table = large_rows("bytes")
    path = write(table, tmp_path / "t.parquet", row_group_size=LARGE_ROWS // 2, use_dictionary=False)
    column = pq.read_metadata(path).row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 100] ^= 1
    path.write_bytes(content)
    source = rf.open(path)
    rows = source.fetch(range(LARGE_ROWS // 2), ["x"])["x"].rows()
    assert rows == table["x"].to_pylist()[: LARGE_ROWS // 2]
    with pytest.raises(CorruptError, match=r"t\.parquet, row group 1[\s\S]*'x'"):
        source.fetch([LARGE_ROWS - 1])
    assert source.fetch([LARGE_ROWS - 1], ["id"])["id"].rows() == [LARGE_ROWS - 1]


@pytest.mark.parametrize("expanding", [False, True])
def test_text_stays_a_dictionary_only_if_that_is_smaller(expanding: bool, tmp_path: Path) -> None:
    values = [f"{i}" * 2500 for i in range(4000)]
    rows = [values[i % 20] for i in range(40_000)] if expanding else values
    path = write(pa.table({"text": rows}), tmp_path / "t.parquet", store_schema=False)
    source = rf.open(path, cache_bytes=8 << 20)
    for ids in ([0, len(rows) - 1], range(100, 300)):
        assert source.fetch(ids)["text"].rows() == [rows[i] for i in ids]
    chunks = [entry.chunk["text"] for entry in source._cache._entries.values()]  # type: ignore[attr-defined]
    assert all((chunk.index is not None) == expanding for chunk in chunks)


PEAK = """
import sys, tracemalloc, pyarrow as pa, pyarrow.parquet as pq
path, mode, cache = sys.argv[1], sys.argv[2], int(sys.argv[3])
if mode == "pyarrow":
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    rows = sum(len(batch) for batch in file.iter_batches(8, use_threads=False))
else:
    import rankfeed as rf
    source = rf.open(path, cache_bytes=cache)
    list(rf.Loader(source.select([0]), 1, topology=rf.Topology()))  # imports what it needs
    tracemalloc.start()
    shuffle = {"order": False, "global": "global"}[mode]
    rows = sum(len(batch["x"]) for batch in rf.Loader(source, 8, shuffle=shuffle, topology=rf.Topology()))
arrays = tracemalloc.get_traced_memory()[1]
print(rows, pa.default_memory_pool().max_memory() + arrays)
"""


def peak_of(path: Path, mode: str, cache_bytes: int = 0) -> int:
    """Bytes that Arrow and numpy hold at most while a file is read, in a process of its own."""
    command = [sys.executable, "-c", PEAK, str(path), mode, str(cache_bytes)]
    rows, nbytes = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    assert int(rows) == LARGE_ROWS
    return int(nbytes)


@pytest.mark.parametrize("kind", ["bytes", "lists"])
def test_large_rows_take_the_cache_besides_what_pyarrow_needs(kind: str, tmp_path: Path) -> None:
    path = write(large_rows(kind), tmp_path / "t.parquet")
    cache_bytes, batches = 8 << 20, 4 * 8 * LARGE_ROW  # two that are decoded, and two of the loader
    needed = peak_of(path, "pyarrow")
    assert peak_of(path, "order", cache_bytes) <= needed + cache_bytes + batches
    # Several row groups, or places in one, are kept open if their pages are small.
    cursors = 0 if kind == "bytes" else cache_bytes
    assert peak_of(path, "global", cache_bytes) <= needed + cursors + cache_bytes + batches
    # What fits into the cache with what pyarrow needs stays below the cache in order.
    in_order = peak_of(path, "order", 2 * needed)
    assert in_order <= 2 * needed + batches
