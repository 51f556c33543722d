"""A split is exact, near its fractions, the same everywhere, and stays when data are appended."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.numbers import Numbers

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError


def origins(source: Any) -> list[int]:
    ids: list[int] = source.origin_ids(np.arange(len(source))).tolist()
    return ids


SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(lambda parts: [part / 120 for part in parts])


@given(size=st.integers(2000, 20_000), shares=SHARES, rest=st.booleans(), seed=st.integers(-(2**80), 2**80))
def test_split_sides_are_disjoint_and_near_their_fractions(size: int, shares: Any, rest: bool, seed: int) -> None:
    if rest:
        shares = [*shares, 1 - sum(shares)]
    sides = rf.train_test_split(Numbers(size), shares, seed)
    counts = Counter(item for side in sides for item in origins(side))
    assert set(counts.values()) == {1}
    assert set(counts) <= set(range(size))
    if rest:
        assert counts == dict.fromkeys(range(size), 1)
    for side, share in zip(sides, shares, strict=True):
        assert origins(side) == sorted(origins(side))
        # Eight standard deviations: no honest seed ends there.
        assert abs(len(side) - share * size) <= 8 * (share * (1 - share) * size) ** 0.5 + 1


@given(size=st.integers(100, 3000), more=st.integers(1, 3000), seed=st.integers(0, 99), share=st.floats(0.2, 0.8))
def test_samples_stay_on_their_side_when_data_are_appended(size: int, more: int, seed: int, share: float) -> None:
    before = rf.train_test_split(Numbers(size), share, seed)
    after = rf.train_test_split(Numbers(size + more), share, seed)
    for old, new in zip(before, after, strict=True):
        assert origins(old) == [item for item in origins(new) if item < size]


def test_a_larger_test_fraction_keeps_all_samples_of_a_smaller_test_side() -> None:
    few, many = (rf.train_test_split(Numbers(5000), share, 3)[1] for share in (0.1, 0.3))
    assert set(origins(few)) < set(origins(many))


def test_a_split_by_a_dict_of_fractions_keeps_its_names_and_order() -> None:
    source = Numbers(4000)
    named = rf.train_test_split(source, {"val": 0.1, "train": 0.7, "test": 0.2}, seed=5)
    assert list(named) == ["val", "train", "test"]
    plain = rf.train_test_split(source, (0.1, 0.7, 0.2), seed=5)
    assert isinstance(plain, tuple)
    for one, other in zip(named.values(), plain, strict=True):
        assert one.fingerprint == other.fingerprint
    train, test = rf.train_test_split(source, 0.2, seed=5)
    assert len(train) > len(test)
    assert not source.columns_read  # ids alone say where a sample goes


def test_splits_by_two_seeds_are_independent() -> None:
    first, second = (set(origins(rf.train_test_split(Numbers(40_000), 0.5, seed)[1])) for seed in (0, 1))
    assert abs(len(first & second) - 10_000) < 8 * (40_000 * 0.25 * 0.75) ** 0.5


def test_splitting_a_side_by_the_same_seed_is_independent_of_the_first_split() -> None:
    train, test = rf.train_test_split(Numbers(20_000), 0.2, seed=0)
    again, val = rf.train_test_split(train, 0.5, seed=0)
    assert abs(len(val) - len(train) / 2) < 8 * (len(train) * 0.25) ** 0.5
    # Nor does it help to hide the split in a selection or among others.
    for hidden in (train.select(slice(0, None, 2)), rf.concat([train, test])):
        third = rf.train_test_split(hidden, 0.5, seed=0)[1]
        assert abs(len(third) - len(hidden) / 2) < 8 * (len(hidden) * 0.25) ** 0.5
    assert Counter(origins(again) + origins(val)) == Counter(origins(train))


def test_samples_of_a_selection_are_on_the_same_side_as_in_their_source() -> None:
    source = Numbers(3000)
    _, test = rf.train_test_split(source, 0.3, seed=2)
    selected = source.select(lambda sample: sample["label"] < 4, columns=["label"])
    _, test_of_selected = rf.train_test_split(selected, 0.3, seed=2)
    assert origins(test_of_selected) == [item for item in origins(test) if item % 10 < 4]


KEYS: dict[str, Any] = {
    "str": lambda index: f"clip-{index:05}é",
    "bytes": lambda index: b"clip" + bytes([index % 251, index // 251]),
    "int64": lambda index: np.int64(index - 500),
    "uint64": lambda index: np.uint64(2**64 - 1 - index),
    "bool": lambda index: np.bool_(index % 2),
}


@pytest.mark.parametrize("kind", KEYS)
def test_samples_with_equal_keys_are_on_one_side_in_any_order(kind: str, tmp_path: Path) -> None:
    rows = [{"speaker": KEYS[kind](i % 300), "x": np.zeros(i % 3), "i": i} for i in range(1200)]
    source = rf.write(rows, tmp_path / "p", shard_bytes=4000, progress=False)
    sides = rf.train_test_split(source, 0.5, seed=7, key="speaker")
    result = [Counter(str(sample["speaker"]) for sample in side) for side in sides]
    assert sum(result, Counter()) == Counter(str(row["speaker"]) for row in rows)
    assert not result[0] & result[1]
    # The order of the samples, and what else there is, changes nothing.
    shuffled = rf.from_dataset([rows[i] for i in np.random.default_rng(0).permutation(1200)] + rows[:5])
    again = rf.train_test_split(shuffled, 0.5, seed=7, key="speaker")
    for before, after in zip(result, again, strict=True):
        assert set(before) == {str(sample["speaker"]) for sample in after}


def test_an_integer_key_is_on_the_same_side_in_any_dtype() -> None:
    sides = []
    for kind in (np.int16, np.int64, np.uint8, np.uint64):
        source = rf.from_dataset([{"k": kind(i), "i": i} for i in range(200)])
        sides.append([int(sample["i"]) for sample in rf.train_test_split(source, 0.5, key="k")[1]])
    assert all(side == sides[0] for side in sides)


def test_tar_samples_are_split_by_their_key_column_by_default() -> None:
    rows = [{"__key__": f"{i % 50}", "i": i} for i in range(400)]
    by_default = rf.train_test_split(rf.from_dataset(rows), 0.4, seed=1)
    by_name = rf.train_test_split(rf.from_dataset(rows), 0.4, seed=1, key="__key__")
    assert [origins(side) for side in by_default] == [origins(side) for side in by_name]
    keys = [{sample["__key__"] for sample in side} for side in by_default]
    assert not keys[0] & keys[1]


def test_a_split_by_key_reads_only_the_key_column() -> None:
    source = Numbers(9000)
    rf.train_test_split(source, 0.5, key="x")
    assert source.columns_read
    assert all(columns == ["x"] for columns in source.columns_read)


def test_the_split_by_a_seed_equals_the_recorded_ids() -> None:
    assert origins(rf.train_test_split(Numbers(40), 0.2, seed=0)[1]) == [12, 13, 16, 17, 25, 26, 28, 29, 31, 33]
    rows = rf.from_dataset([{"k": f"key {i}"} for i in range(40)])
    on_test = origins(rf.train_test_split(rows, 0.2, seed=0, key="k")[1])
    assert on_test == [0, 1, 5, 8, 10, 11, 13, 18, 19, 20, 21, 24, 26, 28, 35, 38]


@pytest.mark.parametrize(
    "bad",
    [
        *(0, 1, 1.0, -0.1, 1.5, float("nan"), float("inf"), True, "0.5", None),
        *([], {}, [0.5, 0.6], [0.5, 0], [0.5, "x"], [float("nan")], [True], {"a": -1}, {"a": None}),
    ],
)
def test_invalid_fractions_raise_argument_error(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="fraction"):
        rf.train_test_split(Numbers(10), bad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": [1, 2, 3]}, ["invalid source"]),
        ({"key": "z"}, ["no such column", "x, square, label"]),
        ({"seed": 1.5}, ["seed", "1.5"]),
        ({"seed": True}, ["seed"]),
        ({"seed": None}, ["seed"]),
    ],
)
def test_an_invalid_source_key_or_seed_raises_argument_error(arguments: Any, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        rf.train_test_split(**{"source": Numbers(10), "fractions": 0.5, **arguments})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [1.5, np.zeros(2, int), [1] * 3])
def test_a_key_column_of_floats_or_arrays_raises_argument_error(value: Any) -> None:
    with pytest.raises(ArgumentError, match="'k' cannot be a key"):
        rf.train_test_split(rf.from_dataset([{"k": value}] * 5), 0.5, key="k")


@pytest.mark.parametrize(
    ("fractions", "name"), [(1e-9, "'test'"), ({"a": 0.5, "b": 1e-9}, "'b'"), ([1e-9, 0.5], "part 0")]
)
def test_the_error_for_an_empty_side_names_it_and_suggests_another_seed(fractions: Any, name: str) -> None:
    with pytest.raises(SourceError, match=rf"{name}[\s\S]*empty[\s\S]*seed"):
        rf.train_test_split(Numbers(100), fractions)
