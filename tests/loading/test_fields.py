"""The fields of all batches are fixed before the first one, and no value is converted with loss."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loading.feeds import ENGINES, NAMES, Memory, Pair, ReusedOutput, StatefulStream, Wrapped, same, take
from torch.utils.data import Dataset

import rankfeed as rf
from rankfeed.errors import RankfeedError, SourceError, StreamError, TransformError

every_engine = pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
#: A sample, of 100, that no loader reads before its first step.
OTHER = 50


class Made:
    """100 samples that a function makes of their numbers; counts what is read."""

    def __init__(self, make: Callable[[int], Any], size: int = 100) -> None:
        self.make, self.size, self.read = make, size, Counter[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.make(index)


def but(number: int, odd: Any, usual: Any) -> Callable[[int], Any]:
    return lambda index: odd if index == number else usual


def kinds(batch: Any) -> Any:
    """Names, types and dimensions of a batch, without sizes that may differ."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), batch.ndim
    if isinstance(batch, dict):
        return {name: kinds(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return type(batch), tuple(map(kinds, batch))
    return type(batch)


def ones(index: int) -> dict[str, Any]:
    """Of one length in many a batch."""
    return {"x": np.ones(1 + (index % 10 == 7), np.float32), "y": index}


@every_engine
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_field_declared_ragged_has_lengths_in_every_batch_on_every_rank(
    engine: dict[str, Any], ranks: int
) -> None:
    seen = []
    for rank in range(ranks):
        source, topology = rf.from_dataset(Made(ones), ragged=["x"]), rf.Topology(rank=rank, world_size=ranks)
        for batch in rf.Loader(source, 2, topology=topology, **engine):
            seen.append(str(kinds(batch)))
            assert batch["x_lengths"].tolist() == [1 + (y % 10 == 7) for y in batch["y"].tolist()]
    assert len(Counter(seen)) == 1


def test_a_field_whose_first_dimension_differs_among_eight_probed_samples_is_ragged() -> None:
    loader = rf.Loader(rf.from_dataset(Made(lambda index: {"x": np.ones((index % 5, 2))})), 1)
    expected = {"x": ("torch.float64", 3), "x_lengths": ("torch.int64", 1)}
    assert [kinds(batch) for batch in loader] == [expected] * 100


@every_engine
def test_an_empty_list_does_not_change_the_dtype_of_a_field(engine: dict[str, Any]) -> None:
    rows = [{"x": [9007199254740993]}, {"x": []}]
    (batch,) = rf.Loader(rf.from_dataset(rows), 2, **engine)
    assert (batch["x"].tolist(), batch["x_lengths"].tolist()) == ([[9007199254740993], [0]], [1, 0])
    (batch,) = rf.Loader(rf.from_iterable(rows), 2, **engine)
    assert batch["x"].tolist() == [[9007199254740993], [0]]
    (batch,) = rf.Loader(rf.from_dataset([([], 0), ([[1, 2]], 1)]), 2, **engine)
    assert batch[0][0].tolist() == [[[0, 0]], [[1, 2]]]


def test_more_samples_are_probed_for_the_dtype_if_the_first_eight_lists_are_empty() -> None:
    rows = [{"x": [5] if index == 62 else []} for index in range(400)]
    assert all(batch["x"].dtype == torch.int64 for batch in rf.Loader(rf.from_dataset(rows), 10))
    rows = [{"x": [5] if index == 399 else []} for index in range(400)]
    with pytest.raises(SourceError, match=r'(?s)sample 399,.*fields=\{"x": "int64\[\*\]"\}'):
        list(rf.Loader(rf.from_dataset(rows), 10))
    declared = rf.from_dataset(rows, fields={"x": "int64[*]"})
    assert [batch["x"].dtype for batch in rf.Loader(declared, 400)] == [torch.int64]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5], torch.float64),
        ([2**53, 0.5], torch.float64),
        ([1, 2**63 + 1], torch.uint64),
        ([[1, 2**63 + 1], []], torch.uint64),
        ([np.int32(1), np.int64(2**40)], torch.int64),
        ([np.float32(1.5), 2], torch.float64),
        ([True, 2], torch.int64),
        ([np.array([1]), np.array([1.5])], torch.float64),
    ],
    ids=str,
)
def test_values_of_different_types_are_promoted_to_a_dtype_that_holds_both(
    values: list[Any], dtype: torch.dtype
) -> None:
    for source in (rf.from_dataset([{"x": value} for value in values]), rf.from_iterable([(v,) for v in values])):
        (batch,) = rf.Loader(source, 2)
        column = batch["x"] if isinstance(batch, dict) else batch[0]
        column = column[0] if isinstance(column, tuple) else column
        assert column.dtype == dtype
        for found, value in zip(column.tolist(), values, strict=True):
            assert (found[: len(value)] if isinstance(value, list) else found) == value


@pytest.mark.parametrize(
    "values",
    [
        *([2**53 + 1, 0.5], [[2**53 + 1, 0.5], [1.5]], [np.array([2**53 + 1]), np.array([0.5])]),
        *([-1, 2**63 + 1], [[-1, 2**63 + 1], [1]], [2**70, 1], [[2**70], [1]]),
        *([np.longdouble(1) / 3, np.longdouble(2)], [np.ones(2, np.longdouble), np.ones(2)], [1, "a"]),
        *([None, 1], [{"a": 1}, {"b": 1}], [(1, 2, "a"), (1, "a")]),
    ],
    ids=str,
)
def test_values_without_a_common_dtype_raise_an_error_naming_the_sample(values: list[Any]) -> None:
    for rows in ([{"x": value} for value in values], [(value, 0) for value in values]):
        for source in (rf.from_dataset(rows), rf.from_iterable(rows)):
            with pytest.raises(RankfeedError, match=r"sample [01]"):
                list(rf.Loader(source, 2))


@every_engine
@pytest.mark.parametrize(
    ("odd", "usual", "said"),
    [
        ({"x": 1}, {"x": 1, "y": 2}, "no 'y'"),
        ({"x": 1, "y": 2}, {"x": 1}, "also 'y'"),
        (
            {"x": np.ones(3)},
            {"x": np.ones(2)},
            r"(?s)float64\[2\].*float64\[3\].*from_dataset\(dataset, ragged=\[.x.\]\)",
        ),
        ({"x": np.ones((1, 3))}, {"x": np.ones((1, 2))}, r'(?s)\[1, 2\].*\[1, 3\].*ragged="list".*collate_fn'),
        ({"x": 2.5}, {"x": 1}, r'(?s)int64.*float64.*from_dataset\(dataset, fields=\{"x": "float64"\}\)'),
        ({"x": 2**53 + 1}, {"x": 0.5}, r"(?s)float64.*9007199254740993"),
        ({"x": 2**63 + 1}, {"x": 1}, r'(?s)int64.*9223372036854775809.*fields=\{"x": "uint64"\}'),
        ({"x": np.longdouble(1) / 3}, {"x": 1.5}, "dtype float128"),
        ({"x": "\ud800"}, {"x": "a"}, "surrogates"),
        ({"x": "a"}, {"x": 1}, "str: 'a'"),
        ({"x": None}, {"x": 1}, "None"),
        ({"x": 1}, {"x": b"a"}, "int"),
        ({"x": [0.5]}, {"x": [1]}, r'(?s)int64\[\*\].*fields=\{"x": "float64\[\*\]"\}'),
        ((np.ones(3), 1), (np.ones(2), 1), r"from_dataset\(dataset, ragged=\[0\]\)"),
        ((1, 2, 3), (1, 2), r"(?s)expected: 2.*found: 3"),
        (5, {"x": 1}, "(?s)a dict with 'x'.*int"),
    ],
    ids=str,
)
def test_a_later_sample_that_does_not_fit_its_field_raises_source_error_naming_sample_and_step(
    engine: dict[str, Any], odd: Any, usual: Any, said: str
) -> None:
    loader = rf.Loader(rf.from_dataset(Made(but(OTHER, odd, usual))), 4, **engine)
    with pytest.raises(SourceError, match=said) as caught:
        list(loader)
    assert "sample 50, rank 0, epoch 0, step 12" in str(caught.value)


def test_declaring_ragged_or_fields_as_the_error_suggests_fixes_mismatched_samples() -> None:
    dataset = Made(but(OTHER, {"x": np.ones(3)}, {"x": np.ones(2)}))
    assert all("x_lengths" in batch for batch in rf.Loader(rf.from_dataset(dataset, ragged=["x"]), 4))
    source = rf.from_dataset(Made(but(OTHER, {"x": 2.5}, {"x": 1})), fields={"x": "float64"})
    assert {batch["x"].dtype for batch in rf.Loader(source)} == {torch.float64}
    dataset = Made(but(OTHER, (np.ones(3), 1), (np.ones(2), 1)))
    for (padded, lengths), _ in rf.Loader(rf.from_dataset(dataset, ragged=[0]), 4):
        assert padded.shape[1] == int(lengths.max())


def shaped(index: int) -> dict[str, Any]:
    return {"x": np.full((1 + index % 3, 1 + index % 2), index)}


def test_arrays_that_differ_beyond_the_first_dimension_raise_an_error_unless_ragged_is_list() -> None:
    with pytest.raises(SourceError, match=r'(?s)before the first.*ragged="list".*collate_fn'):
        next(iter(rf.Loader(rf.from_dataset(Made(shaped)), 4)))
    with pytest.raises(TransformError, match=r'(?s)the transform.*before the first.*ragged="list".*collate_fn'):
        next(iter(rf.Loader(rf.from_dataset(Made(int)), 4, transform=shaped)))
    batch = next(iter(rf.Loader(rf.from_dataset(Made(shaped)), 4, ragged="list")))
    assert [each.shape for each in batch["x"]] == [(1, 1), (2, 2), (3, 1), (1, 2)]


@every_engine
def test_tuple_batches_hold_a_pair_of_padded_tensor_and_lengths_for_a_ragged_element(
    engine: dict[str, Any],
) -> None:
    rows = [(np.full((i % 3, 2), i), i, {"z": [i] * (i % 2), "s": str(i)}) for i in range(9)]
    for batch in rf.Loader(rf.from_dataset(rows), 3, **engine):
        (padded, lengths), numbers, rest = batch
        assert padded.shape == (3, 2, 2)
        assert lengths.tolist() == [0, 1, 2]
        assert rest["z_lengths"].tolist() == [index % 2 for index in numbers.tolist()]
        assert rest["s"] == [str(index) for index in numbers.tolist()]
    pairs = rf.from_dataset([Pair(np.ones(index), "a") for index in range(3)])
    (batch,) = rf.Loader(pairs, 3, **engine)
    assert type(batch) is Pair
    assert batch.image[1].tolist() == [0, 1, 2]
    (batch,) = rf.Loader(pairs, 3, ragged="list", **engine)
    assert [len(each) for each in batch.image] == [0, 1, 2]


def test_fields_are_inferred_once_from_the_same_eight_samples_on_every_rank_at_the_first_step() -> None:
    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        calls.append(sample["y"])
        return {**sample, "draw": rng.random(), "other": random.random(), "third": np.random.rand()}

    calls: list[int] = []
    probes = []
    for rank, done in ((0, 0), (2, 0), (1, 3)):
        dataset = Made(ones)
        source, topology = rf.from_dataset(dataset, ragged=["x"]), rf.Topology(rank=rank, world_size=3)
        loader = rf.Loader(source, 5, transform=transform, topology=topology)
        loader.load_state_dict({**loader.state_dict(), "position": 15 * done, "steps": done})
        assert len(loader)
        assert not dataset.read
        calls.clear()
        torch.manual_seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        steps = iter(loader)
        next(steps)
        assert len(calls) == 8 + 5
        probes.append(calls[:8])
        list(steps)
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        calls.clear()
        list(loader)
        assert len(calls) <= 35, "only once"
    assert probes[0] == probes[1] == probes[2]
    assert len(Counter(probes[0])) == 8


def test_declared_fields_are_used_without_probing_samples() -> None:
    dataset = Made(ones)
    source = rf.from_dataset(dataset, fields={"x": "float32[*]", "y": "int64"})
    assert list(source.fields) == ["x", "y"]
    batch = next(iter(rf.Loader(source, 4)))
    assert sum(dataset.read.values()) == 4
    assert batch["x_lengths"].tolist() == [1] * 4
    dataset = Made(lambda index: (index, [index], "a"))
    source = rf.from_dataset(dataset, fields=("int32", "int8[*]", "str"))
    numbers, (padded, lengths), texts = next(iter(rf.Loader(source, 2)))
    assert (numbers.dtype, padded.dtype, lengths.tolist(), texts) == (torch.int32, torch.int8, [1, 1], ["a", "a"])
    with pytest.raises(SourceError, match=r"(?s)int8.*sample 128, "):
        list(rf.Loader(rf.from_dataset(Made(lambda index: {"x": index}, 200), fields={"x": "int8"}), 4))
    with pytest.raises(SourceError, match=r"(?s)float32.*float64.*sample 0, "):
        list(rf.Loader(rf.from_dataset([{"x": 0.1}], fields={"x": "float32"}), 4))


@pytest.mark.parametrize(
    "fields", [5, {}, {"x": "number"}, {"x": "int64[a]"}, {"x": "S5"}, {"x": ()}, {"x": "float32[2, *]"}]
)
def test_invalid_fields_declarations_raise_argument_error(fields: Any) -> None:
    with pytest.raises(rf.errors.ArgumentError):
        rf.from_dataset([{"x": 1}], fields=fields)


def test_invalid_or_unknown_names_in_ragged_of_from_dataset_or_from_iterable_raise_an_error() -> None:
    for ragged in ("x", 5, [1.5]):
        with pytest.raises(rf.errors.ArgumentError, match="invalid ragged"):
            rf.from_dataset([{"x": 1}], ragged=ragged)  # type: ignore[arg-type]
        with pytest.raises(rf.errors.ArgumentError, match="invalid ragged"):
            rf.from_iterable([{"x": 1}], ragged=ragged)  # type: ignore[arg-type]
    for source in (rf.from_dataset([{"x": [1]}], ragged=["z"]), rf.from_iterable([{"x": [1]}], ragged=["z"])):
        with pytest.raises(RankfeedError, match=r"(?s)'z'.*'x'"):
            list(rf.Loader(source))


def test_a_collate_fn_receives_unconverted_samples_without_probing_the_dataset() -> None:
    dataset = Made(lambda index: {"x": object()} if index % 2 else {"y": [1, "a"], "z": torch.ones(1)})
    for batch in rf.Loader(rf.from_dataset(dataset), 2, collate_fn=list):
        assert type(batch[0]["z"]) is torch.Tensor
        assert list(batch[1]) == ["x"]
    assert set(dataset.read.values()) == {1}


def test_a_transform_gets_samples_as_the_dataset_returns_them() -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        assert type(sample["x"]) is torch.Tensor
        return {"x": sample["x"].sum()}

    def make(index: int) -> dict[str, Any]:
        return {"x": torch.ones(1 + index % 3, 1 + index % 2)} | ({"extra": 1} if index % 2 else {})

    source = rf.from_dataset(Made(make))
    for columns in (None, ["x"]):
        batch = next(iter(rf.Loader(source, 4, transform=transform, columns=columns)))
        assert batch["x"].tolist() == [1, 4, 3, 2]
    with pytest.raises(SourceError, match=r"(?s)lacks.*'extra'.*sample 0"):
        list(rf.Loader(source, 4, columns=["x", "extra"]))


def test_a_transform_error_in_a_probed_sample_is_raised_only_at_its_own_step() -> None:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 // (sample["y"] - probed)}

    dataset = Made(ones)
    next(iter(rf.Loader(rf.from_dataset(dataset), 1)))
    (probed,) = (index for index in dataset.read if 40 < index < 60)
    batches = iter(rf.Loader(rf.from_dataset(Made(ones)), 4, transform=transform))
    take(batches, probed // 4)
    with pytest.raises(TransformError, match=rf"(?s)ZeroDivisionError.*sample {probed}, rank 0, epoch 0, step"):
        next(batches)


def test_a_transform_that_returns_lists_gives_a_ragged_field() -> None:
    source = rf.from_dataset(Made(but(OTHER, 3, 2)))
    with pytest.raises(TransformError, match=r"(?s)sample 50.*from_dataset\(dataset, ragged=\[.x.\]\)"):
        list(rf.Loader(source, 4, transform=lambda number: {"x": np.ones(number)}))
    for batch in rf.Loader(source, 4, transform=lambda number: {"x": np.ones(number).tolist()}):
        assert "x_lengths" in batch


def test_concatenated_datasets_get_common_fields_or_raise_source_error() -> None:
    one = rf.from_dataset([{"x": np.ones(2 + (index == 2))} for index in range(20)])
    other = rf.from_dataset([{"x": np.ones(3)}] * 20)
    for batch in rf.Loader(rf.concat([one, other]), 4):
        assert "x_lengths" in batch
    with pytest.raises(SourceError, match=r"(?s)'x'.*int64.*float64"):
        list(rf.Loader(rf.concat([rf.from_dataset([{"x": 1}] * 20), rf.from_dataset([{"x": 2.5}] * 20)])))
    tuples = rf.concat([rf.from_dataset([(1, "a")] * 20), rf.from_dataset([(2.5, "b")] * 20)])
    assert {batch[0].dtype for batch in rf.Loader(tuples, 4, shuffle=True)} == {torch.float64}
    assert tuples[39] == (2.5, "b")
    assert rf.concat([one, other]).select([39])[0]["x"].tolist() == [1, 1, 1]


# Streams


def stream_of(make: Callable[[int], Any], size: int = 100) -> Callable[[], Iterator[Any]]:
    return lambda: (make(number) for number in range(size))


@every_engine
def test_fields_of_a_stream_are_inferred_from_its_first_batch(engine: dict[str, Any]) -> None:
    def growing(index: int) -> dict[str, Any]:
        return {"x": np.ones(1 + (index == 1)), "y": 0.5 if index == 3 else index}

    loader = rf.Loader(rf.from_iterable(stream_of(growing)), 4, **engine)
    for _ in range(2):
        seen = {str(kinds(batch)) for batch in loader}
        assert seen == {"{'x': ('torch.float64', 2), 'x_lengths': ('torch.int64', 1), 'y': ('torch.float64', 1)}"}
    late = rf.from_iterable(stream_of(but(OTHER, {"x": np.ones(3)}, {"x": np.ones(2)})))
    with pytest.raises(StreamError, match=r"(?s)sample 50, .*step 12.*from_iterable\(factory, ragged=\[.x.\]\)"):
        list(rf.Loader(late, 4, **engine))
    declared = rf.from_iterable(stream_of(but(OTHER, {"x": np.ones(3)}, {"x": np.ones(2)})), ragged=["x"])
    assert all("x_lengths" in batch for batch in rf.Loader(declared, 4, **engine))


@every_engine
@pytest.mark.parametrize("transform", [None, lambda sample: {"x": sample["x"]}], ids=["plain", "transform"])
def test_ranks_that_read_the_same_stream_infer_the_same_fields(engine: dict[str, Any], transform: Any) -> None:
    def odd_ranks(index: int) -> dict[str, Any]:
        return {"x": [0.5] if index % 2 else [] if index else [1]}

    seen = []
    for rank in range(2):
        stream = rf.from_iterable(stream_of(odd_ranks))
        options = {"topology": rf.Topology(rank=rank, world_size=2), "transform": transform}
        seen += [str(kinds(batch)) for batch in rf.Loader(stream, 4, **options, **engine)]
    assert len(Counter(seen)) == 1
    assert "torch.float64" in seen[0]


def test_probing_a_stream_for_its_fields_loses_no_sample_and_keeps_its_own_state() -> None:
    loader = rf.Loader(rf.from_iterable(partial(StatefulStream, 20)), 3, tail="drop")
    steps = iter(loader)
    assert [next(steps)["x"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    state = loader.state_dict()
    assert state["own"] == {"at": 6}
    again = rf.Loader(rf.from_iterable(partial(StatefulStream, 20)), 7, tail="drop")
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == [[6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18, 19]]


# Writing


@pytest.mark.parametrize("wrap", [list, rf.from_dataset], ids=["iterable", "dataset"])
def test_rf_write_keeps_int64_despite_an_empty_list_and_widens_dtypes_for_later_rows(
    wrap: Any, tmp_path: Path
) -> None:
    rows = [{"x": [9007199254740993], "y": 1, "z": np.ones(2)} for _ in range(600)]
    rows[300] = {"x": [], "y": 2.5, "z": np.ones(3)}
    written = rf.write(wrap(rows), tmp_path / "one", progress=False)
    fields = written.fields
    assert (fields["x"].dtype, fields["y"].dtype, fields["z"].kind) == ("int64", "float64", "ragged")
    assert [written[index]["x"].tolist() for index in (0, 300)] == [[9007199254740993], []]
    rows[300]["x"] = [0.5]
    with pytest.raises(rf.errors.WriteError, match=r"(?s)'x'"):
        rf.write(wrap(rows), tmp_path / "two", progress=False)


# Columns by the name of nothing


def test_a_column_named_by_the_empty_string_works_like_any_other(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **{"": np.arange(6), "x": np.arange(6.0)})
    source = rf.open(tmp_path / "data.npz")
    assert set(source.fields) == {"", "x"}
    assert source[4] == {"": 4, "x": 4.0}
    for options in ({}, {"transform": lambda sample: {**sample, "z": 1}}, {"shuffle": True}):
        batch = next(iter(rf.Loader(source, 6, id_column="id", **options)))  # type: ignore[arg-type]
        assert same(batch[""], batch["id"])
        assert batch["x"].tolist() == batch["id"].tolist()
    assert list(rf.open(tmp_path / "data.npz", columns=[""])[1]) == [""]
    both = rf.concat([source, source]).select(range(6, 12))
    assert next(iter(rf.Loader(both, 6)))[""].tolist() == list(range(6))
    rows = rf.from_dataset([{"": index, "x": str(index)} for index in range(4)])
    assert next(iter(rf.Loader(rows, 4)))[""].tolist() == [0, 1, 2, 3]
    with pytest.raises(SourceError, match="dicts"):
        rf.concat([source, rf.from_dataset([(1, 2)])]).fields  # noqa: B018


class Refilled(Dataset[Any]):
    """Hands out one array and one tensor, with new content each time."""

    def __init__(self) -> None:
        self.array, self.tensor = np.zeros(2), torch.zeros(2)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 20:
            raise IndexError
        self.array[:] = index
        self.tensor.fill_(index)
        return {"x": self.array, "t": self.tensor}


@every_engine
@pytest.mark.parametrize("stream", [False, True], ids=["dataset", "stream"])
def test_a_dataset_that_reuses_one_array_for_all_samples_gives_correct_batches(
    engine: dict[str, Any], stream: bool
) -> None:
    source: Any = rf.from_iterable(lambda: iter(Refilled())) if stream else rf.from_dataset(Refilled())
    if engine.get("num_workers", 0) > 1 and engine.get("worker_kind", "thread") == "thread" and not stream:
        engine = {**engine, "num_workers": 1}  # two threads would fill the array at once
    for batch in rf.Loader(source, 5, topology=rf.Topology(), **engine):
        assert batch["x"][:, 0].tolist() == batch["t"][:, 1].tolist()
        assert len(Counter(batch["x"][:, 0].tolist())) == 5


def in_place(sample: dict[str, Any]) -> dict[str, Any]:
    sample["x"] *= 2
    sample["list"].append(sample["y"])
    sample["y"] += 100
    sample["inner"]["t"].add_(1)
    return sample


@every_engine
@pytest.mark.parametrize("wrap", [rf.from_dataset, rf.from_iterable], ids=["dataset", "stream"])
def test_an_in_place_transform_does_not_change_the_users_samples(engine: dict[str, Any], wrap: Any) -> None:
    samples: list[Any] = [
        {"x": np.full(3, float(i)), "list": [i], "y": i, "inner": {"t": torch.tensor([i])}} for i in range(20)
    ]
    loader = rf.Loader(wrap(samples), 5, transform=in_place, topology=rf.Topology(), **engine)
    for _ in range(2):
        batches: list[Any] = list(loader)
        assert [x for batch in batches for x in batch["x"][:, 2].tolist()] == [2.0 * i for i in range(20)]
        assert [row for batch in batches for row in batch["list"].tolist()] == [[i, i] for i in range(20)]
        assert [y for batch in batches for y in batch["y"].tolist()] == list(range(100, 120))
        assert [t for batch in batches for t in batch["inner"]["t"].flatten().tolist()] == list(range(1, 21))
    assert samples[0]["x"].tolist() == [0, 0, 0]
    assert samples[0]["list"] == [0]


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[1], ENGINES[3]], ids=[NAMES[0], NAMES[1], NAMES[3]])
@pytest.mark.parametrize("kind", ["array", "view", "tensor", "list", "dict"])
@pytest.mark.parametrize("source", ["columns", "dataset", "stream"])
def test_a_transform_that_reuses_its_output_memory_gives_correct_batches(
    source: str, kind: str, engine: dict[str, Any]
) -> None:
    sources: dict[str, Any] = {
        "columns": Memory(20),
        "dataset": Wrapped([{"y": number * 10} for number in range(20)]),
        "stream": rf.from_iterable([{"y": number * 10} for number in range(20)]),
    }
    for collate_fn in (None, torch.utils.data.default_collate):
        options: dict[str, Any] = {"collate_fn": collate_fn, "topology": rf.Topology(), **engine}
        loader: Any = rf.Loader(sources[source], 4, transform=ReusedOutput(kind), **options)
        for batch in loader:
            x = batch["x"][0] if isinstance(batch["x"], list) else batch["x"]
            assert (x.reshape(4, -1) == batch["number"][:, None]).all()
