"""Rows of batches of any shape."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.batch_columns import columns
from rankfeed.diagnostics.doctor.rows import all_ends, ends, shingles_of, tokens, unmasked
from rankfeed.diagnostics.keys import hashes, required_ids
from rankfeed.errors import AuditError

X = torch.arange(12).reshape(4, 3)
Y = torch.arange(4)


@dataclass
class Fields:
    x: Any
    meta: Any


class Plain:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


Pair = collections.namedtuple("Pair", ["x", "y"])
SAMPLES = [{"x": X[row], "y": int(row)} for row in range(4)]
NESTED = torch.nested.nested_tensor([X[0], X[1, :2], X[2], X[3, :1]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, {"": 4}),
        ({"x": X, "y": Y, "steps": 7, "name": "train"}, {"x": 4, "y": 4}),
        ((X, Y), {"0": 4, "1": 4}),
        ([X, Y], {"0": 4, "1": 4}),
        (Pair(X, Y), {"x": 4, "y": 4}),
        ({"meta": {"k": ["a", "b", "c", "d"]}, "x": X}, {"meta.k": 4, "x": 4}),
        ({"x": X, "caption": ["a", None, "c", None]}, {"x": 4, "caption": 4}),
        ([{"data": X, "label": Y}], {"0.data": 4, "0.label": 4}),
        (Fields(X, {"y": Y}), {"x": 4, "meta.y": 4}),
        (Plain(x=X, _hidden=Y), {"x": 4}),
        ({"inner": Plain(x=X), "y": Y}, {"inner.x": 4, "y": 4}),
        ([Plain(x=X, y=Y)], {"0.x": 4, "0.y": 4}),
        (SAMPLES, {"x": 4, "y": 4}),
        ([{"x": 1}, {"x": 2}, {"x": 3}], {"x": 3}),
        ([(X[row], int(row)) for row in range(4)], {"0": 4, "1": 4}),
        ([(torch.ones(4, 4), label) for label in range(3)], {"0": 3, "1": 3}),
        ({"x": X.to_sparse(), "y": Y}, {"x": 4, "y": 4}),
        ({"x": X.float().to_sparse_csr(), "y": Y}, {"x": 4, "y": 4}),
        ({"x": NESTED, "y": Y}, {"x": 4, "y": 4}),
        ({"x": X.T, "y": Y, "z": Y}, {"x": 4, "y": 4, "z": 4}),
        ({"x": X.to(torch.bfloat16)}, {"x": 4}),
        (["a", "b", "c"], {"": 3}),
        (([*X], [{"box": X[:row]} for row in range(4)]), {"0": 4, "1": 4}),
        ([tuple(X), tuple({"id": row} for row in range(4))], {"0": 4, "1": 4}),
        ({"image": [X[:1], X[:2], X[:4], X[:3]], "id": Y}, {"image": 4, "id": 4}),
        ({"image": [X.T] * 5}, {"image": 5}),
        (((X, X), Y), {"0.0": 4, "0.1": 4, "1": 4}),
        ([Y[:1], Y[:3], Y[:2]], {"": 3}),
        ((X.T, Y), {"0": 4, "1": 4}),
        ([torch.ones(3, 8, 8)] * 5, {"": 5}),
        ({"x": np.array([["a"], ["b"]])}, {"x": 2}),
        ([], {}),
        ({}, {}),
        (torch.tensor(3), {}),
        (None, {}),
    ],
)
def test_columns_flattens_a_batch_of_any_structure_into_fields_by_path_with_a_value_per_row(
    batch: Any, expected: dict[str, int]
) -> None:
    fields = columns(batch)
    assert {name: len(column) for name, column in fields.items()} == expected
    assert {name: len(hashes(column) or []) for name, column in fields.items()} == expected


def test_hashes_returns_none_for_values_that_cannot_be_hashed() -> None:
    assert hashes([lambda: 0]) is None


def test_columns_splits_a_batch_of_pyg_graphs_into_rows_with_the_same_hashes_in_any_batch() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graphs = [data.Data(x=X[:size], y=torch.tensor([size])) for size in (1, 3, 2)]
    fields = columns(data.Batch.from_data_list(graphs))
    assert {name: len(column) for name, column in fields.items()} == {"x": 3, "y": 3}
    alone = {
        name: (hashes(column) or [0])[0] for name, column in columns(data.Batch.from_data_list(graphs[1:])).items()
    }
    assert alone == {name: (hashes(column) or [0, 0])[1] for name, column in fields.items()}


def test_columns_with_a_given_number_of_rows_finds_the_batch_dimension() -> None:
    assert {len(column) for column in columns({"x": X.T}, rows=4).values()} == {4}
    assert [len(column) for column in columns(SAMPLES[:1], rows=1).values()] == [1, 1]


def test_a_row_has_the_same_hash_in_every_batch() -> None:
    whole = {name: hashes(column) for name, column in columns({"x": X, "y": Y}).items()}
    part = {name: hashes(column) for name, column in columns({"x": X[2:], "y": Y[2:]}).items()}
    assert part == {name: (column or [])[2:] for name, column in whole.items()}
    assert len({*(whole["x"] or [])}) == 4


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5), st.booleans())
def test_padding_of_rows_is_recognised_on_the_left_and_on_the_right(rows: list[list[int]], first: bool) -> None:
    width = max(map(len, rows)) + 2
    filled = [[0] * (width - len(row)) + row if first else row + [0] * (width - len(row)) for row in rows]
    row_ends = ends(np.array(filled), first=first)
    assert [run for _, _, run in row_ends] == [width - len(row) for row in rows]
    for row, (_, body, _) in zip(rows, row_ends, strict=True):
        assert [body] == hashes(np.array([row]))  # the key of this row in a batch where it needs no padding


def test_all_ends_looks_for_padding_only_in_two_dimensional_fields() -> None:
    assert {*all_ends({"x": np.zeros((2, 3)), "y": np.zeros(2), "z": ["a"], "image": np.zeros((2, 3, 4, 4))})} == {
        "x",
        "x<",
    }


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"mask": np.array([[1, 1, 1, 0], [1, 0, 0, 0]])}, [[0, 1, 2], [4]]),
        ({"mask": np.array([[0, 0, 1, 1], [0, 1, 1, 1]]) == 1}, [[0, 1], [4]]),  # ones are padding
        ({"mask": np.array([[0, 1, 1, 1], [1, 1, 1, 1]])}, [[1, 2, 3], [4, 5, 6, 7]]),
        ({"lengths": np.array([2, 4])}, [[0, 1], [4, 5, 6, 7]]),
        ({"chosen": np.array([[1, 0, 1, 0], [0, 1, 0, 1]])}, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # no padding
        ({"lengths": np.array([2, 9])}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_unmasked_cuts_padding_off_rows_as_a_mask_or_lengths_field_says(
    fields: dict[str, Any], kept: list[list[int]]
) -> None:
    unpadded = unmasked({"x": np.arange(8).reshape(2, 4), "text": ["a", "b"], **fields})
    assert [row.tolist() for row in unpadded.pop("x")] == kept
    assert {name: [*map(str, column)] for name, column in unpadded.items()} == {
        name: [*map(str, column)] for name, column in (*fields.items(), ("text", ["a", "b"]))
    }


@pytest.mark.parametrize(
    "where", [{"lengths": Y[1:]}, {"bounds": np.array([0, 1, 3, 6])}, {"owner": np.repeat([0, 1, 2], [1, 2, 3])}]
)
def test_columns_splits_concatenated_arrays_into_samples_by_lengths_bounds_or_owners(
    where: dict[str, Any],
) -> None:
    edges = np.array([[1, 3, 5, 4], [2, 4, 3, 5]])
    split = columns({"y": np.array([5, 6, 7]), "x": np.arange(6) * 10, "edges": edges, **where}, 3)
    assert [row.tolist() for row in split["x"]] == [[0], [10, 20], [30, 40, 50]]
    assert [row.tolist() for row in split["edges (of a sample)"]] == [[[], []], [[0], [1]], [[0, 2, 1], [1, 0, 2]]]
    without = columns({"y": np.array([5, 6, 7]), "x": np.arange(6), "edges": edges[:, :0], **where}, 3)
    assert [row.shape for row in without["edges (of a sample)"]] == [(2, 0)] * 3


def test_shingles_of_tokens_are_the_same_however_the_tokens_are_cut_into_rows() -> None:
    text = np.random.default_rng(1).integers(0, 5000, 4000)
    whole = {*shingles_of(text)}
    assert 150 < len(whole) < 350
    assert {*shingles_of(text[1000:])} <= whole
    assert shingles_of(text[:11]) == []
    shingles, count = tokens({"labels": np.zeros((4, 1000), int), "input_ids": text.reshape(4, 1000)})
    assert count == 4000
    assert {*shingles} <= whole
    assert tokens({"x": np.zeros((4, 3), int)}) == ([], 0)


@pytest.mark.parametrize(
    ("path", "batch", "expected"),
    [
        ("id", {"id": [1, 2]}, [1, 2]),
        ("id", [{"id": 4}, {"id": 5}], [4, 5]),
        ("0.meta.id", ({"meta": {"id": [4, 5]}}, 7), [4, 5]),
        ("0.sample_id", ({"sample_id": [1, 2]}, Y), [1, 2]),
        ("meta.k", {"meta": {"k": [3]}}, [3]),
        ("meta.k", [{"meta": {"k": 3}}, {"meta": {"k": 4}}], [3, 4]),
        ("x.y", Plain(x=Plain(y=[5])), [5]),
        ("1", (X, [7]), [7]),
        ("-1", (X, [7]), [7]),
    ],
)
def test_required_ids_reads_ids_at_a_dotted_path_of_the_batch(path: str, batch: Any, expected: list[int]) -> None:
    assert required_ids(batch, path) == expected


@pytest.mark.parametrize("path", ["other", "id.k", "0", "3"])
def test_required_ids_raises_audit_error_with_the_existing_paths_for_a_wrong_path(path: str) -> None:
    with pytest.raises(AuditError, match=r"meta\.k"):
        required_ids({"id": [1, 2], "meta": {"k": [1, 2]}}, path)
