"""However the rows of a batch lie in parts, they come out as if taken one by one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.columns.columns import Bytes, Columns, Dense, Ragged, column_from_parts
from rankfeed.columns.field import Field
from rankfeed.columns.pointers import RowPointers
from rankfeed.errors import ArgumentError, CorruptError

INNERS = [(), (3,), (2, 2), (700,)]
INNER = st.sampled_from(INNERS)


@st.composite
def in_parts(draw: st.DrawFn) -> list[np.ndarray]:
    """The slots of a batch, split over parts in any order."""
    total = draw(st.integers(1, 12))
    slots = np.array(draw(st.permutations(range(total))), np.int64)
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
    return [part for part in np.split(slots, cuts) if len(part)]


@given(parts=in_parts(), inner=INNER, seed=st.integers(0, 99))
def test_dense_rows_from_parts_are_gathered_in_batch_order(parts: Any, inner: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    made, expected = [], {}
    for slots in parts:
        values = rng.integers(0, 100, (9, *inner))
        rows = rng.integers(0, 9, len(slots))
        made.append(RowPointers.into(values, rows, np.ones_like(rows)))
        expected |= {int(slot): values[row] for slot, row in zip(slots, rows, strict=True)}
    column = column_from_parts(Field("dense", "int64", inner), made, parts)
    assert isinstance(column, Dense)
    gathered = column.gather()
    assert len(gathered) == len(expected)
    for slot, row in expected.items():
        np.testing.assert_array_equal(gathered[slot], row)


@given(parts=in_parts(), inner=INNER, seed=st.integers(0, 99))
def test_ragged_rows_from_parts_are_compacted_and_padded(parts: Any, inner: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    made, expected = [], {}
    for slots in parts:
        values = rng.random((20, *inner))
        starts = rng.integers(0, 15, len(slots))
        lengths = rng.integers(0, 5, len(slots))
        made.append(RowPointers.into(values, starts, lengths))
        for slot, start, length in zip(slots.tolist(), starts, lengths, strict=True):
            expected[slot] = values[start : start + length]
    column = column_from_parts(Field("ragged", "float64", inner), made, parts)
    assert isinstance(column, Ragged)
    values, offsets = column.compact()
    padded = column.pad()
    for slot, row in expected.items():
        np.testing.assert_array_equal(values[offsets[slot] : offsets[slot + 1]], row)
        np.testing.assert_array_equal(padded[slot, : len(row)], row)
        assert (padded[slot, len(row) :] == 0).all()
        np.testing.assert_array_equal(column.rows()[slot], row)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("longest", [0, 1, 7, 200, pytest.param(3000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("in_order", [False, True])
def test_padding_keeps_each_of_300_ragged_rows(inner: Any, longest: int, parts: int, in_order: bool) -> None:
    rng, count = np.random.default_rng(longest), 300
    order = np.arange(count) if in_order else rng.permutation(count)
    slots = [None] if parts == 1 else np.array_split(order, parts)
    made, expected = [], {}
    for item in slots:
        where = np.arange(count) if item is None else item
        lengths = rng.integers(longest // 3, longest + 1, len(where))
        starts = np.cumsum(lengths) - lengths
        starts = starts + 5 if in_order else rng.permutation(starts)
        values = rng.integers(1, 100, (int((starts + lengths).max(initial=0)), *inner)).astype(np.int16)
        made.append(RowPointers.into(values, starts, lengths))
        for slot, start, length in zip(where.tolist(), starts, lengths, strict=True):
            expected[slot] = values[start : start + length]
    column = column_from_parts(Field("ragged", "int16", inner), made, slots)
    assert isinstance(column, Ragged)
    padded = column.pad()
    assert padded.shape == (count, max(map(len, expected.values())), *inner)
    for slot, row in expected.items():
        np.testing.assert_array_equal(padded[slot, : len(row)], row)
        assert (padded[slot, len(row) :] == 0).all()


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    cuts=st.sets(st.integers(1, 19), max_size=5),
    inner=st.sampled_from([(), (2,), (0,)]),
    multiple=st.integers(1, 4),
)
def test_pad_steps_pads_each_interval_of_rows_as_pad_does_for_that_interval(
    lengths: list[int], cuts: set[int], inner: tuple[int, ...], multiple: int
) -> None:
    rows = [np.full((length, *inner), 1 + index) for index, length in enumerate(lengths)]
    column = Ragged.of(rows)
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    padded = column.pad_steps(edges, multiple=multiple)
    expected = [column.slice(a, b).pad(multiple=multiple) for a, b in pairwise(edges)]
    assert [item.tolist() for item in padded] == [row.tolist() for row in expected]
    assert [item.shape for item in padded] == [row.shape for row in expected]


@given(st.lists(st.text(max_size=4)))
def test_a_column_of_texts_returns_equal_texts(rows: list[str]) -> None:
    assert Bytes.of(rows).rows() == rows


def test_invalid_utf8_in_a_column_of_texts_raises_corrupt_error() -> None:
    pointers = RowPointers.into(np.array([0xC3], np.uint8), np.array([0]), np.array([1]))
    with pytest.raises(CorruptError, match="UTF-8"):
        Bytes(pointers, Field("str")).rows()


@pytest.mark.parametrize(
    "samples",
    [
        [{"x": 1}, {"y": 1}],
        [{"x": "a"}, {"x": b"a"}],
        [{"x": None}],
        [{"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3))}],
        [{"x": np.array([{}], object)}],
    ],
)
def test_columns_from_unequal_or_unsupported_samples_raise_argument_error(samples: list[dict[str, Any]]) -> None:
    with pytest.raises(ArgumentError):
        Columns.from_samples(samples)
