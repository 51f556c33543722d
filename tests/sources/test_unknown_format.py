"""The error for data in no known format names what is there, and how to read it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.sources.mds import streaming_mds
from tests.support.tables import write_table
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x89PNG\r\n")
    return folder


def refused(where: Any, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        rf.open(where, **options)
    assert caught.value.remedy
    return caught.value


def test_the_remedy_for_images_in_class_folders_is_image_folder_of_torchvision(tmp_path: Path) -> None:
    touch(tmp_path, "cats/0.png", "cats/1.png", "dogs/0.JPEG")
    error = refused(tmp_path)
    assert error.found == "cats, dogs; .png files in subfolders"
    assert f"rankfeed.from_dataset(torchvision.datasets.ImageFolder('{tmp_path}'" in str(error.remedy)
    assert refused(tmp_path, format="parquet").remedy == error.remedy


def test_the_remedy_for_images_in_splits_reads_the_train_split(tmp_path: Path) -> None:
    touch(tmp_path, *(f"{split}/{kind}/0.jpg" for split in ("val", "train") for kind in ("cats", "dogs")))
    assert f"ImageFolder('{tmp_path / 'train'}'" in str(refused(tmp_path).remedy)


@pytest.mark.parametrize("names", [("0.png", "1.png"), ("train/0.png", "val/0.png"), ("images/0.png", "readme")])
def test_the_remedy_for_images_without_classes_is_a_dataset(names: tuple[str, ...], tmp_path: Path) -> None:
    remedy = str(refused(touch(tmp_path, *names)).remedy)
    assert "rankfeed.from_dataset(dataset)" in remedy
    assert "ImageFolder" not in remedy


def test_the_remedy_for_text_files_writes_their_lines_as_samples(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("first\nsecond\n")
    for where in (tmp_path, tmp_path / "0.txt", f"{tmp_path}/*.txt", [tmp_path / "0.txt", tmp_path / "0.txt"]):
        assert "rankfeed.from_dataset(dataset)" in str(refused(where).remedy)
    remedy, names = str(refused(tmp_path).remedy), {"write": rf.write, "target": tmp_path / "texts"}
    call = remedy[remedy.index("write(") :].replace('"texts"', "target")
    with (tmp_path / "0.txt").open() as file:
        eval(call, {**names, "file": file})  # noqa: S307
    assert [row["text"] for row in rf.open(tmp_path / "texts").fetch([0, 1]).samples()] == ["first\n", "second\n"]


@pytest.mark.parametrize(
    ("format", "write"),
    [
        ("packed", lambda folder: rf.write([{"x": 1}], folder, progress=False)),
        ("arrow", lambda folder: write_table(pa.table({"x": [1]}), folder / "0.feather")),
        ("csv", lambda folder: (folder / "0.csv").write_text("x\n1\n")),
        ("jsonl", lambda folder: (folder / "0.jsonl").write_text('{"x": 1}\n')),
        ("webdataset", lambda folder: write_tar(folder / "0.tar", {"0.txt": b"a"})),
        ("mds", lambda folder: streaming_mds.write(folder, {"x": "int"}, [{"x": 1}])),
    ],
)
def test_the_error_for_a_folder_of_splits_shows_how_to_open_one(format: str, write: Any, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write(tmp_path / split)
    for options in ({}, {"format": format}, {"split": "train"}, {"split": "test"}):
        error = refused(tmp_path, **options)
        assert error.found == f"train ({format}), val ({format})"
        assert f"rankfeed.open('{tmp_path / 'train'}')" in str(error.remedy)


def test_the_remedy_for_splits_of_npy_files_names_the_folder_of_a_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / "0.npy", np.arange(3))
    remedy = str(refused(tmp_path).remedy)
    assert repr(str(tmp_path / "train")) in remedy
    assert repr(f"{tmp_path}/*.npy") not in remedy  # no file is there


def test_the_split_option_of_mds_raises_argument_error_that_names_the_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        streaming_mds.write(tmp_path / split, {"x": "int"}, [{"x": 1}])
    streaming_mds.merge_index(str(tmp_path))
    with pytest.raises(ArgumentError, match=rf"opened by its path: {tmp_path}/train, {tmp_path}/val"):
        rf.open(tmp_path, split="train")
    with pytest.raises(ArgumentError, match="leave split out"):
        rf.open(tmp_path / "train", split="train")
    assert len(rf.open(tmp_path)) == 2


def test_the_remedy_for_mds_shards_without_an_index_names_index_json(tmp_path: Path) -> None:
    folder = streaming_mds.write(tmp_path / "data", {"x": "int"}, [{"x": 1}])
    (folder / "index.json").unlink()
    for where in (folder, folder / "shard.00000.mds", f"{folder}/*.mds"):
        assert "index.json" in str(refused(where).remedy)
        assert "index.json" in str(refused(where, format="mds").remedy)


def test_the_remedy_for_a_csv_beside_a_readme_is_a_pattern_that_opens_it(tmp_path: Path) -> None:
    folder = touch(tmp_path / "run[1]{a,b}", "readme.md")
    (folder / "0.csv").write_text("x\n1\n")
    call = str(refused(folder).remedy).partition(": ")[2]
    assert len(eval(call, {"rankfeed": rf})) == 1  # noqa: S307


def test_the_remedy_for_a_wrong_format_argument_names_the_detected_format(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(3))
    for where in (tmp_path, tmp_path / "rows.npy"):
        assert "format='numpy'" in str(refused(where, format="parquet").remedy)


def test_the_remedy_for_a_folder_of_two_formats_is_a_pattern_for_each(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    error = refused(tmp_path)
    assert error.summary == "the files of the folder are not all of one format"
    for pattern in ("*.csv", "*.jsonl"):
        assert f"rankfeed.open({str(tmp_path / pattern)!r})" in str(error.remedy)
        assert len(rf.open(tmp_path / pattern)) == 1
