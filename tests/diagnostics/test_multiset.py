"""Keys are counted as a Counter counts them, in however many files."""

from collections import Counter
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfeed.diagnostics import multiset
from rankfeed.diagnostics.keys import Words, keys_of, words_of
from rankfeed.diagnostics.multiset import (
    EXAMPLES,
    PARTITIONS,
    HashPartitions,
    count,
    distinct,
    is_in,
    pack_places,
    partition_ranges,
    repeats,
    unpack_places,
)
from rankfeed.errors import AuditError


def keys(width: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    word = st.one_of(st.integers(0, 3), st.sampled_from([2**64 - 1, 2**63, 2**63 - 1]))
    return st.lists(st.tuples(*[word] * width), max_size=40)


def words(some: list[tuple[int, ...]], width: int) -> Words:
    return np.array(some, np.uint64).reshape(-1, width)


def as_tuples(some: Words) -> list[tuple[int, ...]]:
    return [tuple(each) for each in some.tolist()]


@given(st.data(), st.integers(1, 2), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_keys_are_counted_as_a_counter_counts_them(data: st.DataObject, width: int, buffer: int) -> None:
    came, due = data.draw(keys(width)), data.draw(keys(width))
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiset, "_BUFFER", buffer)  # most records are written to the file
        parts = [HashPartitions(Path(folder, name), width) for name in ("came", "due")]
        for each, some in zip(parts, (came, due), strict=True):
            for row in words(some[:7], width), words(some[7:], width):
                each.add(row)
            assert len(each) == len(some)
        counts = [
            count(parts[0].read(low, low + 64), distinct(parts[1].read(low, low + 64))[0])
            for low in range(0, PARTITIONS, 64)
        ]
        assert sorted(as_tuples(parts[0].read(0, PARTITIONS))) == sorted(came)
    found = reduce(add, counts)
    counted = Counter(came)
    assert (found.deliveries, found.unique) == (len(came), len(counted))
    assert found.missing == len(set(due) - set(came))
    assert found.unknown == len(set(came) - set(due))
    assert set(as_tuples(found.missing_keys)) <= set(due) - set(came)
    assert len(found.unknown_keys) == min(EXAMPLES, found.unknown)
    whole = count(words(came, width), distinct(words(due, width))[0])
    assert (whole.digest, whole.missing_digest) == (found.digest, found.missing_digest)


@given(st.data(), st.integers(1, 2))
@settings(deadline=None, max_examples=50)
def test_all_deliveries_of_repeated_keys_are_found(data: st.DataObject, width: int) -> None:
    came = data.draw(keys(width))
    ranks = np.array([row % 3 for row in range(len(came))], np.int64)
    places = np.concatenate([pack_places(row // 2, 1, row % 2 or None) for row in range(len(came))] or [[]])
    found = repeats(words(came, width), places.astype(np.uint64), ranks)
    counted = Counter(came)
    again = {key: times for key, times in counted.items() if times > 1}
    assert Counter(as_tuples(found.keys)) == again
    assert int((~found.first).sum()) == sum(again.values()) - len(again)
    per_rank = len({(key, row % 3) for row, key in enumerate(came)})
    assert found.between_ranks == per_rank - len(counted)
    per_worker = len({(key, row % 3, row % 2) for row, key in enumerate(came)})
    assert found.between_workers == per_worker - per_rank


@given(st.integers(0, 2**31), st.integers(1, 5), st.one_of(st.none(), st.integers(0, 1000)))
def test_places_are_packed_without_loss(step: int, rows: int, worker: int | None) -> None:
    steps, found, workers = unpack_places(pack_places(step, rows, worker))
    assert steps.tolist() == [step] * rows
    assert found.tolist() == [*range(rows)]
    assert {*workers.tolist()} == {-1 if worker is None else worker}


@given(st.data(), st.integers(1, 2))
def test_keys_are_found_among_others(data: st.DataObject, width: int) -> None:
    some, others = data.draw(keys(width)), data.draw(keys(width))
    among, times = distinct(words(others, width))
    assert dict(zip(as_tuples(among), times.tolist(), strict=True)) == Counter(others)
    assert is_in(words(some, width), among).tolist() == [each in others for each in some]


def test_partitions_are_counted_together_as_far_as_they_fit() -> None:
    for records in (0, 10, 10**4, 10**6, 10**9):
        ranges = partition_ranges(records, 2, 1 << 28)
        assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
        assert ranges[-1][1] == PARTITIONS
        assert len(ranges) == 1 or records * 16 > (1 << 28) // 8


def test_keys_are_the_same_for_the_same_value_and_differ_for_others() -> None:
    import torch

    same = [[1, 2], (1, 2), np.array([1, 2], np.int32), torch.tensor([1, 2]), [torch.tensor(1), np.uint8(2)]]
    assert [words_of(each).tolist() for each in same] == [[[1], [2]]] * 5
    for large in (np.array([2**63], np.uint64), [2**63, 1], [1, -(2**63) - 1], [2**70]):
        with pytest.raises(AuditError, match="too large"):
            words_of(large)
    with pytest.raises(AuditError, match="fields of ids"):
        words_of([torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert words_of([]).shape == (0, 1)
    different = ["1", b"1", "2", 1.5, None, True, (1, 2), (2, 1), ("1", "2"), ("12",)]
    assert len(distinct(words_of(different))[0]) == len(different)
    for one, other in (
        ([True, False], np.array([True, False])),
        ([0.5, 1.5], torch.tensor([0.5, 1.5], dtype=torch.float64)),
        ([(1, 2), (3, 4)], np.array([[1, 2], [3, 4]])),
        ([(1, 2)], [(np.int64(1), np.uint8(2))]),
        (["a", "b"], np.array(["a", "b"], object)),
        ([1, 2], np.array([1, 2], object)),
    ):
        assert words_of(one).tolist() == words_of(other).tolist()
    assert words_of(np.array([[1, 2], [1, 2], [2, 1]])).shape == (3, 2)
    for value in (5, "text", None, np.int64(3)):
        with pytest.raises(AuditError, match="one for each sample"):
            words_of(value)
    with pytest.raises(AuditError, match="cannot be hashed"):
        words_of([object()])


def test_keys_are_found_in_whatever_a_loader_yields() -> None:
    import torch

    class Graphs:
        id = torch.tensor([4, 5])

    for batch, key in (
        ({"id": [4, 5]}, "id"),
        ([{"id": 4}, {"id": 5}], "id"),
        ((torch.zeros(2, 3), torch.tensor([4, 5])), 1),
        (Graphs(), "id"),
        ([7, [4, 5]], lambda batch: batch[1]),
        ([(7, 4), (8, 5)], 1),
    ):
        found, by_content = keys_of(batch, key)  # type: ignore[arg-type]
        assert (found.tolist(), by_content) == ([[4], [5]], False)
    with pytest.raises(AuditError, match=r"no 'id'[^$]*'x' \(shape \(2, 3\)\)"):
        keys_of({"x": torch.zeros(2, 3)}, "id")


def test_samples_without_ids_are_known_by_what_they_hold() -> None:
    import torch

    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])
    for batch in ({"x": x, "name": ["a", "a", "a"]}, (x, torch.zeros(3)), x, [{"x": row} for row in x]):
        found, by_content = keys_of(batch)
        assert by_content
        first, second, third = as_tuples(found)
        assert first == second != third
    images = [(torch.ones(4, 4) * number, number) for number in (1, 2, 2)]
    assert len(keys_of(images)[0]) == 3
    assert len(keys_of({"x": torch.ones(3, 2, dtype=torch.bfloat16)})[0]) == 3
    named = {"text": ["hello world", "hello you"], "text_lengths": [2, 2]}
    assert len(distinct(keys_of(named)[0])[0]) == 2
    padded = {"x": torch.tensor([[1, 2, 0], [1, 2, 3]]), "x_lengths": torch.tensor([2, 3])}
    shorter = {"x": torch.tensor([[1, 2]]), "x_lengths": torch.tensor([2])}
    assert as_tuples(keys_of(shorter)[0])[0] == as_tuples(keys_of(padded)[0])[0]
    for batch in ({"x": torch.zeros(3), "y": torch.zeros(2)}, {"x": 5}, 7, {}):
        with pytest.raises(AuditError, match="cannot be told apart"):
            keys_of(batch)
