"""Names in data lead nowhere else; links on disk are followed for reading, and nothing is written through one."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from tests.support.tables import write_table
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed.errors import PrepareError, SourceError, UnsafeError, WriteError

ROWS = 6


def write_shard(path: Path) -> Path:
    return write_tar(path, {f"{row}.cls": b"%d" % row for row in range(ROWS)})


def wids(folder: Path, name: str, **more: Any) -> Path:
    write_shard(folder / "s.tar")
    path = folder / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": name, "nsamples": ROWS}]} | more))
    return path


def energon(folder: Path, name: str, *, split: bool = False) -> Path:
    write_shard(folder / "s.tar")
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {name: ROWS}}))
    if split:
        (folder / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": {"train": [name]}}))
    return folder


def packed(folder: Path, name: str) -> Path:
    rf.write([{"x": 1}] * ROWS, folder / "p", progress=False)
    manifest = json.loads((folder / "p" / "rankfeed.json").read_text())
    manifest["shards"][0]["path"] = name
    (folder / "p" / "rankfeed.json").write_text(json.dumps(manifest))
    return folder / "p"


def mds(folder: Path, name: str, *, samples: int = ROWS) -> Path:
    columns = {"column_names": ["x"], "column_encodings": ["int"], "column_sizes": [8]}
    shard = {
        "format": "mds",
        "version": 2,
        "samples": samples,
        "raw_data": {"basename": name, "bytes": 10},
        **columns,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


def huggingface(folder: Path, name: str) -> Path:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def huggingface_split(folder: Path, name: str) -> Path:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    return folder


def tar_member(folder: Path, name: str) -> Path:
    return write_tar(folder / "a.tar", {f"{name}.x": b""})


def npz(folder: Path, name: str) -> Path:
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        content = io.BytesIO()
        np.save(content, np.arange(ROWS))
        archive.writestr(f"{name}.npy", content.getvalue())
    return path


WRITERS: dict[str, Callable[[Path, str], Path]] = {
    "packed": packed,
    "wids": wids,
    "wids base": lambda folder, name: wids(folder, "s.tar", datasets=[
        {"base": name, "shardlist": [{"url": "s.tar", "nsamples": ROWS}]}
    ], shardlist=[]),
    "wids behind a base": lambda folder, name: wids(folder, name, base="."),
    "energon": energon,
    "energon split": lambda folder, name: energon(folder, name, split=True),
    "mds": mds,
    "mds without samples": lambda folder, name: mds(folder, name, samples=0),
    "huggingface": huggingface,
    "huggingface split": huggingface_split,
    "tar": tar_member,
    "npz": npz,
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_names_in_data_that_lead_outside_of_them_raise_unsafe_error(writer: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shard(other / "s.tar")
    for index, name in enumerate(
        (f"{other}/s.tar", f"file://{other}/s.tar", "../other/s.tar", "a/../../other/s.tar", "s3://b/s.tar",
         "http:/h/s.tar", "pipe:cat s.tar", "C:/s.tar", "\\\\host\\s.tar", "a\\..\\..\\s.tar")
    ):  # fmt: skip
        folder = tmp_path / f"data{index}"
        folder.mkdir()
        with pytest.raises(UnsafeError, match=r"leads outside[\s\S]*where: .*data") as caught:
            rf.open(WRITERS[writer](folder, name))
        assert caught.value.remedy
    assert [path.name for path in other.iterdir()] == ["s.tar"]


@pytest.mark.parametrize("name", ["plain", "sub/plain", "./plain", "a..b", "a:b", "x\\y"])
def test_names_with_subfolders_dots_colons_and_backslashes_are_accepted(name: str, tmp_path: Path) -> None:
    for writer in (tar_member, npz):
        (tmp_path / writer.__name__).mkdir()
        assert len(rf.open(writer(tmp_path / writer.__name__, name))) in (1, ROWS)


def test_tar_indexes_are_never_written_through_symlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other, data = tmp_path / "other", tmp_path / "data"
    data.mkdir()
    write_shard(other / "s.tar")
    (other / "secret").write_text("secret")
    (data / "sub").symlink_to(other)
    path = data / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": "sub/s.tar", "nsamples": ROWS}]}))
    assert len(rf.open(path)) == ROWS
    assert sorted(item.name for item in other.iterdir()) == ["s.tar", "secret"]

    write_shard(data / "a.tar")
    (data / "a.tar.rankfeed").symlink_to(other / "secret")
    assert len(rf.open(data / "a.tar")) == ROWS
    assert not (data / "a.tar.rankfeed").is_symlink()
    (data / ".rankfeed-index.lock").unlink()
    (data / "a.tar.rankfeed").unlink()
    (data / ".rankfeed-index.lock").symlink_to(other / "secret")
    with pytest.raises(SourceError, match=r"indexes in \S* cannot be written[\s\S]*\.rankfeed-index\.lock"):
        rf.open(data / "a.tar")
    assert (other / "secret").read_text() == "secret"


def test_write_and_prepare_once_refuse_staging_folders_that_are_symbolic_links(tmp_path: Path) -> None:
    other, data = tmp_path / "other", tmp_path / "data"
    other.mkdir()
    rf.write([{"x": 1}], data, progress=False)
    (data / ".rankfeed-write").symlink_to(other)
    with pytest.raises(WriteError, match=r"symbolic link[\s\S]*\.rankfeed-write"):
        rf.write([{"x": 2}], data, append=True, key="new", progress=False)
    (tmp_path / ".made.prepare").symlink_to(other)
    with pytest.raises(PrepareError, match=r"\.made\.prepare"):
        rf.prepare_once(tmp_path / "made", lambda staging: (staging / "a").write_text("a"))
    assert not list(other.iterdir())


@pytest.mark.parametrize("end", ["staged", "shard"])
def test_a_commit_journal_with_paths_outside_of_its_folder_raises_unsafe_error(end: str, tmp_path: Path) -> None:
    rf.write([{"x": 1}], tmp_path / "data", progress=False)
    staging = tmp_path / "data" / ".rankfeed-write"
    staging.mkdir()
    (staging / "job.json").write_text("x")
    manifest = json.loads((tmp_path / "data" / "rankfeed.json").read_text())
    (tmp_path / "secret").write_bytes(bytes(manifest["shards"][0]["bytes"]))
    new = {**manifest["shards"][0], "path": "../stolen" if end == "shard" else "new.arrow"}
    manifest["shards"].append(new)
    manifest["num_rows"] += 1
    staged = "x.arrow" if end == "shard" else "../../secret"
    (staging / "x.arrow").write_bytes(bytes(new["bytes"]))
    (staging / "commit.json").write_text(json.dumps({"manifest": manifest, "staged": [staged]}))
    with pytest.raises(UnsafeError, match=r"leads outside[\s\S]*commit\.json"):
        rf.write([{"x": 2}], tmp_path / "data", append=True, key="new", progress=False)
    assert (tmp_path / "secret").exists()
    assert not (tmp_path / "stolen").exists()


def test_a_shallow_clone_of_a_lance_table_raises_unsafe_error(tmp_path: Path) -> None:
    table = lance.write_dataset(pa.table({"x": [1, 2]}), tmp_path / "other.lance")
    table.shallow_clone(str(tmp_path / "clone.lance"), table.version)
    with pytest.raises(UnsafeError, match=r"shallow clone[\s\S]*clone\.lance[\s\S]*deep_clone"):
        rf.open(tmp_path / "clone.lance")


@pytest.mark.parametrize("suffix", ["npy", "tar", "parquet", "arrow"])
def test_a_broken_symbolic_link_among_the_files_raises_source_error(suffix: str, tmp_path: Path) -> None:
    """A file of a hub cache that was not downloaded: its samples would be missing."""
    for index in range(2):
        path = tmp_path / f"{index}.{suffix}"
        if suffix == "npy":
            np.save(path, np.arange(index + 1))
        else:
            write_table(pa.table({"x": [1]}), path)
    assert len(rf.open(tmp_path)) > 1
    (tmp_path / f"2.{suffix}").symlink_to("../blobs/7f")
    with pytest.raises(SourceError, match=rf"is broken[\s\S]*blobs/7f[\s\S]*2\.{suffix}"):
        rf.open(tmp_path)


@pytest.mark.parametrize("path", ["é" * 200, "a/" * 3000 + "b", "é" * 127 + "x.npy"], ids=len)
def test_a_path_longer_than_the_file_system_allows_raises_no_such_file(path: str) -> None:
    with pytest.raises(SourceError, match="no such file"):
        rf.open(path)
