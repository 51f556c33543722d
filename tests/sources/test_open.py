"""What lies at a path is found by looking; where there is nothing to read, it says why."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.jobs import run_python
from tests.support.tables import write_table
from tests.support.tar import write_tar
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.formats import FORMATS, detect_format
from rankfeed.sources.npy.rows import NumpyRowsSource
from rankfeed.sources.npy.samples import NumpySamplesSource
from rankfeed.sources.packed import PackedSource


def test_open_detects_packed_and_numpy_data_or_uses_the_given_format(tmp_path: Path) -> None:
    rf.write([{"x": 1}], tmp_path / "packed", progress=False)
    (tmp_path / "files").mkdir()
    for index in range(2):
        np.save(tmp_path / "files" / f"a{index}.npy", np.zeros(3))
    assert isinstance(rf.open(tmp_path / "packed"), PackedSource)
    assert isinstance(rf.open(str(tmp_path / "packed"), format="packed"), PackedSource)
    assert isinstance(rf.open(tmp_path / "files"), NumpySamplesSource)
    assert isinstance(rf.open(tmp_path / "files" / "a0.npy"), NumpyRowsSource)
    assert isinstance(rf.open([tmp_path / "files" / "a1.npy"], layout="samples"), NumpySamplesSource)
    with pytest.raises(SourceError):
        rf.open(tmp_path / "files", format="packed")


def test_a_broken_link_among_tar_shards_raises_and_parquet_beside_them_is_not_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"url": ["u"]}), tmp_path / "0.parquet")  # as img2dataset writes beside its shards
    write_tar(tmp_path / "0.tar", {"a.bin": b""})
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
def test_the_error_for_a_path_without_data_names_it_and_the_reason(make: Any, said: str, tmp_path: Path) -> None:
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
        ([], SourceError, "not all of one known format"),
    ],
    ids=str,
)
def test_the_error_names_missing_files(where: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(error, match=message):
        rf.open(f"{tmp_path}/{where}" if isinstance(where, str) else [tmp_path / name for name in where])


def test_urls_of_object_stores_and_storage_options_are_not_supported(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not supported yet"):
        rf.open("s3://bucket/data")
    with pytest.raises(ArgumentError, match="not supported yet"):
        rf.open(tmp_path, storage_options={"region": "x"})


@pytest.mark.parametrize("path", [".", "absent"])
def test_an_unknown_format_raises_argument_error_whether_the_path_exists_or_not(path: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"invalid format[\s\S]*'packed' \| 'numpy' \| 'lance'[\s\S]*excel"):
        rf.open(tmp_path / path, format="excel")


def test_the_error_for_an_unknown_option_lists_the_options_of_the_format(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=r"nulls[\s\S]*filter"):
        rf.open(tmp_path / "a.parquet", filter="x > 1")
    rf.write([{"x": 1}], tmp_path / "packed", progress=False)
    with pytest.raises(ArgumentError, match=r"no options[\s\S]*nulls"):
        rf.open(tmp_path / "packed", nulls="mask")


def test_every_format_has_a_description_and_is_not_detected_in_noise_or_empty_places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    places: list[Any] = [str(tmp_path / "empty"), str(tmp_path / "noise"), f"{tmp_path}/*", [], [str(tmp_path)]]
    for name, result in FORMATS.items():
        assert result.description
        assert not any(detect_format(place, name) for place in places), name


@pytest.mark.parametrize("package", ["npy", "parquet", "text", "tar"])
def test_opening_imports_only_the_reader_of_the_detected_format(package: str, tmp_path: Path) -> None:
    np.save(tmp_path / "npy", np.zeros(3))
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    write_tar(tmp_path / "a.tar", {"0.txt": b"text"})
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


def test_the_internal_option_of_unpickling_is_refused_by_open(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.pt", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(ArgumentError, match="no such option"):
        rf.open(tmp_path / "data.pt", files=["data.pt"])


# Files that differ.


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather", "csv", "jsonl"])
def test_files_may_differ_in_columns_that_are_not_requested(suffix: str, tmp_path: Path) -> None:
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
def test_files_may_differ_in_fields_of_a_struct_that_are_not_requested(suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"s": [{"x": 1, "y": 2}]}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"s": [{"y": "two", "x": 3}]}), tmp_path / f"b.{suffix}")
    assert [sample["s.x"] for sample in rf.open(tmp_path, columns=["s.x"])] == [1, 3]
    with pytest.raises(SourceError, match=r"differ in column 's.y'[\s\S]*a\.[\s\S]*b\."):
        rf.open(tmp_path, columns=["s.y"])


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_the_error_for_a_file_with_only_empty_untyped_lists_names_a_remedy(suffix: str, tmp_path: Path) -> None:
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
def test_errors_for_unequal_columns_name_both_files(other: Any, column: str, suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"x": [1], "y": [1.0]}), tmp_path / f"a.{suffix}")
    write_table(pa.table(other), tmp_path / f"b.{suffix}")
    with pytest.raises(SourceError, match=rf"differ in column '{column}'[\s\S]*a\.{suffix}[\s\S]*b\.{suffix}"):
        rf.open(tmp_path)


@pytest.mark.parametrize("text", ["x,z\n1,2\n", "x,y\n1,text\n", "x\n1\n"])
def test_the_error_for_unequal_columns_of_text_files_names_both_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(SourceError, match=r"differ in their columns[\s\S]*a\.csv[\s\S]*b\.csv"):
        rf.open(tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_files_with_columns_in_other_order_and_arrow_layout_are_one_dataset(suffix: str, tmp_path: Path) -> None:
    text, lists = pa.array(["b", "c"]), pa.array([[2], [3]], pa.large_list(pa.int64()))
    write_table(pa.table({"t": ["a"], "l": [[1, 2]]}), tmp_path / f"a.{suffix}")
    write_table(pa.table({"l": lists, "t": text.dictionary_encode()}), tmp_path / f"b.{suffix}")
    expected = [{"t": "a", "l": [1, 2]}, {"t": "b", "l": [2]}, {"t": "c", "l": [3]}]
    assert samples_of(rf.open(tmp_path)) == expected


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "feather", "csv"])
def test_a_file_without_rows_raises_source_error(suffix: str, tmp_path: Path) -> None:
    write_table(pa.table({"x": [1]}).slice(1), tmp_path / f"empty.{suffix}")
    with pytest.raises(SourceError, match=rf"no samples[\s\S]*empty\.{suffix}"):
        rf.open(tmp_path / f"empty.{suffix}")
