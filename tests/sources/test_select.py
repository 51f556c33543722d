"""A selection holds exactly the samples asked for, in the order asked for, in little memory."""

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.numbers import Numbers
from tests.support.values import column_of

import rankfeed as rf
from rankfeed.errors import ArgumentError, SourceError, TransformError
from rankfeed.sources.source import indices_of

SIZE = 120


@st.composite
def selections(draw: Any) -> Any:
    """What may be given, and the ids that are meant."""
    kind = draw(st.sampled_from(["ids", "sorted", "mask", "slice", "range"]))
    if kind in ("ids", "sorted"):
        ids = draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=60, unique=True))
        ids = sorted(ids) if kind == "sorted" else ids
        form = draw(st.sampled_from([list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.uint16)]))
        return form(ids), ids
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=SIZE, max_size=SIZE).filter(any))
        return draw(st.sampled_from([list, np.array]))(mask), np.flatnonzero(mask).tolist()
    bound = st.none() | st.integers(-2 * SIZE, 2 * SIZE)
    step = draw(st.none() | st.integers(-9, 9).filter(bool))
    chosen = draw(st.builds(slice, bound, bound, st.just(step)).filter(lambda item: range(SIZE)[item]))
    ids = range(SIZE)[chosen]
    return (chosen if kind == "slice" else ids), list(ids)


BLOCKS = st.lists(st.integers(0, 15), max_size=8).map(lambda sizes: [*sizes, SIZE - sum(sizes)])


@given(first=selections(), blocks=BLOCKS, data=st.data())
def test_a_selection_has_the_selected_samples_in_order(first: Any, blocks: list[int], data: Any) -> None:
    chosen, ids = first
    source = Numbers(blocks)
    selected = source.select(chosen)
    # Neighbours within a block of the source are a block.
    origins = np.repeat(np.arange(len(blocks)), blocks)[ids].tolist()
    assert selected.blocks.tolist() == [len(list(block)) for _, block in itertools.groupby(origins)]
    assert len(selected) == len(ids)
    assert column_of(selected, "x") == ids
    assert [int(sample["square"]) for sample in selected] == [sample_id * sample_id for sample_id in ids]
    picked = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=9))
    assert selected.origin_ids(picked).tolist() == [ids[item] for item in picked]
    selected.expect(picked, ["x"])
    assert source.expected[-1] == ([ids[item] for item in picked], ["x"])


@given(first=selections(), second=st.data())
def test_a_selection_of_a_selection_equals_one_selection_of_the_source(first: Any, second: Any) -> None:
    chosen, ids = first
    source = Numbers([SIZE])
    outer = source.select(chosen)
    places = second.draw(
        st.lists(st.integers(0, len(ids) - 1), min_size=1, unique=True)
        | st.builds(lambda step: slice(None, None, step), st.integers(-3, 3).filter(bool))
    )
    inner = outer.select(places)
    expected = ids[places] if isinstance(places, slice) else [ids[place] for place in places]
    assert inner.source is source
    assert column_of(inner, "x") == expected
    assert inner.fingerprint == source.select(expected).fingerprint


@pytest.mark.parametrize(
    ("ids", "most"),
    [
        (np.arange(10**6), 400),
        (np.arange(10**6, 0, -3), 400),
        (np.array([8]), 400),
        (np.random.default_rng(0).permutation(10**5), 4 * 10**5 + 400),
    ],
)
def test_pickled_ids_take_400_bytes_for_ranges_and_4_bytes_per_id_otherwise(ids: Any, most: int) -> None:
    assert len(pickle.dumps(indices_of(ids))) < most


def test_slices_of_2_trillion_samples_are_read_and_pickled_in_1000_bytes() -> None:
    source = Numbers([10**12, 10**12, 5])
    selected = source.select(slice(3, None, 2))
    assert len(selected) == 10**12 + 1
    assert selected.blocks.tolist() == [5 * 10**11 - 1, 5 * 10**11, 2]
    assert selected.fetch([0, 10**12], ["x"])["x"].rows() == [3, 2 * 10**12 + 3]
    again = selected.select(slice(None, None, -(10**11))).select(range(2, 5))
    assert again.fetch([0, 2], ["x"])["x"].rows() == [2 * 10**12 + 3 - 4 * 10**11, 2 * 10**12 + 3 - 8 * 10**11]
    assert len(pickle.dumps(again)) < 1000


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([1, 2, 1], ["twice", "1 at positions [0, 2]", "concat"]),
        ([5, -1], ["no such sample", "-1", "negative"]),
        ([0, SIZE], ["no such sample", f"{SIZE - 1}"]),
        ([2**64 - 1], ["no such sample", "18446744073709551615"]),
        (np.array([2**64 - 1], np.uint64), ["no such sample"]),
        ([2**70], ["selects no samples"]),
        ([1.0, 2.0], ["selects no samples", "float64"]),
        ([[1, 2]], ["selects no samples", "(1, 2)"]),
        ([[1], [2, 3]], ["selects no samples"]),
        (3, ["selects no samples"]),
        ("3", ["selects no samples"]),
        ({3, 4}, ["selects no samples", "set"]),
        (None, ["selects no samples"]),
        (torch.ones(3, requires_grad=True), ["selects no samples"]),
        ([True] * (SIZE - 1), ["mask", f"{SIZE} values", f"{SIZE - 1} values"]),
        (range(-1, 5), ["no such sample", "-1"]),
        (range(SIZE, 5, -1), ["no such sample", f"{SIZE}"]),
        (slice(0, 5, 0), ["slice"]),
        (slice("a"), ["slice"]),
    ],
)
def test_selecting_by_an_invalid_value_raises_argument_error(chosen: Any, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        Numbers([SIZE]).select(chosen)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("chosen", [[], slice(5, 5), range(0), [False] * SIZE, lambda sample: False])
def test_an_empty_selection_raises_source_error(chosen: Any) -> None:
    with pytest.raises(SourceError, match="no sample is selected"):
        Numbers([SIZE]).select(chosen)


def test_a_predicate_gets_each_sample_once_in_order_with_only_the_given_columns() -> None:
    source = Numbers([6000, 4000])
    seen: list[int] = []

    def odd_square(sample: dict[str, Any]) -> Any:
        assert list(sample) == ["square"]
        seen.append(int(sample["square"]))
        return sample["square"] % 2 == 1

    selected = source.select(odd_square, columns=["square"])
    assert seen == [row * row for row in range(10000)]
    assert source.ids_read == list(range(10000))
    assert all(columns == ["square"] for columns in source.columns_read)
    assert source.expected[0][1] == ["square"]
    assert column_of(selected, "x") == list(range(1, 10000, 2))
    assert len(pickle.dumps(selected.indices)) < 400  # the predicate itself stays behind


@pytest.mark.parametrize("answer", [True, np.bool_(True), np.array(True), torch.tensor(True)])
def test_a_predicate_may_return_a_bool_of_python_numpy_or_torch(answer: Any) -> None:
    assert len(Numbers([3]).select(lambda sample: answer)) == 3


@pytest.mark.parametrize("answer", [None, 1, "yes", np.array([True]), np.int64(1)])
def test_the_error_for_a_predicate_that_returns_no_bool_names_the_sample(answer: Any) -> None:
    with pytest.raises(ArgumentError, match=r"no truth value[\s\S]*sample 2"):
        Numbers([5]).select(lambda sample: answer if sample["x"] == 2 else True)


def test_the_error_for_a_predicate_that_raises_names_the_sample() -> None:
    with pytest.raises(SourceError, match=r"ZeroDivisionError[\s\S]*sample 4") as caught:
        Numbers([5]).select(lambda sample: bool(1 / (sample["x"].item() - 4)))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_columns_of_select_must_exist_and_need_a_predicate() -> None:
    with pytest.raises(ArgumentError, match="no such column"):
        Numbers([5]).select(lambda sample: True, columns=["z"])
    with pytest.raises(ArgumentError, match="predicate"):
        Numbers([5]).select([1], columns=["x"])


def test_a_predicate_gets_tuples_of_a_dataset_unchanged() -> None:
    source = rf.from_dataset([(index, "text") for index in range(9)])
    selected = source.select(lambda sample: sample[0] % 4 == 1)
    assert selected.fetch([1, 0])[""].rows() == [(5, "text"), (1, "text")]
    assert selected.runs_user_code
    assert not selected.supports_batched_getitem
    assert not selected.identified


def test_the_fingerprint_of_a_selection_depends_on_source_and_ids_not_on_their_type() -> None:
    source = Numbers([SIZE])
    mask = np.isin(np.arange(SIZE), [4, 5, 6])
    result = [source.select(item).fingerprint for item in ([4, 5, 6], slice(4, 7), range(4, 7), mask)]
    assert len(set(result)) == 1
    assert source.select(lambda sample: 4 <= sample["x"] <= 6).fingerprint == result[0]
    others = [source.select(item).fingerprint for item in ([6, 5, 4], [4, 5, 7], [4, 5], [5, 6], slice(None))]
    others += [Numbers([SIZE, 1]).select([4, 5, 6]).fingerprint, source.fingerprint]
    assert len({result[0], *others}) == len(others) + 1
    assert source.select([1]).default_shuffle == "window"
    assert source.select([1]).prefetch_distance


def test_a_transform_error_names_the_sample_in_the_selection_and_in_the_source() -> None:
    def refuse(sample: Any) -> Any:
        raise ValueError("no")

    part = rf.from_dataset([{"x": i} for i in range(10)]).select([7, 3]).select([1])
    with pytest.raises(TransformError, match=r"sample 0 \(sample 3 of the source\), "):
        list(rf.Loader(part, transform=refuse))
