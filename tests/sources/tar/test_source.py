"""Samples of tar shards are those of WebDataset's own reader, at any place, in any process; bad input is named."""

import gzip
import io
import lzma
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from tests.support.tar import write_tar

import rankfeed as rf
from rankfeed.columns.columns import Dense, Ragged
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError
from rankfeed.sources.tar import index_cache, tar_source


def write_shards(folder: Path, rows: Sequence[dict[str, Any]], maxcount: int = 37) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(f"{folder}/s-%d.tar", maxcount=maxcount, verbose=0) as writer:
        for row in rows:
            writer.write(row)
    return folder


def by_webdataset(path: Path) -> list[dict[str, Any]]:
    """The samples of a shard as WebDataset groups them, not decoded."""
    reader = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    about = ("__url__", "__local_path__")
    return [{name: value for name, value in sample.items() if name not in about} for sample in reader]


def there(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without the members that are masked."""
    names = [name for name in sample if not name.endswith("_valid") and sample.get(f"{name}_valid", True)]
    return {name: sample[name] for name in names}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_grouped_into_samples_as_webdataset_groups_them(format: int, tmp_path: Path) -> None:
    long = "" if format == tarfile.USTAR_FORMAT else "l" * 150
    members = {
        "__meta__": b"skipped",
        "__info__/a.txt": b"skipped",
        f"a/{long}1.TXT": b"upper",
        "README": b"has no extension, and ends no sample",
        f"a/{long}1.Seg.PNG": b"png",
        "./a/1.txt": b"another key",
        "a/b.c/2.txt": b"a dot in a folder",
        "a/b.c/2.x.y.z": b"three dots",
        "3.txt": b"b",
        "3.json": b"{}",
        "a/__x__/4.txt": b"no meta name, since it is not at the front",
        "4.txt": b"",
    }
    path = write_tar(tmp_path / "a.tar", members, format)
    source = rf.open(path, decode=False, missing="mask")
    assert [there(sample) for sample in source.fetch(range(len(source))).samples()] == by_webdataset(path)


def test_member_names_that_are_not_utf8_are_escaped_in_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name in ("gr\xfcn.txt", "gr\xfdn.txt"):
            tar.addfile(tarfile.TarInfo(name))
    assert [sample["__key__"] for sample in rf.open(path)] == ["gr\\xfcn", "gr\\xfdn"]


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 40])
def test_npy_members_of_any_shape_type_and_order_are_read_with_and_without_prefetching(
    prefetch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_source, "_PREFETCH_BYTES", prefetch_bytes)
    rng = np.random.default_rng(2)
    rows = [
        {
            "__key__": f"{i}",
            "a.npy": rng.standard_normal((int(rng.integers(0, 5)), 5, 7)),
            "b.npy": rng.integers(0, 9, (100, 3)).astype(np.int16),
            "c.npy": np.float64(i),
            "d.npy": np.asfortranarray(rng.standard_normal((4, 3))),
            "e.npy": np.arange(3, dtype=">i4") + i,
            "f.npy": rng.random((2, 2)) > 0.5,
            "g.npy": np.empty((i % 3, 0), np.float32),
        }
        for i in range(40)
    ]
    source = rf.open(write_shards(tmp_path / "s", rows, maxcount=15))
    ids = rng.permutation(40)
    batch = source.fetch(ids)
    for place, sample in zip(ids.tolist(), batch.samples(), strict=True):
        for name in list(rows[0])[1:]:
            np.testing.assert_array_equal(sample[name], rows[place][name], err_msg=name)
    assert isinstance(batch["b.npy"], Dense)
    assert isinstance(batch["a.npy"], Ragged)
    assert source.fields["e.npy"].dtype == "int32"
    source.expect(ids)
    source.expect([])
    assert source.fetch([]).num_rows == 0


def test_a_shard_without_suffix_is_read_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "a.tar", {"7.txt": b"a"}).rename(tmp_path / "unnamed")
    monkeypatch.chdir(tmp_path)
    source = rf.open("unnamed")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(source))[0]["__key__"] == "7"


def test_blocks_have_about_four_mebibytes_and_end_with_their_shard(tmp_path: Path) -> None:
    rows = [{"__key__": f"{i}", "raw": bytes(1 << 20)} for i in range(13)]
    source = rf.open(write_shards(tmp_path / "s", rows, maxcount=8))
    assert source.blocks.tolist() == [3, 3, 2, 3, 2]
    assert source.blocks.dtype == np.int64


# --- members that some samples lack, keys that come back


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    files = [("1.txt", b"a"), ("1.cls", b"5"), ("2.cls", b"6"), ("3.txt", b"c"), ("3.cls", b"7")]
    return write_tar(tmp_path / "a.tar", files)


def test_a_sample_that_lacks_a_member_is_an_error_unless_its_column_is_left_out(uneven: Path) -> None:
    with pytest.raises(SourceError, match=r"\.txt[\s\S]*'2'[\s\S]*a\.tar, offset 2048[\s\S]*missing="):
        rf.open(uneven)
    assert [sample["cls"] for sample in rf.open(uneven, columns=["cls"])] == [5, 6, 7]


def test_samples_that_lack_a_member_are_left_out_with_missing_skip(uneven: Path) -> None:
    source = rf.open(uneven, missing="skip")
    assert [(sample["txt"], sample["cls"]) for sample in source] == [("a", 5), ("c", 7)]
    assert [sample["cls"] for sample in pickle.loads(pickle.dumps(source))] == [5, 7]
    assert source.fingerprint != rf.open(uneven, columns=["cls"]).fingerprint
    every = [rf.open(uneven, columns=["cls"], missing=missing).fingerprint for missing in ("skip", "error")]
    assert every[0] == every[1]  # nothing is left out
    write_tar(uneven.with_name("b.tar"), [("9.png", b"")])
    with pytest.raises(SourceError, match="no sample has all columns"):
        rf.open([uneven, uneven.with_name("b.tar")], missing="skip", decode=False)


def test_missing_members_are_zero_empty_or_none_with_missing_mask(uneven: Path, tmp_path: Path) -> None:
    source = rf.open(uneven, missing="mask")
    assert [sample["txt"] for sample in source] == ["a", "", "c"]
    assert [bool(sample["txt_valid"]) for sample in source] == [True, False, True]
    array = io.BytesIO()
    np.save(array, np.ones((2, 3)))
    files = [("1.npy", array.getvalue()), ("1.json", b"[1]"), ("2.raw", b"x"), ("1b.cls", b"3")]
    masked = rf.open(write_tar(tmp_path / "b.tar", files), missing="mask")
    batch = masked.fetch([2, 0, 1])
    np.testing.assert_array_equal(batch["npy"].gather(), [np.zeros((2, 3)), np.ones((2, 3)), np.zeros((2, 3))])
    assert batch["json"].rows() == [None, [1], None]
    assert batch["cls"].gather().tolist() == [3, 0, 0]
    assert batch["cls_valid"].gather().tolist() == [True, False, False]


def test_a_key_repeated_in_a_shard_is_an_error_or_another_sample_with_duplicate_keys_keep(tmp_path: Path) -> None:
    files = [("1.txt", b"a"), ("2.txt", b"b"), ("1.cls", b"1"), ("2.cls", b"2")]
    path = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(SourceError, match=r"'1' at offset 0 and at 2048[\s\S]*--sort=name"):
        rf.open(path)
    kept = rf.open(path, duplicate_keys="keep", missing="mask", decode=False)
    assert [sample["__key__"] for sample in kept] == [item["__key__"] for item in by_webdataset(path)]
    # The same key in another shard is another sample, as everywhere.
    two = [write_tar(tmp_path / name, [("1.txt", b"a")]) for name in ("b.tar", "c.tar")]
    assert len(rf.open(two)) == 2


def test_two_members_of_one_extension_are_an_error_as_in_webdataset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"a"), ("1.TXT", b"b")])
    with pytest.raises(CorruptError, match=r"offset 0, and '1\.TXT' at offset 1024"):
        rf.open(path)
    with pytest.raises(ValueError, match="duplicate file name"):
        by_webdataset(path)


@pytest.mark.parametrize("name", ["a.", "a.__key__"])
def test_an_extension_that_can_name_no_column_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot name a column[\s\S]*offset 0"):
        rf.open(write_tar(tmp_path / "a.tar", [(name, b"")]))


@pytest.mark.parametrize(
    ("names", "options", "summary", "member"),
    [
        ([f"0.{i}.txt" for i in range(1001)], {}, "too many different extensions", ".0.txt"),
        (["img_0.5.txt", "img_0.6.txt"], {"columns": ["txt"]}, "no such column", ".5.txt"),
        (["0.v0.txt", "1.v1.txt"], {}, "lacks a member", ".v0.txt"),
        (["0.v0.txt", "1.v1.txt"], {"missing": "skip"}, "no sample has all", ".v0.txt"),
        (["a.cls", "b.0.txt"], {"missing": "skip"}, "no sample has all", ".0.txt"),
        (["a.0.txt", "b.0.txt", "a.1.txt"], {}, "same key", ".0.txt"),
        (["a.0.txt", "a.1.txt", "a.0.TXT"], {}, "two members of one extension", ".0.txt"),
    ],
)
def test_errors_caused_by_keys_with_dots_say_that_a_key_ends_at_the_first_dot(
    names: list[str], options: dict[str, Any], summary: str, member: str, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "a.tar", [(name, b"") for name in names])
    with pytest.raises((SourceError, ArgumentError), match=summary) as caught:
        rf.open(path, **options)
    assert "a key ends at the first dot of a name" in str(caught.value.remedy)
    assert f"'KEY{member}' is member {member} of sample 'KEY'" in str(caught.value.remedy)


@pytest.mark.parametrize("names", [["0.txt", "1.cls"], ["a.txt", "b.txt", "a.cls"], ["a.txt", "a.TXT"]])
def test_errors_about_keys_without_dots_do_not_mention_the_first_dot(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        rf.open(write_tar(tmp_path / "a.tar", [(name, b"") for name in names]))
    assert "first dot" not in str(caught.value.remedy)


def test_shards_without_samples_are_skipped_but_at_least_one_sample_is_needed(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(SourceError, match="no samples"):
        rf.open(tmp_path)
    write_tar(tmp_path / "b.tar", [("1.cls", b"1")])
    write_tar(tmp_path / "c.tar", [("README", b"1")])
    assert [sample["cls"] for sample in rf.open(tmp_path)] == [1]


@pytest.mark.parametrize("wrong", [{"missing": "no"}, {"duplicate_keys": 1}, {"decode": 3}])
def test_invalid_values_of_missing_duplicate_keys_and_decode_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        rf.open(write_tar(tmp_path / "a.tar", {"1.txt": b"a"}), **wrong)


# --- damage


def test_a_txt_member_that_is_not_utf8_is_an_error_that_names_its_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"fine"), ("2.txt", b"\xff")])
    with pytest.raises(CorruptError, match=r"a\.tar, sample '2', \.txt at offset 1536"):
        rf.open(path).fetch([0, 1])["txt"].rows()


def test_an_npy_member_of_another_shape_is_an_error_unless_decoded_as_object(tmp_path: Path) -> None:
    rows = [{"__key__": f"{i}", "npy": np.zeros((3, 2) if i == 23 else (2, 3))} for i in range(50)]
    source = rf.open(write_shards(tmp_path / "s", rows))
    with pytest.raises(SourceError, match=r"unlike[\s\S]*float64\[3, 2\][\s\S]*sample '23'[\s\S]*\"object\""):
        source.fetch(range(50))
    kept = rf.open(tmp_path / "s", decode={"npy": "object"})
    assert kept[23]["npy"].shape == (3, 2)


def test_a_validity_column_with_the_name_of_a_member_is_an_error_unless_one_is_left_out(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.x", b"1"), ("1.x_valid", b"q"), ("2.x_valid", b"z")])
    with pytest.raises(SourceError, match=r"\.x_valid[\s\S]*a\.tar[\s\S]*columns="):
        rf.open(path, missing="mask")
    chosen = rf.open(path, missing="mask", columns=["x"])
    assert [sample["x"] for sample in chosen] == [b"1", b""]
    assert [sample["x_valid"] for sample in rf.open(path, columns=["x_valid"])] == [b"q", b"z"]


# --- read-only directories, and compressed shards


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.tar.gz", gzip.compress),
        ("a.tgz", gzip.compress),
        ("a.tar", gzip.compress),
        ("a.tar.xz", lzma.compress),
        ("a.tar.zst", lambda content: pa.compress(content, "zstd", asbytes=True)),
    ],
)
def test_compressed_shards_are_refused_unless_decompress_is_set(name: str, compress: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    content = compress(write_tar(tmp_path / "plain.tar", [("1.txt", b"a"), ("2.txt", b"b")]).read_bytes())
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"compressed with[\s\S]*decompress=True"):
        rf.open(path)
    source = rf.open(path, decompress=True, cache_dir=tmp_path / "cache")
    for copy in (source, pickle.loads(pickle.dumps(source))):
        assert [sample["txt"] for sample in copy] == ["a", "b"]
    path.write_bytes(content[:-9])
    with pytest.raises(CorruptError, match=rf"damaged[\s\S]*{name}"):
        rf.open(path, decompress=True, cache_dir=tmp_path / "cache")


def test_a_shard_that_expands_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_MORE_BYTES", 1 << 16)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(UnsafeError, match=r"expands too much[\s\S]*a\.tar\.gz"):
        rf.open(tmp_path / "a.tar.gz", decompress=True, cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / ".rankfeed-decompressed").iterdir()] == [".lock"]


def test_a_partial_decompressed_copy_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "a.tar", [("1.txt", b"a")]).read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain))
    folder = tmp_path / "cache" / ".rankfeed-decompressed"
    folder.mkdir(parents=True)
    (folder / ".tmp-host-1-00000000").write_bytes(bytes(1 << 16))
    source = rf.open(tmp_path / "a.tar.gz", decompress=True, cache_dir=tmp_path / "cache")
    assert source[0]["txt"] == "a"
    assert not list(folder.glob(".tmp-*"))
