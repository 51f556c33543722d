"""Sources one behind the other are one source: every sample of each, in order, read once a batch."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sources.numbers import Numbers
from tests.support.tables import write_table
from tests.support.values import plain, samples_of

import rankfeed as rf
from rankfeed.columns.columns import Column, Dense, Ragged
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.concat import agreed_fields, concat_columns

ROWS = [
    {"x": np.full((i % 4, 2), i, np.float32), "y": i, "text": "é" * (i % 3), "raw": bytes([i]) * (i % 5)}
    for i in range(90)
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rf.Source]:
    folder = tmp_path_factory.mktemp("combine")
    cuts = {"a": ROWS[:40], "b": ROWS[40:41], "c": ROWS[41:]}
    return {name: rf.write(rows, folder / name, shard_bytes=800, progress=False) for name, rows in cuts.items()}


def numbers(*values: Any, dtype: Any = np.int64, name: str = "x") -> rf.Source:
    return rf.from_dataset([{name: np.asarray(value, dtype)} for value in values])


@pytest.mark.parametrize("named", [False, True])
def test_concat_has_all_samples_of_its_sources_in_order(parts: dict[str, rf.Source], named: bool) -> None:
    source = rf.concat(parts if named else list(parts.values()))
    assert len(source) == 90
    assert source.starts.tolist() == [0, 40, 41, 90]
    assert source.fields == parts["a"].fields
    assert source.blocks.tolist() == [size for part in parts.values() for size in part.blocks.tolist()]
    ids = np.random.default_rng(3).integers(0, 90, 400)
    assert samples_of(source, ids) == [plain(ROWS[row]) for row in ids]
    nested = rf.concat([rf.concat([parts["a"], parts["b"]]), rf.concat([parts["c"]])])
    assert samples_of(nested, ids) == [plain(ROWS[row]) for row in ids]
    assert nested.blocks.tolist() == source.blocks.tolist()


@given(ids=st.lists(st.integers(0, 89), min_size=1, max_size=40))
def test_concat_fetches_and_expects_the_ids_of_each_source_in_one_call(ids: list[int]) -> None:
    sources = [Numbers(40), Numbers(1), Numbers(49)]
    both = rf.concat(sources)
    values = both.fetch(ids, ["x"])["x"].gather().tolist()  # type: ignore[attr-defined]
    assert values == [sample_id - max(start for start in (0, 40, 41) if start <= sample_id) for sample_id in ids]
    both.expect(ids, ["x"])
    for source, start, stop in zip(sources, (0, 40, 41), (40, 41, 90), strict=True):
        own = [sample_id - start for sample_id in ids if start <= sample_id < stop]
        assert source.ids_read == own
        assert source.columns_read == ([["x"]] if own else [])
        assert source.expected == ([(own, ["x"])] if own else [])


def test_a_dense_and_a_ragged_source_have_ragged_columns_in_every_batch() -> None:
    dense = rf.from_dataset([{"array": row} for row in np.arange(24, dtype=np.float32).reshape(4, 3, 2)])
    ragged = rf.from_dataset([{"array": np.full((n, 2), n, np.float32)} for n in (1, 5, 0, 2)])
    source = rf.concat([dense, ragged])
    assert source.fields["array"] == Field("ragged", "float32", (2,))
    expected = [dense[i]["array"] for i in range(4)] + [ragged[i]["array"] for i in range(4)]
    for ids in ([7, 0, 5, 3, 3], [2, 1], [6, 4]):  # from both, the dense one alone, the ragged one alone
        column = source.fetch(ids)["array"]
        assert isinstance(column, Ragged)
        for place, row in zip(ids, column.rows(), strict=True):
            np.testing.assert_array_equal(row, expected[place])
    batch = next(iter(rf.Loader(source, batch_size=2)))  # the dense rows come first
    assert batch["array_lengths"].tolist() == [3, 3]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("swapped", [False, True])
def test_concat_reads_npy_files_of_any_memory_and_byte_order(order: Any, swapped: bool, tmp_path: Path) -> None:
    one = np.arange(30, dtype=np.int32).reshape(5, 3, 2)
    kind = one.dtype.newbyteorder("S" if swapped else "=")
    np.save(tmp_path / "one.npy", one)
    np.save(tmp_path / "two.npy", np.asarray(one + 100, dtype=kind, order=order))
    sources = [rf.open(tmp_path / name) for name in ("one.npy", "two.npy")]
    ids = [9, 0, 4, 5]
    got = rf.concat(sources).fetch(ids)["array"]
    assert isinstance(got, Dense)
    np.testing.assert_array_equal(got.gather(), np.concatenate([one, one + 100])[ids])
    ragged = rf.from_dataset([{"array": np.zeros((n, 2), np.int32)} for n in (1, 2)])
    mixed = rf.concat([*sources, ragged]).fetch([*ids, 10])["array"].rows()
    np.testing.assert_array_equal(mixed[0], one[4] + 100)
    assert mixed[-1].shape == (1, 2)


def test_tuples_of_concatenated_datasets_are_returned_unchanged() -> None:
    both = rf.concat([rf.from_dataset([(1, "a"), (2, "b")]), rf.from_dataset([(3, "c")])])
    assert both.fetch([2, 0, 1])[""].rows() == [(3, "c"), (1, "a"), (2, "b")]
    batches = list(rf.Loader(both, batch_size=3, num_workers=0))
    assert batches[0][0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (numbers(1), numbers(1, dtype=np.int32), ["'x'", "int64", "int32"]),
        (numbers([1, 2]), numbers([1, 2, 3]), ["'x'", "[2]", "[3]"]),
        (numbers(1.0, dtype=np.float64), numbers([1.0], dtype=np.float64), ["'x'", "[1]"]),
        (numbers([1], [1, 2]), numbers(1), ["'x'", "ragged"]),
        (rf.from_dataset([{"x": "a"}]), rf.from_dataset([{"x": b"a"}]), ["'x'", "str", "bytes"]),
        (numbers(1), numbers(1, name="z"), ["missing", "'x'", "'z'"]),
        (numbers(1), rf.from_dataset([(1, 2)]), ["missing", "not dicts"]),
    ],
)
def test_errors_for_unequal_fields_name_the_sources_and_the_column(one: Any, two: Any, words: list[str]) -> None:
    for pair in ({"first": one, "second": two}, {"first": two, "second": one}):
        with pytest.raises(SourceError) as caught:
            rf.Loader(rf.concat(pair))
        said = str(caught.value)
        for word in ("'first'", "'second'", "columns=", *words):
            assert word in said, said


def test_concat_of_npy_files_of_unequal_dtypes_names_both_files(tmp_path: Path) -> None:
    for name, kind in (("one", np.int32), ("two", np.int64)):
        np.save(tmp_path / f"{name}.npy", np.zeros(3, kind))
    with pytest.raises(SourceError, match=r"source 0.*one\.npy[\s\S]*source 1.*two\.npy"):
        rf.concat([rf.open(tmp_path / "one.npy"), rf.open(tmp_path / "two.npy")])


def test_concat_with_columns_compares_only_the_fields_of_those_columns() -> None:
    one = rf.from_dataset([{"x": 1, "only": "here", "z": np.int32(1)}])
    two = rf.from_dataset([{"z": np.int64(1), "x": 2}])
    both = rf.concat([one, two], columns=["x"])
    assert [list(sample) for sample in both] == [["x"], ["x"]]
    again = pickle.loads(pickle.dumps(both))
    assert again.fields == both.fields
    assert again.fingerprint == both.fingerprint
    with pytest.raises(SourceError, match=r"'only'[\s\S]*columns="):
        rf.concat([one, two], columns=["x", "only"]).fields  # noqa: B018
    with pytest.raises(ArgumentError, match="no such column"):
        both.fetch([0], ["z"])


def test_a_row_of_another_dtype_than_the_first_rows_raises_source_error() -> None:
    surprising = rf.from_dataset([{"x": 1}] * 15 + [{"x": 1.5}])
    both = rf.concat([numbers(1, 2), surprising])
    assert both.fetch([0, 5])["x"].gather().tolist() == [1, 1]  # type: ignore[attr-defined]
    with pytest.raises(SourceError, match=r"float64[\s\S]*'x'"):
        both.fetch([0, 17])


OWN: list[Any] = [numbers(1)]
OWN.append(OWN)  # a list that contains itself


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        *((sources, "source") for sources in ([], {}, "path", ["path"], [numbers(1), None], {"a": 3}, 7, None)),
        (numbers(1), "source"),
        (OWN, "number 1"),
        ({1: numbers(1)}, "names"),
    ],
    ids=range(11),
)
def test_concat_of_anything_but_named_or_listed_sources_raises_argument_error(sources: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rf.concat(sources)


def test_a_source_given_to_concat_twice_is_delivered_twice() -> None:
    one = numbers(5, 6)
    loader = rf.Loader(rf.concat([one, one]), batch_size=2, id_column="id")
    batches = list(loader)
    assert Counter(row for batch in batches for row in batch["id"].tolist()) == dict.fromkeys(range(4), 1)
    assert [batch["x"].tolist() for batch in batches] == [[5, 6], [5, 6]]


def test_the_fingerprint_depends_on_the_order_of_sources_not_on_their_names(parts: dict[str, rf.Source]) -> None:
    one, two, three = parts.values()
    assert rf.concat([one, two]).fingerprint == rf.concat({"x": one, "y": two}).fingerprint
    result = [rf.concat(item).fingerprint for item in ([one, two], [two, one], [one, two, three], [one], [two])]
    assert len(set(result)) == len(result)
    assert rf.concat([one]).identified
    assert not rf.concat([one, rf.from_dataset(ROWS)]).identified


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ([{}, {}], ("global", False, False, False)),
        ([{"default_shuffle": "window"}, {}], ("window", False, False, False)),
        ([{}, {"prefetch_distance": True}], ("global", False, False, True)),
        ([{"runs_user_code": True}, {}], ("global", True, False, False)),
        ([{"runs_user_code": True, "supports_batched_getitem": True}, {}], ("global", True, True, False)),
        (
            [{"runs_user_code": True, "supports_batched_getitem": True}, {"runs_user_code": True}],
            ("global", True, False, False),
        ),
    ],
)
def test_concat_combines_the_loading_attributes_of_its_sources(attributes: Any, expected: tuple[Any, ...]) -> None:
    sources = [Numbers(1) for _ in attributes]
    for source, own in zip(sources, attributes, strict=True):
        vars(source).update({"default_shuffle": "global", "prefetch_distance": False, **own})
    both = rf.concat(sources)
    result = (both.default_shuffle, both.runs_user_code, both.supports_batched_getitem, both.prefetch_distance)
    assert result == expected


def test_concat_reads_no_sample_of_a_dataset_until_its_fields_are_needed() -> None:
    class Counted(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(index)

    both = rf.concat([rf.from_dataset(Counted([{"x": 1}])), numbers(2)])
    assert Counted.reads == 0
    assert both.fields["x"] == Field("dense", "int64")


FIELDS = st.builds(
    Field,
    st.sampled_from(["dense", "ragged"]),
    st.sampled_from(["int32", "float32"]),
    st.sampled_from([(), (2,), (3,), (3, 2)]),
)


@example([Field("dense", "float32", (2,)), Field("dense", "float32", (3,)), Field("ragged", "float32")], 0)
@given(fields=st.lists(FIELDS, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_agreed_fields_hold_every_row_or_are_refused_in_any_order(fields: list[Field], seed: int) -> None:
    named = [(f"source {index}", {"x": field}) for index, field in enumerate(fields)]

    def outcome(order: list[Any]) -> Any:
        try:
            return agreed_fields(order)["x"]
        except SourceError:
            return None

    agreed = outcome(named)
    assert outcome(named[::-1]) == agreed
    if agreed is None:
        assert len(set(fields)) > 1
        return
    rng = np.random.default_rng(seed)
    rows: list[Any] = []
    pieces: list[tuple[Column, Any]] = []
    slots = rng.permutation(3 * len(fields))
    for index, field in enumerate(fields):
        lengths = rng.integers(0, 4, 3)
        shapes = [(int(length), *field.shape) if field.kind == "ragged" else field.shape for length in lengths]
        arrays = [rng.integers(0, 99, shape).astype(field.dtype) for shape in shapes]
        own = slots[3 * index : 3 * index + 3]
        rows += zip(own.tolist(), arrays, strict=True)
        pieces.append((Ragged.of(arrays) if field.kind == "ragged" else Dense.of(np.stack(arrays)), own))
    joined = concat_columns("x", agreed, pieces).rows()
    for slot, array in rows:
        np.testing.assert_array_equal(joined[slot], array)
        assert joined[slot].dtype == array.dtype


class Pictures:
    """A Dataset with the attributes of torchvision's ImageFolder."""

    def __init__(self, classes: list[str], target_transform: Any = None) -> None:
        self.classes, self.target_transform = classes, target_transform

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return {"x": index, "label": index} if "dict" in self.classes else (index, index)


def test_concat_of_folders_with_unequal_classes_raises_source_error(tmp_path: Path) -> None:
    for name in ("A/cat", "A/dog", "B/bird", "B/cat"):
        (tmp_path / name).mkdir(parents=True)
        np.save(tmp_path / name / "0.npy", np.zeros(2, np.float32))
    first, second = (rf.open(tmp_path / name, labels="folder") for name in "AB")
    for other in (second, second.select([0]), rf.write(second, tmp_path / "written", workers=0, progress=False)):
        with pytest.raises(SourceError) as caught:
            rf.concat({"a": first, "b": other})
        for word in ("column 'label'", "['cat', 'dog']", "['bird', 'cat']", "source 'a'", "source 'b'", "labels="):
            assert word in str(caught.value)
    assert len(rf.concat([first, second], columns=["array"])) == 4
    same = [rf.open(tmp_path / name, labels=["bird", "cat", "dog"]) for name in "AB"]
    assert Counter(rf.concat(same).fetch(range(4))["label"].gather().tolist()) == Counter([1, 2, 0, 1])


def test_hugging_face_datasets_with_unequal_classes_raise_source_error(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def labelled(names: list[str]) -> Any:
        features = {"label": datasets.ClassLabel(names=names), "all": [datasets.ClassLabel(names=names)]}
        return datasets.Dataset.from_dict({"label": [0], "all": [[0, 1]]}, features=datasets.Features(features))

    one, two = labelled(["cat", "dog"]), labelled(["bird", "cat"])
    two.save_to_disk(tmp_path / "saved")
    two.to_parquet(tmp_path / "two.parquet")
    first = rf.from_dataset(one)
    for other in (rf.from_dataset(two), rf.open(tmp_path / "saved"), rf.open(tmp_path / "two.parquet")):
        for column in ("label", "all"):
            with pytest.raises(SourceError, match=r"(?s)'cat', 'dog'.*'bird', 'cat'.*map with new features"):
                rf.concat([first, other], columns=[column])
    assert len(rf.concat([first, rf.from_dataset(labelled(["cat", "dog"]))])) == 2
    one.to_parquet(tmp_path / "one.parquet")
    files = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    with pytest.raises(SourceError, match=r"(?s)'cat', 'dog'.*one\.parquet.*'bird', 'cat'.*two\.parquet"):
        rf.open(files, columns=["label"])
    features = datasets.Features({"label": datasets.ClassLabel(names=["cat", "dog", "bird"])})

    def aligned(dataset: Any) -> Any:
        text, index = dataset.features["label"].int2str, features["label"].str2int
        return dataset.select_columns("label").map(
            lambda row: {"label": index(text(row["label"]))}, features=features
        )

    both = rf.concat([rf.from_dataset(aligned(dataset)) for dataset in (one, two)])
    assert both.fetch([0, 1])["label"].gather().tolist() == [0, 2]


def test_the_error_for_long_lists_of_classes_shows_them_from_the_first_difference() -> None:
    names = [f"class {index:04}" for index in range(1000)]
    both = rf.concat([rf.from_dataset(Pictures(names)), rf.from_dataset(Pictures([*names[:-1], "another"]))])
    with pytest.raises(SourceError, match="class 0999") as caught:
        _ = both.fields
    assert "'another'" in str(caught.value)
    assert len(str(caught.value)) < 2500


def test_torch_datasets_with_unequal_classes_raise_source_error() -> None:
    one, two = Pictures(["cat", "dog"]), Pictures(["bird", "cat"])
    subset = torch.utils.data.Subset(two, [1])  # type: ignore[arg-type]
    for other in (two, subset):
        both = rf.concat([rf.from_dataset(one), rf.from_dataset(other)])
        with pytest.raises(SourceError, match=r"(?s)'cat', 'dog'.*'bird', 'cat'.*target_transform"):
            next(iter(rf.Loader(both)))
    for other in (Pictures(["cat", "dog"]), Pictures(["bird", "cat"], lambda label: label), [(0, 1)]):
        assert rf.concat([rf.from_dataset(one), rf.from_dataset(other)]).fields


def times(folder: Path, name: str, kind: pa.DataType) -> rf.Source:
    """A file with integers of an Arrow type in a column, a list, a fixed-size list, and a struct."""
    values = pa.array([1, 2], pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)
    columns = {
        "t": values,
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), values),
        "fixed": pa.FixedSizeListArray.from_arrays(values, 1),
        "in": pa.StructArray.from_arrays([values], ["t"]),
    }
    suffix = "feather" if kind == pa.date64() else "parquet"  # which has no such type
    return rf.open(write_table(pa.table(columns), folder / f"{name}.{suffix}"))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.duration("ms"), pa.duration("us")),
        (pa.date32(), pa.date64()),
        (pa.time32("s"), pa.time64("us")),
        (pa.timestamp("us"), pa.int64()),
        (pa.duration("us"), pa.timestamp("us")),
    ],
)
def test_times_in_unequal_units_raise_source_error(one: pa.DataType, two: pa.DataType, tmp_path: Path) -> None:
    first, second = times(tmp_path, "one", one), times(tmp_path, "two", two)
    stored = [str(source.logical_types["t"]) for source in (first, second)]
    for column in first.fields:
        for pair in ([first, second], [second, first]):
            with pytest.raises(SourceError) as caught:
                rf.concat(pair, columns=[column])
            assert all(word in str(caught.value) for word in (repr(column), *stored, "rankfeed.write", "types="))
        assert len(rf.concat([first, first.select([1])], columns=[column])) == 3
    packed = rf.write(first, tmp_path / "packed", workers=0, progress=False)
    assert len(rf.concat([packed, first])) == 4
    with pytest.raises(SourceError, match="meanings"):
        rf.concat([packed, second])
    own = rf.from_dataset([{"t": 3}])
    assert rf.concat([first, own], columns=["t"]).fields  # a Dataset of Python numbers states no unit


def test_text_files_with_times_in_unequal_units_raise_source_error(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("t\n2020-01-01 00:00:00\n")
    (tmp_path / "ns.csv").write_text("t\n2020-01-01 00:00:00.5\n")
    (tmp_path / "t.jsonl").write_text('{"t": "2020-01-01"}\n')
    seconds, nanoseconds = rf.open(tmp_path / "s.csv"), rf.open(tmp_path / "ns.csv")
    with pytest.raises(SourceError, match=r"(?s)timestamp\[s\].*timestamp\[ns\].*types="):
        rf.concat([seconds, nanoseconds])
    both = rf.concat([rf.open(tmp_path / name, types={"t": "timestamp[us]"}) for name in ("s.csv", "ns.csv")])
    assert both.fetch([0, 1])["t"].gather().tolist() == [1577836800000000, 1577836800500000]
    assert len(rf.concat([seconds, rf.open(tmp_path / "t.jsonl")])) == 2


def test_lance_tables_with_times_in_unequal_units_raise_source_error(tmp_path: Path) -> None:
    for name, unit in (("a", "ms"), ("b", "us")):
        write_table(pa.table({"t": pa.array([1], pa.timestamp(unit))}), tmp_path / f"{name}.lance")
    with pytest.raises(SourceError, match=r"(?s)timestamp\[ms\].*timestamp\[us\]"):
        rf.concat([rf.open(tmp_path / "a.lance"), rf.open(tmp_path / "b.lance")])
