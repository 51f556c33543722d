"""Hugging Face data sets are what `datasets` gives, sample for sample; read without it."""

import datetime
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Array2D, Array3D, ClassLabel, Dataset, DatasetDict, Features, Image, LargeList, List, Value
from tests.support.jobs import run_python
from tests.support.values import samples_of

import rankfeed as rf
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.huggingface import HuggingFaceSource

FEATURES = Features(
    {
        "n": Value("int32"),
        "x": Value("float64"),
        "text": Value("string"),
        "flag": Value("bool"),
        "tokens": List(Value("int32")),
        "wide": LargeList(Value("float32")),
        "vector": List(Value("float32"), length=3),
        "board": Array2D((2, 3), "float32"),
        "frames": Array3D((None, 2, 2), "int16"),
        "label": ClassLabel(names=["cat", "dog"]),
        "image": Image(decode=False),
        "pair": {"en": Value("string"), "fr": Value("string")},
        "words": List(Value("string")),
        "deep": List(List(Value("int8"))),
        "boxes": List({"left": Value("int16"), "top": Value("int16")}),
        "day": Value("date32"),
        "when": Value("timestamp[us]"),
    }
)


def row(i: int) -> dict[str, Any]:
    return {
        "n": i, "x": i / 3, "text": "é" * (i % 4), "flag": i % 3 == 0, "tokens": list(range(i % 5)),
        "wide": [float(i)] * (i % 3), "vector": [i, i + 1, i + 2], "board": np.full((2, 3), i).tolist(),
        "frames": np.full((i % 4 + 1, 2, 2), i).tolist(), "label": i % 2,
        "image": {"bytes": b"\x89PNG %d" % i, "path": None if i % 2 else f"{i}.png"},
        "pair": {"en": f"row {i}", "fr": f"ligne {i}"}, "words": ["a"] * (i % 3), "deep": [[i] * (i % 2), [1]],
        "boxes": [{"left": i, "top": 1}] * (i % 2), "day": datetime.date(2020, 1, 1 + i % 28),
        "when": datetime.datetime(2020, 1, 1, 0, 0, i % 60),
    }  # fmt: skip


def make(rows: int) -> Dataset:
    return Dataset.from_list([row(i) for i in range(rows)], features=FEATURES)


def flat(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of `datasets` with structs taken apart, an image's bytes, and times as the numbers they are."""
    sample = dict(sample)
    sample["image"] = sample["image"]["bytes"]
    for name, value in sample.pop("pair").items():
        sample[f"pair.{name}"] = value
    sample["day"] = (sample["day"] - datetime.date(1970, 1, 1)).days
    sample["when"] = int(sample["when"].replace(tzinfo=datetime.UTC).timestamp() * 10**6)
    return sample


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "data"
    make(60).save_to_disk(folder, num_shards=3)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_features_of_every_type_become_fields(saved: Path) -> None:
    fields = rf.open(saved).fields
    assert {name: str(field) for name, field in fields.items()} == {
        "n": "int32", "x": "float64", "text": "str", "flag": "bool", "tokens": "int32[*]", "wide": "float32[*]",
        "vector": "float32[3]", "board": "float32[2, 3]", "frames": "int16[*, 2, 2]", "label": "int64",
        "image": "bytes", "pair.en": "str", "pair.fr": "str", "words": "object", "deep": "object",
        "boxes": "object", "day": "int64", "when": "int64",
    }  # fmt: skip


def test_a_saved_folder_is_read_without_the_datasets_library(saved: Path) -> None:
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from rankfeed.sources.huggingface import HuggingFaceSource\n"
        f"s = HuggingFaceSource({str(saved)!r})\n"
        "print(s[7]['board'].tolist(), s[7]['image'], s.fingerprint)"
    )
    expected = f"{[[7.0] * 3] * 2} {row(7)['image']['bytes']} {HuggingFaceSource(saved).fingerprint}\n"
    assert run_python(code) == expected


CHANGES = {
    "as it is": lambda d: d,
    "shuffled": lambda d: d.shuffle(seed=3),
    "some": lambda d: d.select(range(10, 40)),
    "some of shuffled": lambda d: d.shuffle(seed=3).select([5, 2, 2, 40]),
    "filtered": lambda d: d.filter(lambda item: item["n"] % 3 == 0),
    "concatenated": lambda d: datasets.concatenate_datasets([d, d.select(range(5))]),
    "a shard": lambda d: d.shard(4, 1),
    "mapped": lambda d: d.map(lambda item: {"n": item["n"] + 1}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_a_dataset_object_is_read_as_datasets_returns_its_samples(change: str, kept: str, copy: Path) -> None:
    original = make(60) if kept == "in memory" else datasets.load_from_disk(str(copy))
    dataset = CHANGES[change](original)
    source = HuggingFaceSource(dataset)
    expected = list(map(flat, dataset))
    order = np.random.default_rng(0).permutation(len(dataset))
    assert samples_of(source, order) == [expected[row] for row in order]
    assert samples_of(pickle.loads(pickle.dumps(source))) == expected
    if (change, kept) == ("as it is", "on disk"):
        assert samples_of(rf.open(copy)) == expected
    assert (source.fingerprint == HuggingFaceSource(original).fingerprint) == (change == "as it is")


def test_renamed_cast_and_removed_columns_are_read_as_datasets_returns_them(saved: Path) -> None:
    dataset = datasets.load_from_disk(str(saved)).select_columns(["n", "text", "vector"])
    dataset = dataset.rename_column("n", "number").cast_column("number", Value("int16"))
    source = HuggingFaceSource(dataset)
    assert source.fields["number"] == Field("dense", "int16")
    assert samples_of(source) == list(dataset)


def test_with_format_selects_columns_and_with_transform_raises_argument_error(saved: Path) -> None:
    dataset = datasets.load_from_disk(str(saved)).with_format("torch", columns=["x", "tokens"])
    source = HuggingFaceSource(dataset)
    assert list(source.fields) == ["x", "tokens"]
    assert source[4]["x"].dtype == np.float64
    assert list(HuggingFaceSource(dataset, columns=["n"]).fields) == ["n"]
    everything = dataset.with_format("numpy", columns=["x"], output_all_columns=True)
    assert len(HuggingFaceSource(everything).fields) == 18
    with pytest.raises(ArgumentError, match=r"transform[\s\S]*from_dataset"):
        HuggingFaceSource(dataset.with_transform(lambda batch: batch))


def test_a_saved_format_selects_columns(tmp_path: Path) -> None:
    make(5).with_format("numpy", columns=["n"]).save_to_disk(tmp_path / "d")
    assert list(rf.open(tmp_path / "d").fields) == ["n"]


def test_indices_saved_by_older_versions_of_datasets_are_followed(copy: Path) -> None:
    def save_indices(rows: Any) -> None:
        table = pa.table({"indices": pa.array(rows, pa.uint64())})
        with pa.ipc.new_stream(str(copy / "indices.arrow"), table.schema) as writer:
            writer.write_table(table)

    order = np.random.default_rng(1).permutation(60)[:25]
    save_indices(order)
    state = json.loads((copy / "state.json").read_text())
    plain = rf.open(copy).fingerprint
    (copy / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    source = rf.open(copy)
    assert [int(sample["n"]) for sample in source] == order.tolist()
    assert int(source.blocks.sum()) == 25
    assert source.fingerprint != plain
    save_indices([3, 60])
    with pytest.raises(CorruptError, match=r"indices[\s\S]*up to 59[\s\S]*60"):
        rf.open(copy).fetch([0, 1])


def test_a_folder_of_several_splits_raises_argument_error_without_a_valid_split(tmp_path: Path) -> None:
    DatasetDict(train=make(7), test=make(3)).save_to_disk(tmp_path / "d")
    with pytest.raises(ArgumentError, match=r"several splits[\s\S]*'train', 'test'"):
        rf.open(tmp_path / "d")
    with pytest.raises(ArgumentError, match=r"no such split[\s\S]*'train', 'test'"):
        rf.open(tmp_path / "d", split="dev")
    assert len(rf.open(tmp_path / "d", split="test")) == len(rf.open(tmp_path / "d" / "test")) == 3
    with pytest.raises(ArgumentError, match="leave split out"):
        rf.open(tmp_path / "d" / "test", split="test")


def board(**feature: Any) -> Any:
    """A change of the description of the column "board"."""
    return lambda state, info: info["features"].update(board={"dtype": "float32", **feature})


def data_files(*names: str) -> Any:
    return lambda state, info: state.update(_data_files=[{"filename": name} for name in names])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (data_files("gone.arrow"), SourceError, r"gone\.arrow"),
        (data_files(), SourceError, "empty"),
        (lambda state, info: "{", CorruptError, r"state\.json"),
        (board(_type="Array2D", shape=[2]), CorruptError, r"shape[\s\S]*column 'board'"),
        (board(_type="Array2D", shape=[3, 2]), CorruptError, r"data-00000-of-00003\.arrow[\s\S]*row 0"),
        # Deeper than the lists that are there.
        (board(_type="Array5D", shape=[1, 1, 1, 2, 3]), CorruptError, r"data-00000-of-00003\.arrow"),
    ],
)
def test_damaged_metadata_of_a_folder_raise_an_error(change: Any, error: Any, message: str, copy: Path) -> None:
    paths = [copy / name for name in ("state.json", "dataset_info.json")]
    described = [json.loads(path.read_text()) for path in paths]
    text = change(*described)
    for path, content in zip(paths, described, strict=True):
        path.write_text(text or json.dumps(content))
    with pytest.raises(error, match=message):
        rf.open(copy).fetch([0])


def test_the_cache_of_a_dataset_in_memory_counts_only_decoded_bytes() -> None:
    rows = 300_000
    dataset = datasets.Dataset.from_dict(
        {"x": np.arange(rows), "flag": np.arange(rows) % 3 == 0, "words": [["a", "b"]] * rows},
        features=Features({"x": Value("int64"), "flag": Value("bool"), "words": List(Value("string"))}),
    )

    def kept(columns: list[str], cache_bytes: int) -> tuple[int, int]:
        source = HuggingFaceSource(dataset, cache_bytes=cache_bytes)
        for first in range(0, rows, 10_000):
            source.fetch(range(first, first + 10_000), columns)
        cache = source._table._cache
        return len(cache._entries), cache._bytes

    chunks = -(-rows // (1 << 16))
    assert kept(["x"], 0) == (chunks, 0)
    assert kept(["flag"], 1 << 20) == (chunks, rows)
    assert kept(["words"], 0) == (chunks, 0)  # objects are made of the rows asked for alone
