"""Keys are counted as a Counter counts them, in however many files."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfeed.diagnostics.audit.counting import EXAMPLES, Count, Dealt, bits_for, count, distinct, is_in
from rankfeed.diagnostics.keys import Words, keys_of, words_of
from rankfeed.errors import AuditError


def keys(width: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    word = st.one_of(st.integers(0, 3), st.sampled_from([2**64 - 1, 2**63, 2**63 - 1]))
    return st.lists(st.tuples(*[word] * width), max_size=40)


def words(some: list[tuple[int, ...]], width: int) -> Words:
    return np.array(some, np.uint64).reshape(-1, width)


def as_tuples(some: Words) -> list[tuple[int, ...]]:
    return [tuple(each) for each in some.tolist()]


@given(st.data(), st.integers(1, 2), st.integers(0, 3))
@settings(deadline=None)
def test_keys_are_counted_as_a_counter_counts_them(data: st.DataObject, width: int, bits: int) -> None:
    came, due = data.draw(keys(width)), data.draw(keys(width))
    found = Count.none(width)
    with TemporaryDirectory() as folder:
        dealt = [Dealt(Path(folder), name, width, bits) for name in ("came", "due")]
        for each, some in zip(dealt, (came, due), strict=True):
            each.deal([words(some[:7], width), words(some[7:], width)])
        for number in range(1 << bits):
            expected, _ = distinct(dealt[1].read(number))
            found = found.plus(count(dealt[0].read(number), expected))
        assert not list(Path(folder).iterdir())
    counted = Counter(came)
    repeated = {key: times for key, times in counted.items() if times > 1}
    assert (found.deliveries, found.unique) == (len(came), len(counted))
    assert found.missing == len(set(due) - set(came))
    assert found.unknown == len(set(came) - set(due))
    examples = dict(zip(as_tuples(found.repeated_keys), found.times, strict=True))
    assert len(examples) == min(EXAMPLES, len(repeated))
    assert examples.items() <= repeated.items()
    assert set(as_tuples(found.missing_keys)) <= set(due) - set(came)
    assert set(as_tuples(found.unknown_keys)) <= set(came) - set(due)


@given(st.data(), st.integers(1, 2))
def test_keys_are_found_among_others(data: st.DataObject, width: int) -> None:
    some, others = data.draw(keys(width)), data.draw(keys(width))
    among, times = distinct(words(others, width))
    assert dict(zip(as_tuples(among), times.tolist(), strict=True)) == Counter(others)
    assert is_in(words(some, width), among).tolist() == [each in others for each in some]


def test_files_are_as_many_as_it_takes_for_one_to_fit() -> None:
    assert bits_for(0, 1, 1) == 0
    for count_ in (10, 10**4, 10**6, 10**9):
        for width in (1, 2):
            bits = bits_for(count_, width, 1 << 28)
            assert bits == 0 or count_ * width * 8 >> (bits - 1) > (1 << 28) // 12
            assert count_ * width * 8 >> bits <= 1 << 28


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
