"""Samples of tar shards are those of WebDataset's own reader, at any place, in any process; bad input is named."""

import gzip
import io
import json
import lzma
import os
import pickle
import resource
import tarfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from tests.support.seeds import fresh_seed

import rankfeed as rf
from rankfeed.columns.columns import Dense, Ragged
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError, UnsafeError
from rankfeed.sources.open import detect
from rankfeed.sources.tar import decompress as tar_compressed
from rankfeed.sources.tar import tar_source as tar_source
from rankfeed.sources.tar.tar_source import WebDatasetSource

RNG = np.random.default_rng(0)
ROWS: list[dict[str, Any]] = [
    {
        "__key__": f"part/{i:04d}",
        "txt": f"zeile é {i}",
        "cls": i % 7,
        "json": {"number": i, "nested": [1, {"two": None}]},
        "mp": {"k": [i, 2.5]},
        "raw": RNG.bytes(i * 13),
        "feats.npy": RNG.standard_normal((i % 9, 3)).astype(np.float32),
        "tokens.npy": np.arange(48, dtype=np.int32) + i,
    }
    for i in range(100)
]


def write_shards(folder: Path, rows: Sequence[dict[str, Any]] = ROWS, each: int = 37) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(f"{folder}/s-%d.tar", maxcount=each, verbose=0) as writer:
        for row in rows:
            writer.write(row)
    return folder


def write_tar(path: Path, files: Sequence[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def by_webdataset(*paths: Path, decode: bool = False) -> list[dict[str, Any]]:
    reader = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False)
    samples = list(reader.decode() if decode else reader)
    return [
        {in_utf8(name): value for name, value in each.items() if name not in ("__url__", "__local_path__")}
        | {"__key__": in_utf8(each["__key__"])}
        for each in samples
    ]


def in_utf8(name: str) -> str:
    """A name as it can be printed: WebDataset keeps bytes that are in no charset as half a surrogate pair."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def there(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without the members that are masked."""
    names = [name for name in sample if not name.endswith("_valid") and sample.get(f"{name}_valid", True)]
    return {name: sample[name] for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        np.array_equal(ours[name], value) and np.asarray(ours[name]).dtype == value.dtype
        if isinstance(value, np.ndarray)
        else ours[name] == value
        for name, value in theirs.items()
    )


def test_every_sample_is_that_of_webdataset_in_any_order(folder: Path) -> None:
    source = rf.open(folder)
    assert isinstance(source, WebDatasetSource)
    theirs = by_webdataset(*sorted(folder.glob("*.tar")), decode=True)
    ids = np.random.default_rng(1).permutation(np.arange(100).repeat(2))
    ours = source.fetch(ids).samples()
    assert len(theirs) == len(source) == 100
    assert all(same(mine, theirs[place]) for mine, place in zip(ours, ids.tolist(), strict=True))
    assert {name: str(field) for name, field in source.fields.items()} == {
        "__key__": "str",
        "cls": "int64",
        "feats.npy": "float32[*, 3]",
        "json": "object",
        "mp": "object",
        "raw": "bytes",
        "tokens.npy": "int32[48]",
        "txt": "str",
    }


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_grouped_as_webdataset_groups_them(format: int, tmp_path: Path) -> None:
    long = "" if format == tarfile.USTAR_FORMAT else "l" * 150
    files = [
        ("__meta__", b"skipped"),
        ("__info__/a.txt", b"skipped"),
        (f"a/{long}1.TXT", b"upper"),
        ("README", b"has no extension, and ends no sample"),
        (f"a/{long}1.Seg.PNG", b"png"),
        ("./a/1.txt", b"another key"),
        ("a/b.c/2.txt", b"a dot in a folder"),
        ("a/b.c/2.x.y.z", b"three dots"),
        ("3.txt", b"b"),
        ("3.json", b"{}"),
        ("a/__x__/4.txt", b"no meta name, since it is not at the front"),
        ("4.txt", b""),
    ]
    path = write_tar(tmp_path / "a.tar", files, format)
    source = rf.open(path, decode=False, missing="mask")
    ours = source.fetch(range(len(source))).samples()
    theirs = by_webdataset(path)
    shown = [
        {
            name: value
            for name, value in each.items()
            if not name.endswith("_valid") and each.get(f"{name}_valid", True)
        }
        for each in ours
    ]
    assert shown == theirs


def test_names_in_no_known_charset_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        for name in ("gr\xfcn.txt", "gr\xfdn.txt"):
            tar.addfile(tarfile.TarInfo(name))
    assert [sample["__key__"] for sample in rf.open(path)] == ["gr\\xfcn", "gr\\xfdn"]


def test_bytes_text_and_arrays_are_not_copied_before_they_are_collated(folder: Path) -> None:
    source = rf.open(folder)
    batch, again = source.fetch([3, 5]), source.fetch([4])
    for name in ("raw", "txt", "feats.npy", "tokens.npy"):
        values, others = batch[name].pointers.memory[0].array, again[name].pointers.memory[0].array  # type: ignore[attr-defined]
        assert not values.flags.owndata
        assert not values.flags.writeable
        assert np.may_share_memory(source._shards.open(0).memory.array, values)
        assert np.may_share_memory(source._shards.open(0).memory.array, others)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 40])
def test_arrays_of_any_row_size_are_read_in_place(
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
    source = rf.open(write_shards(tmp_path / "s", rows, each=15))
    ids = rng.permutation(40)
    batch = source.fetch(ids)
    for place, sample in zip(ids.tolist(), batch.samples(), strict=True):
        for name in list(rows[0])[1:]:
            np.testing.assert_array_equal(sample[name], rows[place][name], err_msg=name)
    assert isinstance(batch["b.npy"], Dense)
    assert isinstance(batch["a.npy"], Ragged)
    assert source.fields["e.npy"].dtype == "int32"
    source.expect(ids)
    assert source.fetch([])["a.npy"].rows() is not None


def test_no_samples_can_be_expected_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_source, "_PREFETCH_BYTES", 0)
    source = rf.open(folder)
    source.expect([])
    assert source.fetch([]).num_rows == 0


def test_what_can_be_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (
        folder,
        f"{folder}/s-*.tar",
        f"{folder}/s-{{0..2}}.tar",
        [folder / f"s-{n}.tar" for n in range(3)],
        [folder],
    ):
        source = rf.open(where)
        assert [sample["cls"] for sample in source] == [i % 7 for i in range(100)]
    (tmp_path / "unnamed").write_bytes((folder / "s-0.tar").read_bytes())
    assert len(rf.open(tmp_path / "unnamed")) == 37
    monkeypatch.chdir(folder)
    source = rf.open("s-1.tar")
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(pickle.dumps(source))[0]["__key__"] == "part/0037"
    for nothing in ("no-*.tar", "no.tar"):
        with pytest.raises(SourceError, match=r"no file matches|no such file"):
            rf.open(tmp_path / nothing, format="webdataset")


def test_shards_come_in_natural_order_and_lists_as_given(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write_tar(tmp_path / f"s{number}.tar", [("a.cls", b"%d" % number)])
    assert [sample["cls"] for sample in rf.open(tmp_path)] == [1, 2, 10]
    assert [sample["cls"] for sample in rf.open([tmp_path / "s10.tar", tmp_path / "s2.tar"])] == [10, 2]


def test_columns_restrict_what_is_offered(folder: Path) -> None:
    source = rf.open(folder, columns=["cls", "__key__"])
    assert source[3] == {"cls": 3, "__key__": "part/0003"}
    assert list(pickle.loads(pickle.dumps(source)).fields) == ["cls", "__key__"]
    for wrong in (["png"], "cls"):
        with pytest.raises(ArgumentError, match=r"no such column|invalid columns"):
            WebDatasetSource(folder, columns=wrong)


def test_blocks_are_runs_of_about_four_mebibytes_in_a_shard(tmp_path: Path) -> None:
    rows = [{"__key__": f"{i}", "raw": bytes(1 << 20)} for i in range(13)]
    source = rf.open(write_shards(tmp_path / "s", rows, each=8))
    assert source.blocks.tolist() == [3, 3, 2, 3, 2]
    assert source.blocks.dtype == np.int64


def test_the_fingerprint_is_of_the_data_and_not_of_their_place(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "else" / "where"
    write_shards(there)
    for shard in there.glob("*.tar"):
        shard.write_bytes((folder / shard.name).read_bytes())
    assert rf.open(there).fingerprint == rf.open(folder).fingerprint
    write_shards(there, [*ROWS, {**ROWS[0], "__key__": "more"}])
    assert rf.open(there).fingerprint != rf.open(folder).fingerprint
    skipped = rf.open(folder, missing="skip").fingerprint
    assert skipped == rf.open(folder).fingerprint  # nothing is left out


# --- members that some samples lack, keys that come back


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    files = [("1.txt", b"a"), ("1.cls", b"5"), ("2.cls", b"6"), ("3.txt", b"c"), ("3.cls", b"7")]
    return write_tar(tmp_path / "a.tar", files)


def test_a_sample_that_lacks_a_member_is_named(uneven: Path) -> None:
    with pytest.raises(SourceError, match=r"\.txt[\s\S]*'2'[\s\S]*a\.tar, offset 2048[\s\S]*missing="):
        rf.open(uneven)
    assert [sample["cls"] for sample in rf.open(uneven, columns=["cls"])] == [5, 6, 7]


def test_samples_that_lack_a_member_are_left_out_where_asked(uneven: Path) -> None:
    source = rf.open(uneven, missing="skip")
    assert [(sample["txt"], sample["cls"]) for sample in source] == [("a", 5), ("c", 7)]
    assert [sample["cls"] for sample in pickle.loads(pickle.dumps(source))] == [5, 7]
    assert source.fingerprint != rf.open(uneven, columns=["cls"]).fingerprint
    write_tar(uneven.with_name("b.tar"), [("9.png", b"")])
    with pytest.raises(SourceError, match="no sample has all columns"):
        rf.open([uneven, uneven.with_name("b.tar")], missing="skip", decode=False)


def test_members_that_are_not_there_are_masked_where_asked(uneven: Path, tmp_path: Path) -> None:
    source = rf.open(uneven, missing="mask")
    assert [(sample["txt"], bool(sample["txt_valid"])) for sample in source] == [
        ("a", True),
        ("", False),
        ("c", True),
    ]
    array = io.BytesIO()
    np.save(array, np.ones((2, 3)))
    files = [("1.npy", array.getvalue()), ("1.json", b"[1]"), ("2.raw", b"x"), ("1b.cls", b"3")]
    masked = rf.open(write_tar(tmp_path / "b.tar", files), missing="mask")
    batch = masked.fetch([2, 0, 1])
    np.testing.assert_array_equal(batch["npy"].gather(), [np.zeros((2, 3)), np.ones((2, 3)), np.zeros((2, 3))])
    assert batch["json"].rows() == [None, [1], None]
    assert [row.tolist() for row in (batch["cls"].gather(), batch["cls_valid"].gather())] == [
        [3, 0, 0],
        [True, False, False],
    ]


def test_a_key_that_comes_back_is_an_error_or_a_sample_of_its_own(tmp_path: Path) -> None:
    files = [("1.txt", b"a"), ("2.txt", b"b"), ("1.cls", b"1"), ("2.cls", b"2")]
    path = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(SourceError, match=r"'1' at offset 0 and at 2048[\s\S]*--sort=name"):
        rf.open(path)
    kept = rf.open(path, duplicate_keys="keep", missing="mask", decode=False)
    assert [sample["__key__"] for sample in kept] == [each["__key__"] for each in by_webdataset(path)]
    # The same key in another shard is another sample, as everywhere.
    two = [write_tar(tmp_path / name, [("1.txt", b"a")]) for name in ("b.tar", "c.tar")]
    assert len(rf.open(two)) == 2


def test_two_members_of_one_extension_are_an_error_as_in_webdataset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"a"), ("1.TXT", b"b")])
    with pytest.raises(CorruptError, match=r"offset 0, and '1\.TXT' at offset 1024"):
        rf.open(path)
    with pytest.raises(ValueError, match="duplicate file name"):
        by_webdataset(path)


@pytest.mark.parametrize("name", ["../a.txt", "a/../../b.txt", "/etc/a.txt"])
def test_a_name_that_climbs_out_is_refused(name: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b""), (name, b"")])
    with pytest.raises(UnsafeError, match=r"leads outside[\s\S]*a\.tar, offset 512"):
        rf.open(path)


def test_an_extension_that_can_name_no_column_is_an_error(tmp_path: Path) -> None:
    for name in ("a.", "a.__key__"):
        with pytest.raises(SourceError, match=r"cannot name a column[\s\S]*offset 0"):
            rf.open(write_tar(tmp_path / "a.tar", [(name, b"")]))


@pytest.mark.parametrize(
    ("names", "options", "summary", "example"),
    [
        ([f"0.{i}.txt" for i in range(1001)], {}, "too many different extensions", "'0.0.txt' is member .0.txt"),
        (["img_0.5.txt", "img_0.6.txt"], {"columns": ["txt"]}, "no such column", "'img_0.5.txt' is member .5.txt"),
        (["0.v0.txt", "1.v1.txt"], {}, "lacks a member", "'0.v0.txt' is member .v0.txt of sample '0'"),
        (["0.v0.txt", "1.v1.txt"], {"missing": "skip"}, "no sample has all", "'0.v0.txt' is member .v0.txt"),
        (["a.cls", "b.0.txt"], {"missing": "skip"}, "no sample has all", "'b.0.txt' is member .0.txt"),
        (["a.0.txt", "b.0.txt", "a.1.txt"], {}, "same key", "'a.0.txt' is member .0.txt of sample 'a'"),
        (["a.0.txt", "a.1.txt", "a.0.TXT"], {}, "two members of one extension", "'a.0.txt' is member .0.txt"),
    ],
)
def test_errors_that_keys_with_dots_cause_explain_the_first_dot(
    names: list[str], options: dict[str, Any], summary: str, example: str, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "a.tar", [(name, b"") for name in names])
    with pytest.raises((SourceError, ArgumentError), match=summary) as caught:
        rf.open(path, **options)
    assert "a key ends at the first dot of a name" in str(caught.value.remedy)
    assert example in str(caught.value.remedy)


@pytest.mark.parametrize("names", [["0.txt", "1.cls"], ["a.txt", "b.txt", "a.cls"], ["a.txt", "a.TXT"]])
def test_errors_about_keys_without_dots_do_not_mention_them(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        rf.open(write_tar(tmp_path / "a.tar", [(name, b"") for name in names]))
    assert "first dot" not in str(caught.value.remedy)


def test_empty_shards_are_passed_over_and_an_empty_data_set_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(SourceError, match="no samples"):
        rf.open(tmp_path)
    write_tar(tmp_path / "b.tar", [("1.cls", b"1")])
    write_tar(tmp_path / "c.tar", [("README", b"1")])
    assert [sample["cls"] for sample in rf.open(tmp_path)] == [1]


@pytest.mark.parametrize("wrong", [{"missing": "no"}, {"duplicate_keys": 1}, {"decode": 3}])
def test_options_that_cannot_be_meant_are_refused(wrong: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ArgumentError):
        rf.open(folder, **wrong)


# --- processes, threads, loaders


def test_it_travels_as_a_path(folder: Path) -> None:
    source = rf.open(folder)
    source.fetch(range(100)).samples()  # shards are open
    assert len(pickle.dumps(source)) < 6000  # columns, and what was seen of each file


def test_threads_read_at_once_with_few_shards_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankfeed.storage.data_files.OPEN_FILES", 1)
    source = rf.open(folder)
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            ids = rng.integers(0, 100, 16)
            for place, sample in zip(ids.tolist(), source.fetch(ids).samples(), strict=True):
                if sample["json"]["number"] != place or sample["raw"] != ROWS[place]["raw"]:
                    wrong.append(place)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    assert not wrong
    assert isinstance(source, WebDatasetSource)
    assert len(source.files._open) <= 3


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "worker_kind": "process"}, {"num_workers": 2}])
def test_a_loader_delivers_every_sample_once(workers: dict[str, Any], folder: Path) -> None:
    source = rf.open(folder, columns=["__key__", "feats.npy", "cls"])
    loader = rf.Loader(source, 8, shuffle=True, seed=3, topology=rf.Topology(), **workers)
    seen = Counter(key for batch in loader for key in batch["__key__"])
    assert seen == Counter(row["__key__"] for row in ROWS)


# --- damage


def test_a_shard_that_changed_is_indexed_anew_and_refused_by_those_who_read_it(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", ROWS[:10], each=5)
    source = rf.open(folder)
    pickled = pickle.dumps(source)
    write_tar(folder / "s-1.tar", [("x.cls", b"1")])
    with pytest.raises(SourceError, match=r"changed"):
        source.fetch([9])
    with pytest.raises(SourceError, match=r"changed"):
        pickle.loads(pickled).fetch([9])
    assert len(rf.open(folder, columns=["cls"])) == 6
    (folder / "s-1.tar").unlink()
    with pytest.raises(SourceError, match=r"changed|cannot be read"):
        pickle.loads(pickled).fetch([9])


def test_a_shard_that_was_cut_anywhere_is_an_error_or_whole(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"a" * 600), ("1.cls", b"1"), ("2.txt", b""), ("2.cls", b"2")])
    whole, expected = path.read_bytes(), rf.open(path).fetch([0, 1]).samples()
    for block in range(0, len(whole), 512):
        for size in (block, block + 1, block + 511):
            path.write_bytes(whole[:size])
            said = ""
            try:
                assert rf.open(path, format="webdataset").fetch([0, 1]).samples() == expected
            except CorruptError as error:
                said = str(error)
            assert "a.tar, offset" in said or size >= 4096 + 512


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Bytes flipped, cut out or repeated, here and there."""
    out = bytearray(content)
    for _ in range(int(rng.choice([1, 1, 3]))):
        if not out:
            break
        where, length = int(rng.integers(len(out))), int(rng.choice([1, 8, 100, 512]))
        kind = int(rng.integers(4))
        if kind == 0:
            out[where] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del out[where : where + length]
        elif kind == 2:
            out[where:where] = out[where : where + length]
        else:
            out[where : where + length] = rng.bytes(min(length, len(out) - where))
    return bytes(out)


def test_a_mutated_shard_is_an_error_or_what_webdataset_reads(thorough: bool, tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6.0))
    members = [
        ("txt", b"text"),
        ("cls", b"7"),
        ("json", b'{"a": [1, 2]}'),
        ("npy", array.getvalue()),
        ("raw", b"x"),
    ]
    files = [(f"{'d' * 99}/{i}.{name}", content) for i in range(2) for name, content in members]
    path = tmp_path / "a.tar"
    seed = fresh_seed()
    rng, read = np.random.default_rng(seed), 0
    for turn in range(500 if thorough else 200):
        good = write_tar(path, files, [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT][turn % 2]).read_bytes()
        path.write_bytes(mutated(good, rng))
        try:
            ours = rf.open(path, format="webdataset", decode=False, missing="mask", duplicate_keys="keep")
            shown = [there(each) for each in ours.fetch(range(len(ours))).samples()]
            assert shown == by_webdataset(path), f"seed {seed}, turn {turn}"
            read += 1
            source = rf.open(path, format="webdataset", missing="mask", duplicate_keys="keep")
            source.fetch(range(len(source))).samples()
        except RankfeedError:
            pass
    assert read > (20 if thorough else 8)


def test_a_mutated_index_is_made_anew(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", ROWS[:6], each=6)
    path = folder / "s-0.tar.rankfeed"
    expected = json.dumps(rf.open(folder, columns=["json", "txt"]).fetch(range(6)).samples())
    good = path.read_bytes()
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    for turn in range(200):
        path.write_bytes(mutated(good, rng))
        source = rf.open(folder, columns=["json", "txt"])
        assert json.dumps(source.fetch(range(6)).samples()) == expected, f"seed {seed}, turn {turn}"


def test_text_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"fine"), ("2.txt", b"\xff")])
    with pytest.raises(CorruptError, match=r"a\.tar, sample '2', \.txt at offset 1536"):
        rf.open(path).fetch([0, 1])["txt"].rows()


def test_an_array_unlike_the_others_is_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"__key__": f"{i}", "npy": np.zeros((2, 3))} for i in range(50)]
    rows[23]["npy"] = np.zeros((3, 2))
    source = rf.open(write_shards(tmp_path / "s", rows))
    with pytest.raises(SourceError, match=r"unlike[\s\S]*float64\[3, 2\][\s\S]*sample '23'[\s\S]*\"object\""):
        source.fetch(range(50))
    kept = rf.open(tmp_path / "s", decode={"npy": "object"})
    assert kept[23]["npy"].shape == (3, 2)


def test_many_data_sets_of_many_shards_share_what_files_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankfeed.storage.data_files.OPEN_FILES", 100)
    for number in range(150):
        write_tar(tmp_path / f"s{number:03d}.tar", [(f"{number}.cls", b"%d" % number)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    sources = [rf.open(tmp_path) for _ in range(4)]
    for source in sources:
        assert [int(source.fetch([row])["cls"].rows()[0]) for row in range(150)] == [*range(150)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(sources) * 100 + 3
    # Where no more files may be opened, open ones are closed first.
    last = max(int(name) for name in os.listdir("/proc/self/fd") if name.isdigit())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
    try:
        assert [int(sources[0].fetch([row])["cls"].rows()[0]) for row in range(150)] == [*range(150)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_written_again_in_the_same_size_is_refused_by_those_who_come_later(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1"), ("2.cls", b"2")])
    source = rf.open(path)
    assert source[1]["cls"] == 2
    pickled = pickle.dumps(source)
    pickle.loads(pickled)
    write_tar(path, [("1.cls", b"1"), ("2.cls", b"7")])
    with pytest.raises(SourceError, match="changed"):
        pickle.loads(pickled).fetch([0])
    with pytest.raises(SourceError, match="changed"):
        source.check_unchanged()


def test_a_column_of_ours_never_takes_the_name_of_members(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.x", b"1"), ("1.x_valid", b"q"), ("2.x_valid", b"z")])
    with pytest.raises(SourceError, match=r"\.x_valid[\s\S]*a\.tar[\s\S]*columns="):
        rf.open(path, missing="mask")
    chosen = rf.open(path, missing="mask", columns=["x"])
    assert [sample["x"] for sample in chosen] == [b"1", b""]
    assert [sample["x_valid"] for sample in rf.open(path, columns=["x_valid"])] == [b"q", b"z"]


# --- read-only directories, and compressed shards


def test_compressed_shards_are_refused_or_decompressed_where_asked(tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "plain.tar", [("1.txt", b"a"), ("2.txt", b"b")]).read_bytes()
    zstd = pa.compress(plain, "zstd", asbytes=True)
    shards = {"a.tar.gz": gzip.compress(plain), "b.tgz": gzip.compress(plain), "c.tar.xz": lzma.compress(plain)}
    shards |= {"d.tar.zst": zstd, "e.tar": gzip.compress(plain)}
    paths = []
    for name, content in shards.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content)
        with pytest.raises(SourceError, match=r"compressed with[\s\S]*decompress=True"):
            rf.open(paths[-1])
    source = rf.open(paths, decompress=True, cache_dir=tmp_path / "cache")
    assert [sample["txt"] for sample in source] == ["a", "b"] * 5
    assert [sample["txt"] for sample in pickle.loads(pickle.dumps(source))] == ["a", "b"] * 5
    paths[0].write_bytes(gzip.compress(plain)[:-9])
    with pytest.raises(CorruptError, match=r"damaged[\s\S]*a\.tar\.gz"):
        rf.open(paths[0], decompress=True, cache_dir=tmp_path / "cache")


def test_a_compressed_shard_that_is_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_compressed, "_MORE_BYTES", 1 << 16)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(UnsafeError, match=r"expands too much[\s\S]*a\.tar\.gz"):
        rf.open(tmp_path / "a.tar.gz", decompress=True, cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / ".rankfeed-decompressed").iterdir()] == [".lock"]


def test_half_a_copy_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(
        gzip.compress(write_tar(tmp_path / "a.tar", [("1.txt", b"a")]).read_bytes())
    )
    folder = tmp_path / "cache" / ".rankfeed-decompressed"
    folder.mkdir(parents=True)
    (folder / ".tmp-host-1-00000000").write_bytes(bytes(1 << 16))
    source = rf.open(tmp_path / "a.tar.gz", decompress=True, cache_dir=tmp_path / "cache")
    assert source[0]["txt"] == "a"
    assert not list(folder.glob(".tmp-*"))


def test_looking_raises_nothing_and_knows_its_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no archive")
    assert detect(str(folder)) == "webdataset"
    assert not any(detect(where, "webdataset") for where in (str(tmp_path), str(tmp_path / "text.txt"), []))
