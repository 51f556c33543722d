"""Keys are counted as a Counter counts them, in however many files."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankfeed.diagnostics import multiset
from rankfeed.diagnostics.keys import KeyArray, key_array, keys_of
from rankfeed.diagnostics.multiset import (
    EXAMPLES,
    PARTITIONS,
    HashPartitions,
    KeyCounts,
    Keys,
    StepLog,
    count,
    partition_ranges,
)
from rankfeed.errors import AuditError

KEYS = st.one_of(
    st.lists(st.one_of(st.integers(0, 3), st.sampled_from([2**63 - 1, -(2**63), -1])), max_size=40),
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=40),
)


def counted(delivered: Keys, expected: KeyArray) -> KeyCounts:
    return count([delivered], [StepLog.of([40], [-1], [0])], np.unique(expected))


def every(keys: KeyArray) -> Keys:
    return Keys(keys, np.arange(len(keys)))


@given(KEYS, st.data(), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_hash_partitions_on_disk_count_keys_as_collections_counter_does(
    ids: list[Any], data: st.DataObject, buffer: int
) -> None:
    universe = data.draw(st.lists(st.sampled_from(ids), max_size=40)) if ids else []
    delivered, expected = key_array(ids), key_array([*universe, *ids[:0]])
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiset, "_BUFFER", buffer)  # most records are written to the file
        parts = [HashPartitions(Path(folder, name), numbered=name == "came") for name in ("came", "due")]
        for partitions, keys in zip(parts, (delivered, expected), strict=True):
            for chunk in keys[:7], keys[7:]:
                partitions.add(chunk)
            assert len(partitions) == len(keys)
        counts = KeyCounts()
        for low in range(0, PARTITIONS, 64):
            chunk, wanted = (part.read(low, low + 64) for part in parts)
            counts += counted(chunk, wanted.keys)
        read = parts[0].read(0, PARTITIONS)
        assert sorted(read.numbers.tolist()) == [*range(len(delivered))]
        assert read.keys.tolist() == delivered[read.numbers].tolist()
    names = dict(zip(delivered.tolist(), ids, strict=True))
    assert (counts.deliveries, counts.unique, counts.missing) == (len(ids), len({*ids}), 0)
    assert counts.unknown == len({*ids} - {*universe})
    assert {names[key] for key in counts.unknown_keys} <= {*ids} - {*universe}
    whole = counted(every(delivered), expected)
    assert (whole.digest, whole.repeated) == (counts.digest % 2**64, counts.repeated)
    back = counted(every(expected), delivered)
    assert (back.missing, back.missing_digest == 0) == (counts.unknown, not counts.unknown)
    assert len(back.missing_keys) == min(EXAMPLES, back.missing)


@given(KEYS)
@settings(deadline=None, max_examples=50)
def test_count_reports_the_places_of_repeated_keys_and_repeats_between_ranks_and_workers(ids: list[Any]) -> None:
    keys, numbers = key_array(ids), range(len(ids))
    # Three ranks deliver in turn, each in seven steps of two rows, every other one by worker 1.
    delivered = [every(keys[rank::3]) for rank in range(3)]
    counts = count(delivered, [StepLog.of([2] * 7, [-1, 1] * 3 + [-1], range(7))] * 3, np.unique(keys))
    again = {key: times for key, times in Counter(keys.tolist()).items() if times > 1}
    assert {key: times for key, times, _ in counts.repeated_keys} == dict(sorted(again.items())[:EXAMPLES])
    places: dict[Any, list[Any]] = {}
    for position in numbers:
        step, row = divmod(position // 3, 2)
        places.setdefault(keys[position], []).append((position % 3, step % 2 or -1, step, row))
    for key, _, first in counts.repeated_keys:
        assert first == places[key][:4]
    assert counts.repeated == Counter((rank, step) for spots in places.values() for rank, _, step, _ in spots[1:])
    assert counts.repeated_at_end == Counter(
        rank for spots in places.values() for rank, _, step, _ in spots[1:] if step == 6
    )
    per_rank = len({(key, row % 3) for row, key in enumerate(ids)})
    assert counts.between_ranks == per_rank - len({*ids})
    per_worker = len({(key, row % 3, row // 6 % 2) for row, key in enumerate(ids)})
    assert counts.between_workers == per_worker - per_rank


def test_partition_ranges_cover_all_partitions_and_are_one_range_if_they_fit_in_memory() -> None:
    for size in (0, 10, 10**4, 10**6, 10**10):
        ranges = partition_ranges(size, 1 << 28)
        assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
        assert ranges[-1][1] == PARTITIONS
        assert len(ranges) == 1 or size > (1 << 28) // 8


def test_key_array_maps_equal_ids_of_any_type_to_equal_keys_and_raises_for_unusable_ids() -> None:
    import torch

    same = [[1, 2], (1, 2), np.array([1, 2], np.int32), torch.tensor([1, 2]), [torch.tensor(1), np.uint8(2)]]
    assert [key_array(ids).tolist() for ids in same] == [[1, 2]] * 5
    for large in (np.array([2**63], np.uint64), [2**63, 1], [1, -(2**63) - 1], [2**70]):
        with pytest.raises(AuditError, match="too large"):
            key_array(large)
    with pytest.raises(AuditError, match="fields of ids"):
        key_array([torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert key_array([]).dtype == np.int64
    different = ["1", b"1", "2", 1.5, None, True, (1, 2), (2, 1), ("1", "2"), ("12",)]
    assert len({*key_array(different).tolist()}) == len(different)
    for one, other in (
        ([True, False], np.array([True, False])),
        ([0.5, 1.5], torch.tensor([0.5, 1.5], dtype=torch.float64)),
        ([(1, 2), (3, 4)], np.array([[1, 2], [3, 4]])),
        ([(1, 2)], [(np.int64(1), np.uint8(2))]),
        (["a", "b"], np.array(["a", "b"], object)),
        ([1, 2], np.array([1, 2], object)),
    ):
        assert key_array(one).tolist() == key_array(other).tolist()
    assert key_array(np.array([[1, 2], [1, 2], [2, 1]])).dtype == "S16"
    for value in (5, "text", None, np.int64(3)):
        with pytest.raises(AuditError, match="one for each sample"):
            key_array(value)
    with pytest.raises(AuditError, match="cannot be hashed"):
        key_array([object()])


def test_keys_of_reads_ids_from_dicts_tuples_and_objects_by_name_index_or_function() -> None:
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
        keys, by_content = keys_of(batch, key)  # type: ignore[arg-type]
        assert (keys.tolist(), by_content) == ([4, 5], False)
    with pytest.raises(AuditError, match=r"nothing at 'id'[^$]*'x' of 2 rows"):
        keys_of({"x": torch.zeros(2, 3)}, "id")


def test_keys_of_hashes_the_content_of_samples_without_ids_and_ignores_padding() -> None:
    import torch

    x = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])
    for batch in ({"x": x, "name": ["a", "a", "a"]}, (x, torch.zeros(3)), x, [{"x": row} for row in x]):
        keys, by_content = keys_of(batch)
        assert by_content
        first, second, third = keys.tolist()
        assert first == second != third
    images = [(torch.ones(4, 4) * label, label) for label in (1, 2, 2)]
    assert len(keys_of(images)[0]) == 3
    assert len(keys_of({"x": torch.ones(3, 2, dtype=torch.bfloat16)})[0]) == 3
    named = {"text": ["hello world", "hello you"], "text_lengths": [2, 2]}
    assert len({*keys_of(named)[0].tolist()}) == 2
    padded = {"x": torch.tensor([[1, 2, 0], [1, 2, 3]]), "x_lengths": torch.tensor([2, 3])}
    shorter = {"x": torch.tensor([[1, 2]]), "x_lengths": torch.tensor([2])}
    assert keys_of(shorter)[0][0] == keys_of(padded)[0][0]
    for batch in ({"x": 5}, 7, {}):
        with pytest.raises(AuditError, match="cannot be told apart"):
            keys_of(batch)
