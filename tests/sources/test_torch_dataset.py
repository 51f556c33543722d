"""Any map-style Dataset is a source, and keeps what it returns."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import rankfeed as rf
from rankfeed.columns.columns import Objects
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, SourceError


class Dicts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError("unlucky")
        return {"x": torch.full((index % 3 + 1, 2), index), "y": index / 2, "name": str(index)}


class Many(Dicts):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"y": index} for index in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ is there")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_dicts_become_columns() -> None:
    source = rf.from_dataset(Dicts())
    assert source.as_dicts
    assert source.fields == {
        "x": Field("ragged", "int64", (2,)),
        "y": Field("dense", "float64"),
        "name": Field("str"),
    }
    batch = source.fetch([7, 2, 7])
    assert batch["y"].gather().tolist() == [3.5, 1.0, 3.5]  # type: ignore[attr-defined]
    assert batch["name"].rows() == ["7", "2", "7"]
    assert list(source.fetch([1], ["name"])) == ["name"]


def test_getitems_is_used_where_it_is() -> None:
    assert rf.from_dataset(Many()).fetch([4, 2])["y"].gather().tolist() == [4, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "found", [{"x": [1, 2]}, {4: {"x": 1}, 2: {"x": 2}}, {"4", "2"}, "42"], ids=["columns", "by id", "set", "text"]
)
def test_what_getitems_returns_without_an_order_of_samples_is_refused(found: Any) -> None:
    class Unordered(Dicts):
        def __getitems__(self, indices: list[int]) -> Any:
            return found

    with pytest.raises(SourceError, match="__getitems__ returned no list of the samples"):
        rf.from_dataset(Unordered()).samples([4, 2])


def test_tuples_and_odd_dicts_stay_what_they_are() -> None:
    source = rf.from_dataset(TensorDataset(torch.arange(5), torch.ones(5)))
    assert not source.as_dicts
    column = source.fetch([3, 1])[""]
    assert isinstance(column, Objects)
    assert [sample[0].item() for sample in column.rows()] == [3, 1]
    for odd in ({"nested": {"a": 1}}, {"none": None}, "text", object()):
        source = rf.from_dataset([odd] * 3)
        assert source.fetch([1])[""].rows() == [odd]


def test_an_error_of_the_dataset_names_the_sample() -> None:
    source = rf.from_dataset(Dicts())
    with pytest.raises(SourceError, match=r"ValueError: unlucky[\s\S]*sample 13") as caught:
        source.fetch([12, 13])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_sample_unlike_the_others_is_named() -> None:
    rows: list[Any] = [{"x": 1}] * 10
    rows[8] = {"x": 1, "y": 2}
    with pytest.raises(SourceError, match=r"unlike[\s\S]*sample 8"):
        rf.from_dataset(rows).fetch([6, 8])
    rows[8] = {"x": "text"}
    with pytest.raises(SourceError, match=r"field 'x' of sample 8"):
        rf.from_dataset(rows).fetch([6, 8])


@pytest.mark.parametrize("bad", [Stream(), [], object(), iter([1]), {"a": 1}, "text", 3])
def test_what_is_no_map_style_dataset_is_refused_with_a_remedy(bad: Any) -> None:
    with pytest.raises(SourceError):
        rf.from_dataset(bad)


def test_the_fingerprint_is_of_type_length_and_the_datasets_own() -> None:
    class Named(list[Any]):
        fingerprint = "abc"

    one, other = rf.from_dataset([{"x": 1}]), rf.from_dataset([{"x": 1}, {"x": 2}])
    assert one.fingerprint != other.fingerprint
    assert not one.identified
    named = Named([{"x": 1}])
    before = rf.from_dataset(named).fingerprint
    assert rf.from_dataset(named).identified
    named.fingerprint = "abd"
    assert rf.from_dataset(named).fingerprint != before


def test_it_travels_with_its_dataset() -> None:
    source = pickle.loads(pickle.dumps(rf.from_dataset(Dicts())))
    assert len(source) == 20
    np.testing.assert_array_equal(source[-1]["x"], np.full((2, 2), 19))
    with pytest.raises(IndexError):
        source[20]


@pytest.mark.parametrize("fields", [None, {"a": "int64", "b": "float64", "c": "int32[*]"}])
def test_a_loader_reads_some_columns_in_the_order_of_the_request(fields: Any) -> None:
    source = rf.from_dataset([{"a": i, "b": i / 2, "c": [i] * i} for i in range(6)], fields=fields)
    for columns in (["a"], ["c", "a"], ["b", "c", "a"]):
        assert list(source.fetch([4], columns)) == list(source.samples([4], columns)[0]) == columns
        expected = [key for name in columns for key in ([name, "c_lengths"] if name == "c" else [name])]
        batches = list(rf.Loader(source, 4, columns=columns, topology=rf.Topology()))
        assert [list(batch) for batch in batches] == [expected, expected]
        if "a" in columns:
            assert torch.cat([batch["a"] for batch in batches]).tolist() == list(range(6))


def test_columns_are_those_of_the_samples_and_declared_fields_those_of_the_transform() -> None:
    source = rf.from_dataset([{"a": i, "b": i / 2} for i in range(4)], fields={"double": "int64"})
    options: dict[str, Any] = {"columns": ["a"], "topology": rf.Topology()}
    loader = rf.Loader(source, 4, transform=lambda sample: {"double": 2 * sample["a"]}, **options)
    assert [batch["double"].tolist() for batch in loader] == [[0, 2, 4, 6]]
    with pytest.raises(ArgumentError, match="no such column"):
        rf.Loader(source, 4, **options)
