"""Shards that Energon or wids described: counts, splits and sizes are compared with the shards."""

import argparse
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wids
from wids.wids_index import main_create

import rankfeed as rf
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.tar import shard_list
from rankfeed.sources.tar.tar_index import scan
from rankfeed.sources.tar.tar_source import WebDatasetSource


def write_shard(path: Path, first: int, count: int, format: int = tarfile.PAX_FORMAT) -> Path:
    """A shard of samples called by their numbers, some of which have long names, with a folder before each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for index in range(first, first + count):
            name = f"{'n' * (120 if index % 3 == 0 and format == tarfile.PAX_FORMAT else 3)}/{index:04d}"
            folder = tarfile.TarInfo(f"folder{index}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for extension, content in (("txt", f"text {index}" * (index % 90)), ("cls", str(index))):
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content.encode()))
    return path


def write_idx(path: Path, offsets: Any) -> None:
    """The offsets of samples and of the end, as Energon's `prepare` stores them."""
    path.with_name(path.name + ".idx").write_bytes(np.asarray(offsets, "<u8").tobytes())


def energon(folder: Path, split: str | None = None) -> Path:
    """A folder as Energon's `prepare` leaves it, which needs no split file."""
    counts = {}
    (folder / ".nv-meta").mkdir(parents=True)
    for index, count in enumerate((5, 7, 4)):
        name = f"parts/s{index}.tar"
        path = write_shard(folder / name, 100 * index, count)
        counts[name] = count
        write_idx(path, scan(str(path)).offsets)
    info = {"energon_version": "7.4.1", "shard_counts": counts}
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps(info))
    if split is not None:
        (folder / ".nv-meta" / "split.yaml").write_text(split)
    return folder


SPLIT = """
split_parts:
  train: ["parts/s{0..1}.tar"]
  val: [parts/s2.tar]
  test: []
exclude: []
"""


EXCLUDING = SPLIT.replace("exclude: []", 'exclude: ["parts/s0.tar", "parts/s1.tar/nnn/010{1,3}"]')


@pytest.mark.parametrize(
    ("split", "name", "expected"),
    [
        pytest.param(SPLIT, "train", [*range(5), *range(100, 107)], id="train"),
        pytest.param(SPLIT, "val", [200, 201, 202, 203], id="val"),
        pytest.param(EXCLUDING, "train", [100, 102, 104, 105, 106], id="excluded shard and samples"),
        pytest.param(None, None, [*range(5), *range(100, 107), *range(200, 204)], id="no split file"),
    ],
)
def test_an_energon_folder_gives_the_samples_of_the_split(
    split: str | None, name: str | None, expected: list[int], tmp_path: Path
) -> None:
    source = rf.open(energon(tmp_path / "e", split), split=name)
    assert isinstance(source, WebDatasetSource)
    assert [sample["cls"] for sample in source] == expected
    assert [sample["txt"] for sample in source] == [f"text {label}" * (label % 90) for label in expected]


def test_right_and_wrong_offsets_of_a_foreign_tar_idx_file_are_ignored(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e")
    path = folder / "parts" / "s1.tar"
    expected = rf.open(folder).fetch(range(16)).samples()
    write_idx(path, [0, *scan(str(path)).offsets[2:]])
    assert rf.open(folder).fetch(range(16)).samples() == expected


def test_an_energon_split_that_is_not_named_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", SPLIT)
    with pytest.raises(ArgumentError, match=r"split='train' or split='val'"):
        rf.open(folder)
    with pytest.raises(ArgumentError, match="no such split"):
        rf.open(folder, split="dev")
    with pytest.raises(ArgumentError, match="only folders that Energon prepared"):
        rf.open(folder / "parts", split="train")


@pytest.mark.parametrize(
    ("split", "error", "said"),
    [
        ("split_parts: {train: [../../x.tar]}", SourceError, "not among those"),
        ("split_parts: {train: [parts/s9.tar]}", CorruptError, "not among those that Energon counted"),
        ("split_parts: [1, 2]", CorruptError, r"damaged[\s\S]*split_parts"),
        ("split_parts: {train: [[a]]}", CorruptError, r"damaged[\s\S]*split_parts"),
        ("split_parts: {train: [", CorruptError, "damaged"),
        ("split_parts: {train: ['{0..9999}{0..9999}']}", CorruptError, "too many"),
        ("{split_parts: {train: [parts/s0.tar]}, exclude: ['{0..9999}{0..99}']}", CorruptError, "too many names"),
        ("!!python/object/apply:os.system [exit]", CorruptError, "damaged"),
    ],
)
def test_a_damaged_energon_split_file_is_an_error_that_names_it(
    split: str, error: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_list, "_MAX_NAMES", 1000)
    with pytest.raises(error, match=rf"{said}[\s\S]*split\.yaml"):
        rf.open(energon(tmp_path / "e", split), split="train")


def test_a_wrong_sample_count_in_energon_metadata_is_an_error(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e")
    info = folder / ".nv-meta" / ".info.json"
    counts = json.loads(info.read_text())["shard_counts"]
    info.write_text(json.dumps({"shard_counts": {**counts, "parts/s1.tar": 6}}))
    with pytest.raises(SourceError, match=r"6 samples[\s\S]*7 samples[\s\S]*s1\.tar"):
        rf.open(folder)
    info.write_text('{"shard_counts": {"parts/s1.tar": "7"}}')
    with pytest.raises(CorruptError, match=r"\.info\.json"):
        rf.open(folder)


@pytest.mark.parametrize(
    "content", [b"", b"a: " + b"[" * 100_000 + b"\n", b"a: !!bool x\n", b"shard_counts: {a: 2001-13-45}\n"]
)
def test_damaged_energon_yaml_is_an_error(content: bytes, tmp_path: Path) -> None:
    folder = energon(tmp_path / "e")
    (folder / ".nv-meta" / ".info.json").unlink()
    (folder / ".nv-meta" / ".info.yaml").write_bytes(content)
    with pytest.raises(CorruptError, match=r"\.nv-meta"):
        rf.open(folder)


# --- wids


def test_a_wids_descriptor_gives_the_samples_that_wids_reads(tmp_path: Path) -> None:
    shards = [str(write_shard(tmp_path / f"s{n}.tar", 50 * n, 6, tarfile.USTAR_FORMAT)) for n in range(3)]
    path = tmp_path / "index.json"
    main_create(argparse.Namespace(output=str(path), name="test", base=None, info=None, files=shards))
    theirs = wids.ShardListDataset(str(path), cache_dir=str(tmp_path / "cache"), transformations=[lambda x: x])
    content = json.loads(path.read_text())
    content["shardlist"] = [{**shard, "url": Path(shard["url"]).name} for shard in content["shardlist"]]
    path.write_text(json.dumps(content))  # wids writes the names as they were given: here, absolute ones
    ours = rf.open(path)
    assert len(ours) == len(theirs) == 18
    for index, sample in enumerate(ours):
        assert sample["__key__"] == theirs[index]["__key__"]
        assert sample["txt"].encode() == theirs[index][".txt"].read()


@pytest.mark.parametrize(
    ("shard", "more", "error", "message"),
    [
        ({"nsamples": 5}, {}, SourceError, r"5 samples[\s\S]*6 samples[\s\S]*s\.tar"),
        ({"filesize": 1}, {}, CorruptError, r"1 bytes[\s\S]*s\.tar"),
        ({"url": "t.tar"}, {}, SourceError, r"missing[\s\S]*t\.tar"),
        ({"nsamples": "six"}, {}, CorruptError, r"damaged[\s\S]*index\.json"),
        ({}, {"shardlist": None, "datasets": [{"shardlist": []}]}, CorruptError, r"damaged[\s\S]*index\.json"),
        ({}, {"wids_version": 2}, SourceError, "unknown version"),
    ],
    ids=str,
)
def test_a_wrong_or_damaged_wids_descriptor_is_an_error(
    shard: dict[str, Any], more: dict[str, Any], error: Any, message: str, tmp_path: Path
) -> None:
    size = write_shard(tmp_path / "s.tar", 0, 6).stat().st_size
    shard = {"url": "s.tar", "nsamples": 6, "filesize": size, **shard}
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": [shard], **more}))
    with pytest.raises(error, match=message):
        rf.open(tmp_path / "index.json")
