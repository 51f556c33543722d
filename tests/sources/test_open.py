"""What lies at a path is found by looking; where there is nothing to read, it says why."""

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.jobs import run_python
from tests.support.tables import write_table
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.formats import FORMATS, detect_format
from rankfeed.sources.npy.rows import NumpyRowsSource
from rankfeed.sources.npy.samples import NumpySamplesSource
from rankfeed.sources.packed import PackedSource


def test_the_format_is_found_by_looking(tmp_path: Path) -> None:
    rf.write([{"x": 1}], tmp_path / "packed", progress=False)
    (tmp_path / "files").mkdir()
    for number in range(2):
        np.save(tmp_path / "files" / f"a{number}.npy", np.zeros(3))
    assert isinstance(rf.open(tmp_path / "packed"), PackedSource)
    assert isinstance(rf.open(str(tmp_path / "packed"), format="packed"), PackedSource)
    assert isinstance(rf.open(tmp_path / "files"), NumpySamplesSource)
    assert isinstance(rf.open(tmp_path / "files" / "a0.npy"), NumpyRowsSource)
    assert isinstance(rf.open([tmp_path / "files" / "a1.npy"], layout="samples"), NumpySamplesSource)
    with pytest.raises(SourceError):
        rf.open(tmp_path / "files", format="packed")


def test_a_broken_shard_does_not_make_the_files_beside_it_the_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"url": ["u"]}), tmp_path / "0.parquet")  # as img2dataset writes beside its shards
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        tar.add(tmp_path / "0.parquet", "a.bin")
    assert rf.open(tmp_path)[0].keys() == {"__key__", "bin"}
    (tmp_path / "1.tar").symlink_to("gone.tar")
    with pytest.raises(SourceError, match="broken"):
        rf.open(tmp_path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "the folder is empty"),
        (lambda path: (path.mkdir(), (path / "a.txt").touch()), r"no data that rankfeed reads[\s\S]*a\.txt"),
        (lambda path: path.touch(), r"unknown format[\s\S]*rankfeed\.from_dataset"),
        (lambda path: (path / ".rankfeed-write").mkdir(parents=True), "was not finished"),
    ],
)
def test_where_there_is_nothing_to_read_it_says_why(make: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    make(path)
    with pytest.raises(SourceError, match=said) as caught:
        rf.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("*.npz", SourceError, r"no file matches the pattern[\s\S]*\*\.npz"),
        ("{a,b}.npy", SourceError, r"no such file[\s\S]*b\.npy"),
        ("a-{0..2}.npy", SourceError, r"no such file[\s\S]*a-0\.npy"),
        ("a-{0..99999999999}.npy", ArgumentError, "too many"),
        (["a.npy", "b.npy"], SourceError, r"no such file[\s\S]*b\.npy"),
        ([], SourceError, ""),
    ],
    ids=str,
)
def test_missing_files_are_named(where: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(error, match=message):
        rf.open(f"{tmp_path}/{where}" if isinstance(where, str) else [tmp_path / name for name in where])


def test_object_stores_are_refused_until_they_are_read(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not supported yet"):
        rf.open("s3://bucket/data")
    with pytest.raises(ArgumentError, match="not supported yet"):
        rf.open(tmp_path, storage_options={"region": "x"})


def test_an_unknown_format_is_an_argument_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'packed' \| 'numpy' \| 'lance'"):
        rf.open(tmp_path, format="excel")


def test_an_option_that_the_format_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=r"nulls[\s\S]*filter"):
        rf.open(tmp_path / "a.parquet", filter="x > 1")
    rf.write([{"x": 1}], tmp_path / "packed", progress=False)
    with pytest.raises(ArgumentError, match=r"no options[\s\S]*nulls"):
        rf.open(tmp_path / "packed", nulls="mask")


def test_every_format_says_what_it_is_and_looks_without_raising(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    places: list[Any] = [str(tmp_path / "empty"), str(tmp_path / "noise"), f"{tmp_path}/*", [], [str(tmp_path)]]
    for name, result in FORMATS.items():
        assert result.description
        assert not any(detect_format(place, name) for place in places), name


@pytest.mark.parametrize("package", ["npy", "parquet", "text", "tar"])
def test_opening_imports_the_reader_of_one_format(package: str, tmp_path: Path) -> None:
    """Detecting other formats looks at names and first bytes only."""
    np.save(tmp_path / "npy", np.zeros(3))
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(tmp_path / "a.csv", "0.txt")
    names = {"npy": "npy.npy", "parquet": "a.parquet", "text": "a.csv", "tar": "a.tar"}
    program = """if True:
        import sys
        import rankfeed as rf
        rf.open(sys.argv[1])[0]
        print(*[name for name in sys.modules if name == "pyarrow" or name.startswith("rankfeed.sources.")])"""
    modules = run_python(program, tmp_path / names[package]).split()
    assert ("pyarrow" in modules) == (package in ("parquet", "text"))
    parts = [name.split(".")[2:] for name in modules]
    readers = {part[0] for part in parts if len(part) == 2 and part[1] != "headers"}
    assert package in readers
    assert readers <= {package, "arrow"} | ({"npy"} if package == "tar" else set())  # of `.npy` members


def test_what_unpickling_passes_is_no_option(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.pt", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(ArgumentError, match="no such option"):
        rf.open(tmp_path / "data.pt", files=["data.pt"])


# Files that differ.


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather", "csv", "jsonl"])
def test_files_may_differ_in_columns_that_are_not_read(suffix: str, tmp_path: Path) -> None:
    plain = {"id": [0, 1], "x": [0.5, 1.5]}
    write_table(pa.table({**plain, "note": pa.nulls(2), "code": [7, 8]}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"code": ["p", "q"], "note": ["s", "t"], **plain}), tmp_path / f"b.{suffix}")
    write_table(pa.table({**plain, "more": [True, False]}), tmp_path / f"c.{suffix}")
    for columns in (["id", "x"], ["x", "id"]):
        source = rf.open(tmp_path, columns=columns)
        assert [sample["id"] for sample in source] == [0, 1] * 3
        assert [list(sample) for sample in source] == [columns] * 6
    with pytest.raises(SourceError, match=r"differ in [\s\S]*a\.[\s\S]*columns="):
        rf.open(tmp_path)
    with pytest.raises(SourceError, match=r"differ in [\s\S]*code[\s\S]*a\.[\s\S]*b\."):
        rf.open(tmp_path, columns=["id", "code"])


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_files_may_differ_in_fields_of_a_struct_that_are_not_read(suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"s": [{"x": 1, "y": 2}]}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"s": [{"y": "two", "x": 3}]}), tmp_path / f"b.{suffix}")
    assert [sample["s.x"] for sample in rf.open(tmp_path, columns=["s.x"])] == [1, 3]
    with pytest.raises(SourceError, match=r"differ in column 's.y'[\s\S]*a\.[\s\S]*b\."):
        rf.open(tmp_path, columns=["s.y"])


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_a_part_without_values_is_named_with_its_remedy(suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"id": [0], "tags": pa.array([[]], pa.list_(pa.null()))}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"id": [1], "tags": [["x"]]}), tmp_path / f"b.{suffix}")
    assert [sample["id"] for sample in rf.open(tmp_path, columns=["id"])] == [0, 1]
    for options in ({}, {"columns": ["tags"]}):
        message = r"'tags'[\s\S]*b\.[\s\S]*with one schema[\s\S]*columns=[\s\S]*without values"
        with pytest.raises(SourceError, match=message):
            rf.open(tmp_path, **options)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize(
    ("other", "column"),
    [
        ({"x": ["a"], "y": [1.0]}, "x"),
        ({"x": [1]}, "y"),
        ({"x": [1], "y": [1.0], "z": [1]}, "z"),
        ({"x": [1], "y": pa.array([1.0], pa.float32())}, "y"),
    ],
)
def test_files_of_unequal_columns_are_named_both(
    other: dict[str, Any], column: str, suffix: str, tmp_path: Path
) -> None:
    write_table(pa.table({"x": [1], "y": [1.0]}), tmp_path / f"a.{suffix}")
    write_table(pa.table(other), tmp_path / f"b.{suffix}")
    message = rf"differ in column '{column}'[\s\S]*a\.{suffix}[\s\S]*b\.{suffix}"
    with pytest.raises(SourceError, match=message):
        rf.open(tmp_path)


@pytest.mark.parametrize("text", ["x,z\n1,2\n", "x,y\n1,text\n", "x\n1\n"])
def test_text_files_of_unequal_columns_are_named_both(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(SourceError, match=r"differ in their columns[\s\S]*a\.csv[\s\S]*b\.csv"):
        rf.open(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_files_of_other_layouts_and_orders_of_columns_are_one_dataset(suffix: str, tmp_path: Path) -> None:
    text, lists = pa.array(["b", "c"]), pa.array([[2], [3]], pa.large_list(pa.int64()))
    write_table(pa.table({"t": ["a"], "l": [[1, 2]]}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"l": lists, "t": text.dictionary_encode()}), tmp_path / f"b.{suffix}")
    expected = [{"t": "a", "l": [1, 2]}, {"t": "b", "l": [2]}, {"t": "c", "l": [3]}]
    assert samples_of(rf.open(tmp_path)) == expected


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "feather", "csv"])
def test_a_file_without_rows_is_an_error(suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"x": [1]}).slice(1), tmp_path / f"empty.{suffix}")
    with pytest.raises(SourceError, match=rf"no samples[\s\S]*empty\.{suffix}"):
        rf.open(tmp_path / f"empty.{suffix}")


def test_an_unknown_format_is_reported_before_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)invalid format.*nosuch"):
        rf.open(tmp_path / "absent", format="nosuch")
