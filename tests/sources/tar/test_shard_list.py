"""Shards that Energon or wids described: counts, splits and sizes are compared with the shards."""

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
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError
from rankfeed.sources.tar import shard_list as tar_foreign
from rankfeed.sources.tar.tar_index import scan
from rankfeed.sources.tar.tar_source import WebDatasetSource


def write_shard(path: Path, first: int, count: int, format: int = tarfile.PAX_FORMAT) -> Path:
    """A shard of samples called by their numbers, some of which have long names, with a folder before each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for number in range(first, first + count):
            name = f"{'n' * (120 if number % 3 == 0 and format == tarfile.PAX_FORMAT else 3)}/{number:04d}"
            folder = tarfile.TarInfo(f"folder{number}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for extension, content in (("txt", f"text {number}" * (number % 90)), ("cls", str(number))):
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content.encode()))
    return path


def write_idx(path: Path, offsets: Any) -> None:
    """The offsets of samples and of the end, as Energon's `prepare` stores them."""
    path.with_name(path.name + ".idx").write_bytes(np.asarray(offsets, "<u8").tobytes())


def energon(folder: Path, *, idx: bool, split: str | None) -> Path:
    """A folder as Energon's `prepare` leaves it."""
    counts = {}
    (folder / ".nv-meta").mkdir(parents=True)
    for number, count in enumerate((5, 7, 4)):
        name = f"parts/s{number}.tar"
        path = write_shard(folder / name, 100 * number, count)
        counts[name] = count
        if idx:
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


def test_a_folder_of_energon_is_read_with_its_splits(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", idx=True, split=SPLIT)
    source = rf.open(folder, split="train")
    assert isinstance(source, WebDatasetSource)
    assert [sample["cls"] for sample in source] == [*range(5), *range(100, 107)]
    assert [sample["txt"] for sample in source][3] == "text 3" * 3
    assert [sample["cls"] for sample in rf.open(folder, split="val")] == [200, 201, 202, 203]


def test_indexes_of_others_change_nothing(tmp_path: Path) -> None:
    """Their offsets are not used, right or wrong."""
    folder = energon(tmp_path / "e", idx=True, split=None)
    path = folder / "parts" / "s1.tar"
    expected = rf.open(folder).fetch(range(16)).samples()
    write_idx(path, [0, *scan(str(path)).offsets[2:]])
    assert rf.open(folder).fetch(range(16)).samples() == expected


def test_without_a_split_file_all_shards_are_read(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", idx=True, split=None)
    assert len(rf.open(folder)) == 16


def test_a_split_has_to_be_chosen_and_to_be_there(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", idx=True, split=SPLIT)
    with pytest.raises(ArgumentError, match=r"split='train' or split='val'"):
        rf.open(folder)
    with pytest.raises(ArgumentError, match="no such split"):
        rf.open(folder, split="dev")
    with pytest.raises(ArgumentError, match="only folders that Energon prepared"):
        rf.open(folder / "parts", split="train")


def test_excluded_shards_and_samples_are_left_out(tmp_path: Path) -> None:
    split = SPLIT.replace("exclude: []", 'exclude: ["parts/s0.tar", "parts/s1.tar/nnn/010{1,3}"]')
    source = rf.open(energon(tmp_path / "e", idx=True, split=split), split="train")
    assert [sample["cls"] for sample in source] == [100, 102, 104, 105, 106]


@pytest.mark.parametrize(
    ("split", "error", "said"),
    [
        ("split_parts: {train: [../../x.tar]}", SourceError, "not among those"),
        ("split_parts: {train: [parts/s9.tar]}", CorruptError, "not among those that Energon counted"),
        ("split_parts: [1, 2]", CorruptError, r"damaged[\s\S]*split_parts"),
        ("split_parts: {train: [[a]]}", CorruptError, r"damaged[\s\S]*split_parts"),
        ("split_parts: {train: [", CorruptError, "damaged"),
        ("split_parts: {train: ['{0..9999}{0..9999}']}", CorruptError, "too many"),
        (
            "{split_parts: {train: [parts/s0.tar]}, exclude: ['{0..9999}{0..9999}']}",
            CorruptError,
            "too many names",
        ),
        ("!!python/object/apply:os.system [exit]", CorruptError, "damaged"),
    ],
)
def test_a_split_that_is_damaged_is_named(
    split: str, error: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_foreign, "_MAX_NAMES", 1000)
    folder = energon(tmp_path / "e", idx=True, split=split)
    with pytest.raises(error, match=rf"{said}[\s\S]*split\.yaml"):
        rf.open(folder, split="train")


def test_counts_are_checked(tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", idx=True, split=None)
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
def test_damaged_yaml_is_an_error(content: bytes, tmp_path: Path) -> None:
    folder = energon(tmp_path / "e", idx=False, split=None)
    (folder / ".nv-meta" / ".info.json").unlink()
    (folder / ".nv-meta" / ".info.yaml").write_bytes(content)
    with pytest.raises(CorruptError, match=r"\.nv-meta"):
        rf.open(folder)


# --- wids


def descriptor(folder: Path, shards: list[Path], **more: Any) -> Path:
    import argparse
    import contextlib

    path = folder / "index.json"
    options = argparse.Namespace(
        output=str(path), name="test", base=None, info=None, files=[str(shard) for shard in shards]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        main_create(options)
    content = json.loads(path.read_text()) | more
    path.write_text(json.dumps(content))
    return path


def test_a_wids_descriptor_is_read_as_wids_reads_it(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"s{n}.tar", 50 * n, 6, tarfile.USTAR_FORMAT) for n in range(3)]
    path = descriptor(tmp_path, shards)
    theirs = wids.ShardListDataset(str(path), cache_dir=str(tmp_path / "cache"), transformations=[lambda x: x])
    content = json.loads(path.read_text())
    content["shardlist"] = [{**shard, "url": Path(shard["url"]).name} for shard in content["shardlist"]]
    path.write_text(json.dumps(content))  # wids writes the names as they were given: here, absolute ones
    ours = rf.open(path)
    assert len(ours) == len(theirs) == 18
    for number, sample in enumerate(ours):
        assert sample["__key__"] == theirs[number]["__key__"]
        assert sample["txt"].encode() == theirs[number][".txt"].read()


def test_what_a_wids_descriptor_says_is_checked(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "s.tar", 0, 6)
    good = {"url": "s.tar", "nsamples": 6, "filesize": shard.stat().st_size}
    path = tmp_path / "index.json"

    def says(change: dict[str, Any], error: type[RankfeedError], said: str) -> None:
        path.write_text(json.dumps({"wids_version": 1, "shardlist": [{**good, **change}]}))
        with pytest.raises(error, match=said):
            rf.open(path)

    says({"nsamples": 5}, SourceError, r"5 samples[\s\S]*6 samples[\s\S]*s\.tar")
    says({"filesize": 1}, CorruptError, r"1 bytes[\s\S]*s\.tar")
    says({"url": "t.tar"}, SourceError, r"missing[\s\S]*t\.tar")
    says({"nsamples": "six"}, CorruptError, r"damaged[\s\S]*index\.json")
    path.write_text(json.dumps({"wids_version": 1, "shardlist": None, "datasets": [{"shardlist": [good]}]}))
    with pytest.raises(CorruptError, match=r"damaged[\s\S]*index\.json"):
        rf.open(path)
    path.write_text(json.dumps({"wids_version": 2, "shardlist": [good]}))
    with pytest.raises(SourceError, match="unknown version"):
        rf.open(path)
