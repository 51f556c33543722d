"""Parquet is read as its own libraries read it, in any order; damage is an error that names the place."""

import itertools
import pickle
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
from tests.sources.all_types import as_samples, table_of_all_types
from tests.support.jobs import run_python
from tests.support.memory import peak
from tests.support.tables import write_table
from tests.support.values import plain, samples_of

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.diagnostics import verify_data
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError
from rankfeed.sources.parquet import parquet_source, reader
from rankfeed.sources.parquet.parquet_source import ParquetSource

ROWS = 700


def write(table: pa.Table, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **{"write_page_checksum": True, **options})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with row groups of unequal sizes, an empty one among them; 700 rows."""
    folder = tmp_path_factory.mktemp("data")
    write(table_of_all_types(300), folder / "part-2.parquet", row_group_size=70)
    with pq.ParquetWriter(
        folder / "part-9.parquet", table_of_all_types(1).schema, write_page_checksum=True
    ) as writer:
        for rows, start in ((1, 300), (0, 301), (199, 301)):
            writer.write_table(table_of_all_types(rows, start))
    options: dict[str, Any] = {"row_group_size": 64, "compression": "zstd", "data_page_size": 512}
    write(table_of_all_types(200, 500), folder / "part-10.parquet", **options)
    for hidden in ("_metadata-of-no-use.parquet", ".hidden.parquet"):
        write(table_of_all_types(5), folder / hidden)
    return folder


@pytest.mark.parametrize(
    ("cache_bytes", "are_cut"),
    [
        (30_000, True),
        (1 << 30, False),
        *(pytest.param(0, are_cut, marks=pytest.mark.slow) for are_cut in (True, False)),
        pytest.param(1 << 30, True, marks=pytest.mark.slow),
        pytest.param(30_000, False, marks=pytest.mark.slow),
    ],
)
def test_samples_are_what_pyarrow_reads_in_any_order(
    cache_bytes: int, are_cut: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_cut:  # row groups
        monkeypatch.setattr(parquet_source, "_PART_BYTES", 2000)
    source = ParquetSource(folder, cache_bytes=cache_bytes)
    assert source.blocks.tolist() == [70, 70, 70, 70, 20, 1, 0, 199, 64, 64, 64, 8]
    expected = as_samples(pa.concat_tables(pq.read_table(folder / f"part-{part}.parquet") for part in (2, 9, 10)))
    assert expected == as_samples(table_of_all_types(ROWS))
    assert samples_of(source) == expected
    rng = np.random.default_rng(cache_bytes)
    for order in (rng.permutation(ROWS)[:200], np.arange(ROWS)[::-1], rng.integers(0, ROWS, 200), np.full(3, 699)):
        for start in range(0, len(order), 97):
            ids = order[start : start + 97]
            assert samples_of(source, ids) == [expected[row] for row in ids]


def damaged(path: Path, group: int, column: int) -> Path:
    """Flip a bit near the end of a column of a row group."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(content)
    return path


def test_columns_that_are_not_requested_may_be_damaged(tmp_path: Path) -> None:
    table = table_of_all_types(50).select(["n", "text", "pair"])
    path = damaged(write(table, tmp_path / "t.parquet", use_dictionary=False), 0, 1)
    assert samples_of(rf.open(path, columns=["pair.a", "n"]), [49]) == [{"pair.a": 49, "n": -49}]
    with pytest.raises(CorruptError, match=r"t\.parquet, row group 0"):
        rf.open(path)[0]


# Partitions.


def test_hive_partition_folders_are_columns(tmp_path: Path) -> None:
    table = pa.table({"x": range(60), "year": [2020 + i % 3 for i in range(60)], "what": ["a b/c", "ü"] * 30})
    pa.dataset.write_dataset(
        table, tmp_path / "hive", format="parquet", partitioning=["year", "what"], partitioning_flavor="hive"
    )
    source = rf.open(tmp_path / "hive")
    assert source.fields == {"x": Field("dense", "int64"), "year": Field("dense", "int64"), "what": Field("str")}
    result = Counter((row["x"], row["year"], row["what"]) for row in samples_of(source))
    assert result == Counter((row["x"], row["year"], row["what"]) for row in table.to_pylist())
    one = sorted((tmp_path / "hive" / "year=2021").rglob("*.parquet"))
    assert set(np.unique(rf.open([str(path) for path in one]).fetch([0, 1])["year"].gather())) == {2021}
    assert list(rf.open(tmp_path / "hive", columns=["year"])[0]) == ["year"]


def test_a_column_that_contradicts_its_partition_folder_is_an_error(tmp_path: Path) -> None:
    write(pa.table({"x": [1], "k": [5]}), tmp_path / "k=5" / "a.parquet")
    write(pa.table({"x": [2], "k": [7]}), tmp_path / "k=6" / "a.parquet")
    source = rf.open(tmp_path)
    assert samples_of(source, [0]) == [{"x": 1, "k": 5}]
    with pytest.raises(SourceError, match=r"'k' contradicts its folder[\s\S]*k=6"):
        source.fetch([1])
    assert samples_of(rf.open(tmp_path, columns=["x"])) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_a_text_column_of_any_type_that_contradicts_its_partition_is_an_error(kind: Any, tmp_path: Path) -> None:
    for key in ("a", "b"):
        table = pa.table({"x": [1, 2], "k": pa.array(["a", None], pa.string()).cast(kind)})
        write(table, tmp_path / f"k={key}" / "a.parquet")
    source = rf.open(tmp_path, nulls="mask")
    assert samples_of(source, [0])[0]["k"] in ("a", b"a")
    with pytest.raises(SourceError, match=r"'k' contradicts its folder[\s\S]*k=b"):
        source.fetch([2])


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a=1", "b=1"], r"keys of their folders[\s\S]*a=1[\s\S]*b=1"),
        (["k=1/k=2"], r"\A(?!files differ)[\s\S]*same column[\s\S]*k=1, k=2[\s\S]*a\.parquet[\s\S]*below"),
        (["y=01", "y=1"], r"same value of column 'y'[\s\S]*y=01 and y=1[\s\S]*rename"),
    ],
)
def test_contradictory_partition_folders_are_refused(folders: list[str], message: str, tmp_path: Path) -> None:
    for folder in folders:
        write(pa.table({"x": [1]}), tmp_path / folder / "a.parquet")
    with pytest.raises(SourceError, match=message):
        rf.open(tmp_path)


def test_partition_keys_are_those_below_the_opened_path_and_may_be_padded_numbers(tmp_path: Path) -> None:
    for month in ("01", "02"):
        write(pa.table({"x": [1]}), tmp_path / "m=7" / f"m={month}" / "a.parquet")
    assert samples_of(rf.open(tmp_path / "m=7")) == [{"x": 1, "m": 1}, {"x": 1, "m": 2}]


@pytest.mark.parametrize("key", [5, "e"])
def test_a_null_in_a_column_named_as_its_partition_is_an_error_for_its_row(key: Any, tmp_path: Path) -> None:
    write(pa.table({"x": [1, 2, 3], "k": [key, None, key]}), tmp_path / f"k={key}" / "a.parquet")
    source = rf.open(tmp_path)
    assert samples_of(source, [2, 0]) == [{"x": 3, "k": key}, {"x": 1, "k": key}]
    with pytest.raises(SourceError, match=r"null[\s\S]*row 1, column 'k'"):
        source.fetch([1])


def test_the_hive_partition_for_nulls_is_an_error_or_masked(tmp_path: Path) -> None:
    write(pa.table({"x": [1]}), tmp_path / "a=3" / "a.parquet")
    write(pa.table({"x": [2]}), tmp_path / "a=__HIVE_DEFAULT_PARTITION__" / "a.parquet")
    source = rf.open(tmp_path)
    with pytest.raises(SourceError, match=r"'a' is null[\s\S]*__HIVE[\s\S]*mask"):
        source.fetch([0, 1])
    masked = samples_of(rf.open(tmp_path, nulls="mask"))
    assert [(row["a"], row["a_valid"]) for row in masked] == [(3, True), (0, False)]


@pytest.mark.parametrize("log", ["_delta_log/", ".hoodie/", "metadata/v1.metadata.json"])
def test_delta_hudi_and_iceberg_tables_are_refused(log: str, tmp_path: Path) -> None:
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


# Through loaders, in other threads and processes.


def test_each_row_group_is_decoded_once_for_rows_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_source, "_PART_BYTES", 2000)
    opened: list[Any] = []
    open_cursor = reader.ParquetReader._open_cursor

    def counted(self: Any, part: Any, *others: Any) -> Any:
        if part.step > 1:  # not the first row, which is read to see how large rows are
            opened.append(part)
        return open_cursor(self, part, *others)

    monkeypatch.setattr(reader.ParquetReader, "_open_cursor", counted)
    source = ParquetSource(folder / "part-2.parquet", cache_bytes=0)
    assert len(source._parts) >= 4 * len(source.blocks)
    for start in range(0, 300, 10):
        source.fetch(range(start, start + 10))
    assert len(opened) == np.count_nonzero(source.blocks)


def test_open_cursors_of_a_wide_file_hold_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_CURSORS", 4)
    rows, columns = 20_000, 16
    table = pa.table({f"c{column}": np.arange(rows) for column in range(columns)})
    path = write(table, tmp_path / "t.parquet", row_group_size=rows // 2, compression=None, use_dictionary=False)
    before = pa.total_allocated_bytes()
    source = ParquetSource(path, cache_bytes=1 << 20)
    for first in [*range(0, rows, rows // 20)][::-1]:  # each of them opens a cursor, in two row groups
        source.fetch([first])
    assert len(source._reader._cursors) == 4
    assert pa.total_allocated_bytes() - before < (4 << 20) + 4 * columns * (200 << 10)


def test_the_memory_of_cursors_is_counted_while_other_threads_end_row_groups(tmp_path: Path) -> None:
    groups, rows = 100, 12_000
    table = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 60, groups * rows)})
    path = write(table, tmp_path / "t.parquet", row_group_size=rows, compression=None, use_dictionary=False)
    source = ParquetSource(path, cache_bytes=1 << 20)
    source.fetch(range(0, 60 * rows, rows))  # each of them begins a row group
    is_done = threading.Event()
    assert len(source._reader._cursors) == 60
    sizes = []

    def count() -> None:
        while not is_done.is_set():
            sizes.append(source._reader.nbytes)

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
def test_list_columns_are_read_in_any_column_order(columns: tuple[str, ...], tmp_path: Path) -> None:
    write(LISTS, tmp_path / "a.parquet")
    write(LISTS.select(LISTS.column_names[::-1]), tmp_path / "b.parquet")
    expected = as_samples(LISTS) * 2
    names = [name for column in columns for name in (["s.p", "s.q"] if column == "s" else [column])]
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


def test_a_footer_with_a_list_longer_than_itself_is_an_error(tmp_path: Path) -> None:
    # Thrift's compact protocol: field 2 (the schema) is a list of 2**31 - 1 structs.
    footer = bytes([0x15, 0x02, 0x19, 0xFC, 0xFF, 0xFF, 0xFF, 0xFF, 0x07])
    path = tmp_path / "bomb.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(CorruptError, match=r"bomb\.parquet"):
        rf.open(path)


@pytest.mark.parametrize(
    ("kind", "group_rows", "group"), [("small", 50, 1), ("small", 5, 3), ("large", 120, 1)], ids=str
)
def test_a_flipped_bit_is_an_error_of_its_own_row_group_and_column(
    kind: str, group_rows: int, group: int, tmp_path: Path
) -> None:
    table = pa.table({"id": range(100), "x": range(100)}) if kind == "small" else large_rows("bytes")
    path = write(table, tmp_path / "t.parquet", row_group_size=group_rows, use_dictionary=False)
    source = rf.open(damaged(path, group, 1))
    wrong = range(group * group_rows, (group + 1) * group_rows)
    others = [row for row in range(table.num_rows) if row not in wrong]
    assert source.fetch(others)["x"].rows() == table["x"].take(others).to_pylist()
    with pytest.raises(CorruptError, match=rf"t\.parquet, row group {group}[\s\S]*'x'"):
        source.fetch([wrong[-1]])
    assert source.fetch([wrong[-1]], ["id"])["id"].rows() == [wrong[-1]]


def test_an_encrypted_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    content = write(table_of_all_types(3), path).read_bytes()
    path.write_bytes(b"PARE" + content[4:-4] + b"PARE")
    with pytest.raises(SourceError, match=r"encrypted[\s\S]*e\.parquet[\s\S]*decrypt"):
        rf.open(path)


def test_a_metadata_file_of_other_files_is_skipped_in_a_folder_and_refused_by_itself(tmp_path: Path) -> None:
    metadata: list[Any] = []
    table = pa.table({"id": range(5)})
    pq.write_table(table, tmp_path / "a.parquet", metadata_collector=metadata)
    metadata[0].set_file_path("a.parquet")
    pq.write_metadata(table.schema, tmp_path / "_metadata", metadata_collector=metadata)
    assert samples_of(rf.open(tmp_path), [4]) == [{"id": 4}]
    with pytest.raises(SourceError, match=r"row groups of other files[\s\S]*_metadata[\s\S]*open its folder"):
        rf.open(tmp_path / "_metadata")


def test_120_files_are_read_and_one_with_a_damaged_footer_is_an_error_that_names_it(tmp_path: Path) -> None:
    content = write(pa.table({"x": [1, 2]}), tmp_path / "0.parquet").read_bytes()
    for index in range(1, 120):
        (tmp_path / f"{index}.parquet").write_bytes(content)
    assert len(rf.open(tmp_path)) == 240
    assert rf.open(tmp_path).blocks.tolist() == [2] * 120
    (tmp_path / "77.parquet").write_bytes(content[:-1])
    with pytest.raises(CorruptError, match=r"/77\.parquet"):
        rf.open(tmp_path)


# Other writers.


def test_files_of_polars_and_duckdb_are_read_as_they_read_them(tmp_path: Path) -> None:
    lists = [[float(j) for j in range(i % 4)] for i in range(500)]
    rows = [{"i": i, "f": i / 3, "s": f"s{i % 9}", "l": lists[i], "c": f"c{i % 3}"} for i in range(500)]
    frame = pl.DataFrame(rows).with_columns(pl.col("c").cast(pl.Categorical))
    frame.write_parquet(tmp_path / "polars.parquet", row_group_size=130)
    plain_frame = pl.DataFrame(rows).to_arrow()
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
    for index in range(data.draw(st.integers(1, 3))):
        kind, values = data.draw(columns())
        table[f"c{index}"] = pa.array(data.draw(st.lists(values, min_size=rows, max_size=rows)), kind)
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
    expected = as_samples(pq.read_table(path))
    assert samples_of(source, ids) == [expected[sample_id] for sample_id in ids]
    assert source.blocks.sum() == rows


# Damage.


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_a_dictionary_header_gives_an_error_or_right_values(tmp_path: Path, groups: int) -> None:
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


#: A page of which each bit of the header and of the levels counts.
PLAIN: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_page_checksum": False}


def flip_bits_of_levels(path: Path, column: int) -> Iterator[int]:
    """Flip a bit in one byte after the other of the first page of a column: in its header, and its levels."""
    content = path.read_bytes()
    page = pq.read_metadata(path).row_group(0).column(column).data_page_offset
    for byte in range(page, page + 70):
        bad = bytearray(content)
        bad[byte] ^= 1
        path.write_bytes(bad)
        yield byte


def test_small_row_groups_are_decoded_together_and_stay_blocks(tmp_path: Path) -> None:
    source = ParquetSource(write(table_of_all_types(500), tmp_path / "t.parquet", row_group_size=5))
    assert source.blocks.tolist() == [5] * 100
    assert len(source._parts) == 1
    assert samples_of(source) == as_samples(table_of_all_types(500))


def test_a_list_column_with_damaged_levels_is_an_error_that_names_that_column(tmp_path: Path) -> None:
    rows = [list(range(i % 4)) for i in range(40)]
    table = pa.table({"a": pa.array(rows, pa.list_(pa.int32())), "b": pa.array(rows[::-1], pa.list_(pa.int32()))})
    path = write(table, tmp_path / "t.parquet", **PLAIN)
    refused: set[str] = set()
    for _ in flip_bits_of_levels(path, 1):
        for columns in (["a", "b"], ["b", "a"]):
            source = rf.open(path, columns=columns)
            try:
                source.fetch(range(40))
            except RankfeedError as error:
                refused.add(f"{columns[0]} {error.summary} {str(error.where).rpartition(' ')[2]}")
    for first in "ab":
        assert any(
            item.startswith(first) and "another number of values" in item and "'b" in item for item in refused
        )
    assert not any(item.endswith(("'a.list.element'", "'a'")) for item in refused)


def test_a_flipped_bit_in_list_levels_damages_only_its_own_row_group(tmp_path: Path) -> None:
    rows = [list(range(i, i + i % 4)) for i in range(60)]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    path = write(table, tmp_path / "t.parquet", row_group_size=20, **PLAIN)
    refused: Counter[str] = Counter()
    for byte in flip_bits_of_levels(path, 0):
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


def test_the_parts_of_a_row_group_fit_into_a_small_cache(tmp_path: Path) -> None:
    path = write(pa.table({"x": np.arange(1 << 20)}), tmp_path / "t.parquet")  # 8 MiB in one row group
    source = ParquetSource(path, cache_bytes=4 << 20)
    assert 128 <= len(source._parts) <= 160  # of 64 KiB
    assert len(ParquetSource(path, cache_bytes=16 << 20)._parts) <= 2  # nothing has to be evicted
    assert source.fingerprint == ParquetSource(path).fingerprint
    assert source.blocks.tolist() == [1 << 20]
    with pytest.raises(ArgumentError, match="cache_bytes"):
        ParquetSource(path, cache_bytes="1G")  # type: ignore[arg-type]


def test_a_file_whose_first_row_group_is_empty_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.int64())])) as writer:
        for rows in (0, 1 << 20):
            writer.write_table(pa.table({"x": np.arange(rows)}), row_group_size=1 << 20)
    source = ParquetSource(path, cache_bytes=4 << 20)
    assert source._parts[0].rows == 0  # too much follows for one part
    assert source.fetch([]).num_rows == 0
    assert samples_of(source, [5]) == [{"x": 5}]


def test_repeated_long_texts_are_decoded_in_parts_within_the_cache(tmp_path: Path) -> None:
    rows = 300_000
    text = pa.DictionaryArray.from_arrays(np.arange(rows) // 7 % 10, [f"{i}" * 1000 for i in range(10)])
    path = write(pa.table({"text": text}), tmp_path / "t.parquet", store_schema=False)
    assert path.stat().st_size < 1 << 20  # 300 MB of text
    source = ParquetSource(path, cache_bytes=8 << 20)
    assert source.fetch([rows // 2])["text"].rows() == [str(rows // 2 // 7 % 10) * 1000]
    assert source._cache._bytes < 8 << 20
    assert source.blocks.tolist() == ParquetSource(path).blocks.tolist() == [rows]
    assert len(ParquetSource(path)._parts) == 2


@pytest.mark.parametrize("container", ["t.parquet", "t.arrow", "t.feather", "t.hf", "packed"])
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
    source = rf.open(write_table(table, tmp_path / ("t.parquet" if container == "packed" else container)))
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
REPEATED_ROWS = 3_000_000  # times 83 KB: 250 GB, more than any machine of ours has


def repeated() -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(np.arange(REPEATED_ROWS) % 2, pa.int32()), LONG)


@pytest.mark.parametrize("container", ["t.parquet", "text.parquet", "t.arrow", "t.feather", "t.hf"])
def test_reading_two_rows_of_a_dictionary_column_does_not_decode_all_rows(container: str, tmp_path: Path) -> None:
    table = pa.table({"text": repeated()})
    parquet = {"row_group_size": REPEATED_ROWS, "store_schema": container == "t.parquet"}
    path = write_table(table, tmp_path / container, **(parquet if container.endswith("parquet") else {}))
    assert path.stat().st_size < 100_000 or not container.endswith("parquet")
    source = rf.open(path)
    before = pa.total_allocated_bytes()

    def last_and_first() -> tuple[list[str], int]:
        return source.fetch([REPEATED_ROWS - 1, 0])["text"].rows(), pa.total_allocated_bytes() - before

    most, (result, kept) = peak(last_and_first)
    assert result == LONG[::-1]
    assert most + kept < 200 << 20


def test_a_row_of_a_list_column_of_dictionary_text_is_read_without_the_other_rows(tmp_path: Path) -> None:
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, REPEATED_ROWS + 1, 10), pa.int32()), repeated())
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"texts": lists}), path, row_group_size=REPEATED_ROWS, store_schema=False)
    assert rf.open(path)[REPEATED_ROWS // 10 - 1]["texts"] == LONG * 5


def test_lists_of_equal_numbers_are_decoded_in_parts(tmp_path: Path) -> None:
    rows = 20_000
    masks = pa.ListArray.from_arrays(
        pa.array(np.arange(rows + 1, dtype=np.int32) * 2048), pa.array(np.ones(rows * 2048, np.int8))
    ).cast(pa.list_(pa.int32()))
    path = write(pa.table({"mask": masks}), tmp_path / "t.parquet", row_group_size=rows)
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


#: What the library of a format does not write.
UNWRITABLE = {"t.csv": "struct", "t.lance": "column"}


@pytest.mark.parametrize(
    ("container", "duplicate"),
    [
        # To open a Lance table starts a process.
        pytest.param(container, duplicate, marks=pytest.mark.slow if container == "t.lance" else ())
        for container in ("t.parquet", "t.arrow", "t.feather", "t.hf", "t.lance", "t.csv")
        for duplicate in NAMELESS
        if UNWRITABLE.get(container, "nothing") not in duplicate
    ],
)
def test_columns_of_one_name_are_an_error_unless_left_out(container: str, duplicate: str, tmp_path: Path) -> None:
    path = write_table(NAMELESS[duplicate], tmp_path / container)
    with pytest.raises(SourceError, match=r"one name[\s\S]*columns=") as caught:
        rf.open(path)
    assert not isinstance(caught.value, CorruptError)
    assert rf.open(path, columns=["ok"])[1] == {"ok": 8}


def test_a_lance_column_without_a_name_is_an_error_unless_left_out_with_columns(tmp_path: Path) -> None:
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
        column = pa.array([item[: LARGE_ROW // 2].hex() for item in raw])
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


@pytest.mark.parametrize(
    ("kind", "shuffle", "cache_bytes", "decodings"),
    [
        ("text", True, None, 2),
        ("bytes", False, None, 2),
        ("bytes", True, None, 2),
        # One more batch of these columns is read first, to see how large their values are.
        *(pytest.param(kind, True, None, 4, marks=pytest.mark.slow) for kind in ("fixed", "nested")),
        ("lists", "global", None, 4),
        # The row group has 30 MiB.
        ("bytes", True, 8 << 20, 24),
        pytest.param("lists", "global", 8 << 20, 24, marks=pytest.mark.slow),
    ],
)
def test_a_row_group_of_large_rows_is_decoded_few_times_for_any_order(
    kind: str, shuffle: Any, cache_bytes: int | None, decodings: int, tmp_path: Path, decodes: Counter[Any]
) -> None:
    table = large_rows(kind)
    options: dict[str, Any] = {"cache_bytes": cache_bytes} if cache_bytes else {}
    source = rf.open(write(table, tmp_path / "t.parquet"), **options)
    name = "x.x" if kind == "nested" else "x"
    expected = [row[name] for row in as_samples(table.select(["x"]))]
    for workers in (0, 0 if cache_bytes else 2):
        seen: list[int] = []
        fresh = pickle.loads(pickle.dumps(source))
        loader = rf.Loader(fresh, 8, shuffle=shuffle, num_workers=workers, ragged="list", topology=rf.Topology())
        for batch in loader:
            ids = batch["id"].tolist()
            seen += ids
            if workers == 0:
                rows = [np.asarray(expected[i], np.int32) if kind[0] in "lfn" else expected[i] for i in ids]
                assert list(map(first_bytes, batch[name])) == list(map(first_bytes, rows))
        assert Counter(seen) == Counter(range(LARGE_ROWS))
        assert fresh._cache._bytes <= (cache_bytes or 1 << 40)
    assert decodes[0,] <= decodings


def test_threads_that_start_reading_together_decode_a_row_group_once(
    tmp_path: Path, decodes: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = reader.ParquetReader.__init__

    def slow(*args: Any) -> None:  # so that all threads read before a reader exists that one of them opens
        time.sleep(0.05)
        opened(*args)

    monkeypatch.setattr(reader.ParquetReader, "__init__", slow)
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
    read = reader.ParquetReader._next

    def slow(*args: Any) -> Any:  # so that the next part is requested while this one is decoded
        time.sleep(0.02)
        return read(*args)

    monkeypatch.setattr(reader.ParquetReader, "_next", slow)
    path = write(large_rows(kind), tmp_path / "t.parquet", use_dictionary=False)
    source = rf.open(path, cache_bytes=64 << 20)
    for batch in rf.Loader(source, 8, ragged="list", topology=rf.Topology()):
        assert len(batch["id"]) == 8
    # The first row of lists that differ in length is read before, to see how large they are.
    assert decodes[0,] == (2 if kind == "lists" else 1)


def test_large_rows_in_random_order_are_decoded_few_times(tmp_path: Path, decodes: Counter[Any]) -> None:
    source = rf.open(write(large_rows("bytes"), tmp_path / "t.parquet"))
    for row in np.random.default_rng(0).permutation(LARGE_ROWS).tolist():
        assert source[row]["id"] == row
    assert decodes[0,] <= 8


@pytest.mark.parametrize("expanding", [False, True])
def test_cached_text_stays_a_dictionary_only_if_that_is_smaller(expanding: bool, tmp_path: Path) -> None:
    values = [f"{i}" * 2500 for i in range(4000)]
    rows = [values[i % 20] for i in range(40_000)] if expanding else values
    path = write(pa.table({"text": rows}), tmp_path / "t.parquet", store_schema=False)
    source = rf.open(path, cache_bytes=8 << 20)
    for ids in ([0, len(rows) - 1], range(100, 300)):
        assert source.fetch(ids)["text"].rows() == [rows[i] for i in ids]
    chunks = [entry.chunk["text"] for entry in source._cache._entries.values()]  # type: ignore[attr-defined]
    assert all((chunk.index is not None) == expanding for chunk in chunks)


PEAKS = """
import os, sys, tracemalloc, pyarrow as pa, pyarrow.parquet as pq
import rankfeed as rf
pools = []
path, cache = sys.argv[1], int(sys.argv[2])

def by_pyarrow(cache):
    file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    return sum(len(batch) for batch in file.iter_batches(8, use_threads=False))

def by_loader(cache, shuffle=False):
    source = rf.open(path, cache_bytes=cache)
    return sum(len(batch["x"]) for batch in rf.Loader(source, 8, shuffle=shuffle, topology=rf.Topology()))

def peak(read, *arguments):
    "Bytes that Arrow and numpy hold at most meanwhile."
    pools.append(pa.proxy_memory_pool(pa.system_memory_pool()))  # kept for buffers that outlive the reading
    pa.set_memory_pool(pools[-1])
    tracemalloc.start()
    rows = read(*arguments)
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == ROWS, rows
    return pools[-1].max_memory() + arrays

list(rf.Loader(rf.open(path).select([0]), 1, topology=rf.Topology()))  # imports what it needs
needed = peak(by_pyarrow, 0)
print(needed, peak(by_loader, cache), peak(by_loader, cache, "global"), peak(by_loader, 2 * needed), flush=True)
os._exit(0)  # buffers of a pool must not be freed after it
""".replace("ROWS", str(LARGE_ROWS))


@pytest.mark.parametrize("kind", ["bytes", pytest.param("lists", marks=pytest.mark.slow)])
def test_large_rows_take_at_most_the_cache_besides_what_pyarrow_needs(kind: str, tmp_path: Path) -> None:
    path = write(large_rows(kind), tmp_path / "t.parquet")
    cache_bytes, batches = 8 << 20, 4 * 8 * LARGE_ROW  # two that are decoded, and two of the loader
    needed, in_order, shuffled, in_order_with_all_pages = map(int, run_python(PEAKS, path, cache_bytes).split())
    assert in_order <= needed + cache_bytes + batches
    # Several row groups, or places in one, are kept open if their pages are small.
    assert shuffled <= needed + (0 if kind == "bytes" else cache_bytes) + cache_bytes + batches
    # What fits into the cache with what pyarrow needs stays below the cache in order.
    assert in_order_with_all_pages <= 2 * needed + batches
