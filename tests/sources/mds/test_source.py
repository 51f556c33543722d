"""MDS shards are read as they lie, equal to MosaicML Streaming's own reader; damage is named."""

import json
import shutil
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.sources import compare
from tests.sources.libraries import image_file
from tests.sources.mds.streaming_mds import LocalDataset, merge_index, write

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.columns.pointers import Memory
from rankfeed.errors import ArgumentError, CorruptError, SourceError, UnsafeError
from rankfeed.sources.mds.encodings import encoding_of
from rankfeed.sources.mds.mds_source import MdsSource
from rankfeed.sources.scattered import ByteSlices

COLUMNS = {
    "raw": "bytes",
    "text": "str",
    "label": "int",
    "small": "uint8",
    "half": "float16",
    "image": "ndarray:float32:3,2",
    "tokens": "ndarray:int32",
    "any": "ndarray",
    "big": "ndarray:int16:300",
    "digits": "str_int",
    "real": "str_float",
    "exact": "str_decimal",
    "notes": "json",
}


def sample(i: int) -> dict[str, Any]:
    return {
        "raw": bytes([i % 256]) * (i % 7),
        "text": "é" * (i % 5),
        "label": i - 20,
        "small": np.uint8(i),
        "half": np.float16(i / 3),
        "image": np.full((3, 2), i, np.float32),
        # Some longer than 255, so that the widths of their shapes differ.
        "tokens": np.arange(1 + i * 97 % 400, dtype=np.int32),
        "any": np.full((1 + i % 3, 2), i, np.float64),
        "big": np.full(300, i, np.int16),
        "digits": 10**i if i < 18 else -i,
        "real": i / 7,
        "exact": Decimal(i) / 10,
        "notes": {"i": i, "nested": [i, None, "x"]},
    }


ROWS = [sample(i) for i in range(60)]


COMPRESSIONS = [None, "zstd", "zstd:7", "gz", "bz2", "br", "snappy"]
#: Gives the folder of the dataset by its compression.
Folders = Callable[[str | None], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Written once for each compression, with several shards of unequal lengths."""
    options = {"hashes": ["sha1", "xxh64"], "size_limit": 20_000}
    return cache(
        lambda codec: write(tmp_path_factory.mktemp("mds") / "data", COLUMNS, ROWS, compression=codec, **options)
    )


@pytest.fixture
def copy(folders: Folders, tmp_path: Path) -> Folders:
    return lambda compression: Path(shutil.copytree(folders(compression), tmp_path / "copy"))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_samples_are_those_of_the_reader_of_mosaicml_streaming(compression: str | None, folders: Folders) -> None:
    source = rf.open(folders(compression))
    assert isinstance(source, MdsSource)
    # Its own reader reads decompressed shards only, and leaves them there: it gets the same data uncompressed.
    expected = LocalDataset(str(folders(None)))
    assert len(source) == len(expected) == 60
    order = np.random.default_rng(0).permutation(60)
    for i, result in zip(order.tolist(), source.fetch(order).samples(), strict=True):
        assert compare.difference(result, expected[i]) is None
    assert list(source.fields) == sorted(COLUMNS)
    assert (source.decoded_bytes > 0) == (compression is not None)
    assert int(source.blocks.sum()) == 60
    assert len(source.blocks) > 1


def test_fields_have_the_types_of_the_mds_encodings(folders: Folders) -> None:
    assert rf.open(folders(None)).fields == {
        "any": Field("ragged", "float64", (2,)),
        "big": Field("dense", "int16", (300,)),
        "digits": Field("dense", "int64"),
        "exact": Field("object"),
        "half": Field("dense", "float16"),
        "image": Field("dense", "float32", (3, 2)),
        "label": Field("dense", "int64"),
        "notes": Field("object"),
        "raw": Field("bytes"),
        "real": Field("dense", "float64"),
        "small": Field("dense", "uint8"),
        "text": Field("str"),
        "tokens": Field("ragged", "int32"),
    }


@pytest.mark.parametrize("encoding", ["int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float32"])
def test_unaligned_numbers_of_every_width_are_read(encoding: str, tmp_path: Path) -> None:
    # The odd column before them shifts them off their alignment.
    kind = np.dtype(encoding).type
    rows = [{"a": bytes(i % 3), "b": kind(i * 2), "c": np.full(2, i, encoding)} for i in range(50)]
    write(tmp_path / "d", {"a": "bytes", "b": encoding, "c": f"ndarray:{encoding}:2"}, rows, size_limit=600)
    batch: Any = rf.open(tmp_path / "d").fetch(np.arange(50)[::-1])
    np.testing.assert_array_equal(batch["b"].gather(), np.arange(50)[::-1] * 2)
    np.testing.assert_array_equal(batch["c"].gather()[:, 1], np.arange(50)[::-1])
    assert batch["b"].gather().dtype == encoding


def test_images_are_those_of_mosaicml_streaming_or_bytes_without_decoding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (5 + i, 7, 3), np.uint8)) for i in range(6)]
    files = [image_file({"y": i}, "JPEG") for i in range(6)]
    columns = {
        "jpeg": "jpeg", "png": "png", "pil": "pil", "array": "jpeg_array",
        "pils": "list[pil]", "jpegs": "list[jpeg]", "pngs": "list[png]",
    }  # fmt: skip
    rows = [
        {"jpeg": item, "png": item, "pil": item.convert("1" if i % 2 else "RGBA"), "array": files[: i + 1],
         "pils": [item, item.convert("L")], "jpegs": [item] * 2, "pngs": [item] * i}
        for i, item in enumerate(images)
    ]  # fmt: skip
    write(tmp_path / "d", columns, rows)
    expected = LocalDataset(str(tmp_path / "d"))
    source = rf.open(tmp_path / "d")
    for i in range(6):
        result = source[i]
        for name, value in expected[i].items():
            ours, theirs = ((item if isinstance(item, list) else [item]) for item in (result[name], value))
            assert len(ours) == len(theirs)
            for our, their in zip(ours, theirs, strict=True):
                assert our.mode == their.mode
                np.testing.assert_array_equal(np.asarray(our), np.asarray(their))
    kept = rf.open(tmp_path / "d", decode=False)
    assert kept.fields["jpeg"] == Field("bytes")
    assert Image.open(BytesIO(kept[2]["jpeg"])).size == images[2].size


def test_pickled_columns_are_refused_unless_allow_pickle_is_set(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "went off",))

    write(tmp_path / "d", {"x": "int", "y": "pkl"}, [{"x": 1, "y": Bomb()}, {"x": 2, "y": {"a"}}])
    with pytest.raises(UnsafeError, match=r"pickled[\s\S]*index\.json, column 'y'[\s\S]*allow_pickle"):
        rf.open(tmp_path / "d")
    assert rf.open(tmp_path / "d", columns=["x"])[1] == {"x": 2}
    assert isinstance(rf.open(tmp_path / "d", decode=False)[0]["y"], bytes)
    assert not (tmp_path / "went off").exists()
    assert rf.open(tmp_path / "d", allow_pickle=True)[1]["y"] == {"a"}


def test_arrays_of_different_types_and_shapes_are_an_object_column(tmp_path: Path) -> None:
    rows = [{"x": np.zeros((2, 1 + i % 3), ["f4", "i8"][i % 2])} for i in range(20)]
    write(tmp_path / "d", {"x": "ndarray"}, rows)
    source = rf.open(tmp_path / "d")
    assert source.fields == {"x": Field("object")}
    for i in range(20):
        np.testing.assert_array_equal(source[i]["x"], rows[i]["x"])
        assert source[i]["x"].dtype == rows[i]["x"].dtype


def test_an_array_unlike_the_others_is_an_error_unless_its_column_is_of_objects(tmp_path: Path) -> None:
    rows = [{"x": np.zeros((2, 3 if i == 34 else 4), np.float32)} for i in range(100)]
    write(tmp_path / "d", {"x": "ndarray:float32"}, rows)
    with pytest.raises(SourceError, match=r"unlike[\s\S]*sample 34, column 'x'[\s\S]*objects="):
        rf.open(tmp_path / "d").fetch(np.arange(100))
    assert rf.open(tmp_path / "d", objects=["x"])[34]["x"].shape == (2, 3)
    with pytest.raises(ArgumentError, match="no such column"):
        rf.open(tmp_path / "d", objects=["nope"])


def test_merged_folders_and_lists_of_folders_are_one_dataset(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / str(part), {"x": "int"}, [{"x": 10 * part + i} for i in range(4 + part)])
    expected = [10 * part + i for part in range(3) for i in range(4 + part)]
    listed = rf.open([tmp_path / str(part) for part in range(3)])
    merge_index([str(tmp_path / str(part) / "index.json") for part in range(3)], str(tmp_path))
    merged = rf.open(tmp_path)
    for source in (listed, merged):
        assert [int(item["x"]) for item in source] == expected


def edited(folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    """A folder with another list of shards in its index."""
    index = json.loads((folder / "index.json").read_text())
    change(index["shards"])
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def raw(**changes: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda shards: shards[1]["raw_data"].update(changes)


def shard(**changes: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda shards: shards[1].update(changes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (raw(bytes=5), CorruptError, r"another size[\s\S]*shard\.00001"),
        (raw(basename="gone.mds"), CorruptError, r"missing[\s\S]*gone\.mds"),
        (shard(samples=61), CorruptError, r"shard\.00001[\s\S]*fetch the file"),
        (shard(samples=2**31), CorruptError, r"shard\.00001"),
        (shard(samples=-1), CorruptError, r"index\.json"),
        (shard(column_sizes=[0]), CorruptError, r"contradict[\s\S]*index\.json"),
        (lambda shards: shards[1]["column_sizes"].__setitem__(1, 9), SourceError, r"differ[\s\S]*shard\.00001"),
        (shard(version=3), SourceError, r"version 3[\s\S]*index\.json"),
        (shard(format="json"), SourceError, r"format 'json'[\s\S]*MDSWriter"),
        (lambda shards: shards[1].pop("samples"), CorruptError, r"samples[\s\S]*index\.json"),
        (
            lambda shards: shards.append(shards[1]),
            CorruptError,
            r"more than once[\s\S]*'shard\.00001\.mds' once[\s\S]*found: 2 times",
        ),
        (lambda shards: shards.pop(1), CorruptError, r"not in the index[\s\S]*shard\.00001\.mds"),
    ],
)
def test_wrong_mds_index_entries_are_errors(change: Any, error: Any, message: str, copy: Folders) -> None:
    with pytest.raises(error, match=message):
        rf.open(edited(copy(None), change)).fetch(np.arange(60))


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_a_shard_that_expands_to_more_than_the_index_says_is_an_error(compression: str, copy: Folders) -> None:
    folder = edited(copy(compression), lambda shards: raw(bytes=shards[1]["raw_data"]["bytes"] - 1)(shards))
    with pytest.raises(CorruptError, match=r"shard\.00001\.mds"):
        rf.open(folder).fetch(np.arange(60))


def test_wrong_sizes_shapes_and_encodings_in_the_index_are_errors(copy: Folders) -> None:
    folder = copy(None)
    text = (folder / "index.json").read_text()
    shards = {path: path.read_bytes() for path in folder.glob("*.mds")}

    def replace(old: str, new: str) -> None:  # in the headers of the shards too, which would contradict the index
        (folder / "index.json").write_text(text.replace(old, new))
        for path, content in shards.items():
            path.write_bytes(content.replace(old.encode(), new.encode(), 1))

    replace("600,", "596,")  # of "big", 300 int16
    with pytest.raises(CorruptError, match=r"shard\.00000\.mds, sample 0"):
        rf.open(folder).fetch([0])
    replace('"ndarray:int16:300"', '"ndarray:int16:299"')
    with pytest.raises(CorruptError, match=r"shard\.00000\.mds, sample 0, column 'big'"):
        rf.open(folder).fetch([0])
    (folder / "index.json").write_text(text.replace('"ndarray:int16:300"', '"ndarray:object:300"'))
    with pytest.raises(SourceError, match=r"unknown encoding[\s\S]*column 'big'"):
        rf.open(folder)
    (folder / "index.json").write_text(text[:-100])
    with pytest.raises(CorruptError, match=r"index\.json"):
        rf.open(folder)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("entry", "old", "new"),
    [("names", '["a", "b"]', '["b", "a"]'), ("encodings", '["int", "int"]', '["int", "float64"]')],
)
def test_a_shard_header_that_contradicts_the_index_is_an_error(
    entry: str, old: str, new: str, compression: str | None, tmp_path: Path
) -> None:
    rows = [{"a": i, "b": -i} for i in range(50)]
    folder = write(tmp_path / "d", {"a": "int", "b": "int"}, rows, size_limit=400, compression=compression)
    text = (folder / "index.json").read_text()
    assert text.count(old) > 1
    (folder / "index.json").write_text(text.replace(old, new))
    message = rf"contradicts the index[\s\S]*expected: column_{entry}[\s\S]*found: [\s\S]*shard\.00000\.mds"
    with pytest.raises(CorruptError, match=message):
        rf.open(folder).fetch([0])


def test_a_shard_header_that_is_not_json_is_an_error(copy: Folders) -> None:
    path = copy(None) / "shard.00000.mds"
    path.write_bytes(path.read_bytes().replace(b"{", b"<", 1))
    with pytest.raises(CorruptError, match=r"shard is damaged[\s\S]*header[\s\S]*shard\.00000\.mds"):
        rf.open(path.parent).fetch([0])


@pytest.mark.parametrize("digits", [b"9" * 30, b"x1", b""])
def test_a_str_int_text_that_is_no_64_bit_integer_is_an_error(digits: bytes) -> None:
    encoding = encoding_of("str_int", "digits", "index.json")
    content, lengths = np.frombuffer(b"12" + digits, np.uint8), np.array([2, len(digits)])
    values = ByteSlices(Memory(content), np.array([0, 2]), lengths, None, lambda row: f"sample {row}")
    with pytest.raises(CorruptError, match=r"decoded[\s\S]*sample 1"):
        encoding.part(encoding.field(lambda: [values]), values)


@pytest.mark.parametrize("value", [0, 1 << 20, 0xFFFFFFFF])
def test_a_sample_offset_out_of_bounds_is_an_error_with_its_sample(value: int, copy: Folders) -> None:
    folder = copy(None)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[4 + 4 * 2 : 4 + 4 * 3] = value.to_bytes(4, "little")
    path.write_bytes(content)
    source = rf.open(folder, columns=["text"])
    assert source[0] == {"text": ROWS[0]["text"]}  # those before it are whole
    with pytest.raises(CorruptError, match=r"shard\.00000\.mds, sample 2"):
        source.fetch([0, 2])
    with pytest.raises(CorruptError, match=r"shard\.00000\.mds, sample 1"):
        rf.open(folder)  # looks at arrays to learn their shapes


def test_a_wrong_checksum_is_an_error_with_check_true(copy: Folders) -> None:
    folder = copy(None)
    path = folder / "shard.00001.mds"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"sha1[\s\S]*shard\.00001\.mds"):
        rf.open(folder, check=True).fetch(np.arange(60))
