"""Names in data lead nowhere else; links on disk are followed for reading, and nothing is written through one."""

import hashlib
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sources.writers import FORMATS

import rankfeed as rf
from rankfeed.errors import UnsafeError

ROWS = 6


def write_tar(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for row in range(ROWS):
            info = tarfile.TarInfo(f"{row}.cls")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"%d" % row))
    return path


def wids(folder: Path, name: str, **more: Any) -> Path:
    write_tar(folder / "s.tar")
    path = folder / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": name, "nsamples": ROWS}]} | more))
    return path


def energon(folder: Path, name: str, *, split: bool = False) -> Path:
    write_tar(folder / "s.tar")
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {name: ROWS}}))
    if split:
        (folder / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": {"train": [name]}}))
    return folder


def packed(folder: Path, name: str) -> Path:
    rf.pack([{"x": 1}] * ROWS, folder / "p", progress=False)
    manifest = json.loads((folder / "p" / "rankfeed.json").read_text())
    manifest["shards"][0]["path"] = name
    (folder / "p" / "rankfeed.json").write_text(json.dumps(manifest))
    return folder / "p"


def mds(folder: Path, name: str, *, samples: int = ROWS) -> Path:
    shard = {
        "format": "mds",
        "version": 2,
        "samples": samples,
        "column_names": ["x"],
        "column_encodings": ["int"],
        "column_sizes": [8],
        "raw_data": {"basename": name, "bytes": 10},
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
    path = folder / "a.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(f"{name}.x"))
    return path


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
def test_names_that_lead_elsewhere_are_refused_and_nothing_is_written_there(writer: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tar(other / "s.tar")
    for number, name in enumerate(
        (f"{other}/s.tar", f"file://{other}/s.tar", "../other/s.tar", "a/../../other/s.tar", "s3://b/s.tar",
         "http:/h/s.tar", "pipe:cat s.tar", "C:/s.tar", "\\\\host\\s.tar", "..\\other\\s.tar")
    ):  # fmt: skip
        folder = tmp_path / f"data{number}"
        folder.mkdir()
        with pytest.raises(UnsafeError, match=r"leads outside[\s\S]*where: .*data") as caught:
            rf.open(WRITERS[writer](folder, name))
        assert caught.value.remedy
    assert [path.name for path in other.iterdir()] == ["s.tar"]


@pytest.mark.parametrize("name", ["plain", "sub/plain", "./plain", "a..b", "...", "a:b", "x\\y"])
def test_other_names_are_not_refused(name: str, tmp_path: Path) -> None:
    for writer in (tar_member, npz):
        (tmp_path / writer.__name__).mkdir()
        assert len(rf.open(writer(tmp_path / writer.__name__, name))) in (1, ROWS)


def content_of(folder: Path) -> dict[str, str]:
    return {
        os.fspath(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", FORMATS)
def test_links_are_followed_for_reading_as_in_a_hub_cache(name: str, tmp_path: Path) -> None:
    """Files of a snapshot are links to blobs, which are elsewhere and have other names."""
    written = tmp_path / "written"
    where = FORMATS[name].write(written, 0)
    expected = rf.open(where)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in written.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(written)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, blobs / f"{number:x}")
        link.symlink_to(os.path.relpath(blobs / f"{number:x}", link.parent))
    before = content_of(blobs)
    found = rf.open(snapshot / Path(where).relative_to(written))
    assert found.fingerprint == expected.fingerprint
    np.testing.assert_equal(list(found), list(expected))
    assert content_of(blobs) == before
