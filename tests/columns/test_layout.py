"""What samples have in common, and whether further ones fit, over random samples."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankfeed.columns.columns import Columns
from rankfeed.columns.field import Field
from rankfeed.columns.layout import (
    Mismatch,
    describe_sample,
    fit_values,
    flat_fields,
    infer_layout,
    join_layouts,
    leaf_of_field,
    map_leaves,
    resolve_dtypes,
)

INTEGERS = (
    st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 3) | st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**63])
)
NUMBERS = INTEGERS | st.floats(width=32) | st.booleans()
TYPED = st.builds(
    lambda number, kind: np.dtype(kind).type(number),
    st.integers(0, 127),
    st.sampled_from(["int8", "uint8", "int32", "int64", "uint64", "float32", "float64"]),
)
ARRAYS = st.builds(
    lambda length, width, kind: np.arange(length * width).reshape(length, width).astype(kind),
    st.integers(0, 3),
    st.integers(1, 2),
    st.sampled_from(["int32", "int64", "uint64", "float32", "float64"]),
)
SCALARS = NUMBERS | TYPED | st.text(max_size=3) | st.binary(max_size=3) | st.none()
VALUES = SCALARS | ARRAYS | st.lists(NUMBERS, max_size=3)
SAMPLES = st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2) | st.tuples(VALUES, VALUES) | VALUES


def equal(value: Any, row: Any) -> bool:
    """Whether a value arrived as it was: as Python compares numbers, exactly, whatever their types."""
    if isinstance(value, (list, np.ndarray)):
        before = value.tolist() if isinstance(value, np.ndarray) else value
        now = row if isinstance(row, list) else np.asarray(row).tolist()
        return len(before) == len(now) and all(map(equal, before, now))
    if isinstance(value, (int, float, np.generic)):
        one, other = np.asarray(value).item(), np.asarray(row).item()
        return bool(one == other or (one != one and other != other))
    return bool(value is row or value == row)


def arrived(samples: list[Any], layout: Any) -> None:
    """Every value of the samples is in its field, and of the field's type."""

    def check(leaf: Any, path: Any, values: Any) -> None:
        rows = fit_values(values, leaf, path)
        assert len(rows) == len(values)
        for value, row in zip(values, rows, strict=True):
            assert equal(value, row), (value, row, leaf)
            if leaf.how == "tensor":
                assert row.dtype == np.dtype(leaf.field.dtype)
                inner = row.shape[1:] if leaf.field.kind == "ragged" else row.shape
                assert inner == leaf.field.shape

    map_leaves(samples, layout, check)


@settings(max_examples=300, deadline=None)
@given(st.lists(SAMPLES, min_size=1, max_size=4), st.booleans())
def test_a_layout_inferred_from_samples_keeps_every_value_or_is_refused(samples: list[Any], loose: bool) -> None:
    try:
        layout = resolve_dtypes(infer_layout(samples, loose=loose))
    except Mismatch as error:
        row = error.row
    else:
        arrived(samples, layout)
        row = 0
    assert 0 <= row < len(samples)


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=3), VALUES)
@example([None], [0, 2**63 + 1])  # not comparable as an array: numpy rounds it to float64
def test_a_later_value_fits_the_layout_unchanged_or_raises_mismatch(probed: list[Any], later: Any) -> None:
    with suppress(Mismatch):
        layout = resolve_dtypes(infer_layout([{"x": value} for value in probed]))
        arrived([{"x": probed[0]}, {"x": later}], layout)


@pytest.mark.parametrize("later", [[2**63 + 1, -1], [-1, 2**64 - 1, 5]], ids=str)
def test_integers_that_numpy_would_round_to_float64_raise_mismatch(later: list[int]) -> None:
    with pytest.raises(Mismatch, match="uint64"):
        fit_values(later, leaf_of_field(Field.of("float64")))


@pytest.mark.parametrize("mask", [[False, True], [True, True]], ids=str)
def test_arrays_with_masked_values_raise_mismatch(mask: list[bool]) -> None:
    values = np.ma.masked_array([1.0, -999.0], mask)
    with pytest.raises(Mismatch, match="masked"):
        infer_layout([{"x": values}])
    with pytest.raises(Mismatch, match="masked"):
        fit_values([np.ones(2), values], leaf_of_field(Field.of("float64[2]")))
    whole = np.ma.masked_array([1.0, 2.0])
    assert str(infer_layout([{"x": whole}]).parts["x"]) == "float64[2]"  # type: ignore[union-attr]


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_join_layouts_gives_the_same_result_in_either_order(one: Any, other: Any) -> None:
    result = []
    for pair in ((one, other), (other, one)):
        try:
            result.append(join_layouts(describe_sample(pair[0]), describe_sample(pair[1])))
        except Exception as error:
            result.append(type(error))
    assert result[0] == result[1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"x": NUMBERS, "y": st.lists(INTEGERS, max_size=3)}), min_size=1, max_size=5)
)
def test_columns_from_samples_keep_every_value(samples: list[dict[str, Any]]) -> None:
    try:
        columns = Columns.from_samples(samples)
    except Mismatch:
        return
    for sample, row in zip(samples, columns.samples(), strict=True):
        assert all(equal(sample[name], row[name]) for name in sample)
    assert columns["y"].field.kind == "ragged"
    fields = flat_fields(resolve_dtypes(infer_layout(samples)))
    assert fields == {name: column.field for name, column in columns.items()}


@pytest.mark.parametrize(
    "field",
    [Field("dense", "int64"), Field("ragged", "float32", (64, 2)), Field("dense", "bool", (3,)), Field("str")],
    ids=str,
)
def test_a_field_parsed_from_its_text_equals_the_original(field: Field) -> None:
    assert Field.of(str(field)) == field
    assert leaf_of_field(field).field == field
