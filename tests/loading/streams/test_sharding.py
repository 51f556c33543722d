"""A stream cut into steps and ranks, compared with what a Schedule says of as many samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.errors import PlanError, StreamError
from rankfeed.loading.batch_builder import BatchSpec
from rankfeed.loading.streams.sharding import StreamPosition, StreamSharding
from rankfeed.loading.streams.stream import Stream, samples_fingerprint
from rankfeed.plan import Plan, Schedule
from rankfeed.plan.schedule import Tail
from rankfeed.topology import Topology

TAILS: tuple[Tail, ...] = ("even", "drop", "pad")
Step = tuple[BatchSpec, StreamPosition]


def cut(size: int, batch: int, ranks: int, tail: Tail, start: int = 0) -> list[list[Step]]:
    """The steps of each rank that read the numbers 0 to size - 1."""
    found = []
    for rank in range(ranks):
        reader = Stream(lambda: range(size)).open(start=start)
        found.append(list(StreamSharding(batch, rank, ranks, False, tail, start=start).specs(reader)))
    return found


def rows_of(share: BatchSpec) -> np.ndarray[Any, Any]:
    """Sample ids without padding rows."""
    return share.ids if share.valid is None else share.ids[share.valid]


def delivered(steps: list[list[Step]]) -> list[list[int]]:
    """Of each step, the samples that count, over all ranks."""
    assert len({len(each) for each in steps}) == 1, "ranks take different numbers of steps"
    found = []
    for shares in zip(*steps, strict=True):
        assert len({place for _, place in shares}) == 1
        ids: list[int] = []
        for share, _ in shares:
            assert share.samples is not None
            assert len(share.samples) == len(share.ids) >= 1
            assert list(share.samples) == share.ids.tolist()
            assert (share.valid is None) == (shares[0][0].valid is None)
            ids += rows_of(share).tolist()
        found.append(sorted(ids))
    return found


def check(size: int, batch: int, ranks: int, tail: Tail, start: int = 0) -> list[int]:
    """Compare with the schedule of a list; the places behind each step."""
    steps = cut(size, batch, ranks, tail, start)
    plan = Plan(size, shuffle="none")
    schedule = Schedule(plan, batch_size=batch, topology=Topology(0, ranks), start=start, tail=tail)
    bounds = [start, *(schedule.position_after(step) for step in range(len(schedule)))]
    assert delivered(steps) == [list(range(*each)) for each in itertools.pairwise(bounds)]
    for step in range(len(schedule)):
        sizes = [len(rows_of(each[step][0])) for each in steps]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(sizes) == sorted(real for _, real in schedule.shares(step))
        rows = {len(each[step][0].ids) for each in steps}
        assert rows == {batch} or tail != "pad"
        assert (steps[0][step][0].valid is not None) == schedule.is_filled(step)
        first = [each[step][0].position for each in steps]
        assert len(set(first)) == ranks or bounds[step + 1] - bounds[step] < ranks
    places = [place.num_read for _, place in steps[0]]
    assert places == bounds[1:]
    return places


def of_a_rank(size: int, shard: tuple[int, int]) -> range:
    return range(size)


def cases(most: int, ranks: int, batches: int) -> Iterator[tuple[int, int, int, Tail]]:
    return itertools.product(range(1, most), range(1, batches), range(1, ranks), TAILS)


def every_way(most: int, ranks: int = 5, batches: int = 5) -> int:
    """Each size, batch size, number of ranks and tail; stopped at each step, resumed on each number of ranks."""
    tried = 0
    for size, batch, world, tail in cases(most, ranks, batches):
        if size < world and tail != "pad":
            with pytest.raises(PlanError, match="fewer samples than there are ranks"):
                cut(size, batch, world, tail)
            continue
        for place in check(size, batch, world, tail):
            for other in range(1, ranks):
                if size >= other or tail == "pad":
                    check(size, batch % 3 + 1, other, tail, start=place)
                    tried += 1
    return tried


def test_steps_are_those_of_a_list_wherever_they_are_resumed() -> None:
    assert every_way(11, ranks=4, batches=4) > 300


@pytest.mark.soak
def test_steps_are_those_of_a_list_for_every_size_to_60() -> None:
    print(f"\n{every_way(61)} resumptions of streams of 1 to 60 samples on 1 to 4 ranks")


@given(
    st.integers(1, 400),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(TAILS),
    st.data(),
)
def test_every_sample_once_for_any_topology(size: int, batch: int, ranks: int, tail: Tail, data: Any) -> None:
    if size < ranks:
        tail = "pad"
    places = check(size, batch, ranks, tail)
    if places:
        other = data.draw(st.integers(1, ranks))
        check(size, batch, other, tail, start=data.draw(st.sampled_from(places)))


def test_an_empty_stream_is_refused_and_one_at_its_end_is_none() -> None:
    for tail in TAILS:
        with pytest.raises(StreamError, match="yielded nothing"):
            cut(0, 2, 2, tail)
        assert cut(6, 2, 2, tail, start=6) == [[], []]


def test_a_share_of_its_own_is_taken_whole() -> None:
    for size in range(12):
        for tail in ("drop", "pad"):
            reader = Stream(partial(of_a_rank, size)).open(shard=(1, 3))
            steps = list(StreamSharding(4, 1, 3, True, tail).specs(reader))
            ids = np.concatenate([[], *(rows_of(share) for share, _ in steps)]).astype(int).tolist()
            kept = size if tail == "pad" else size // 4 * 4
            assert Counter(ids) == Counter(place * 3 + 1 for place in range(kept))
            assert len(steps) == (-(-size // 4) if tail == "pad" else size // 4)
            assert all(len(share.ids) == 4 for share, _ in steps)


def test_marks_tell_streams_apart_and_let_random_numbers_be() -> None:
    same = [{"text": "a", "x": np.random.rand(3), "n": 1.5}, {"text": "a", "x": np.random.rand(3), "n": 2.5}]
    assert samples_fingerprint([same[0]]) == samples_fingerprint([same[1]])
    keyed = [{"__key__": "a", "__url__": f"/{node}/0.tar"} for node in ("n1", "n2")]
    assert samples_fingerprint([keyed[0]]) == samples_fingerprint([keyed[1]])
    others = [{"text": "b"}, {"text": "a", "label": 1}, ("a",), "a", b"a", 1, 2, None]
    assert len({samples_fingerprint([each]) for each in others}) == len(others)
    numbers = [7, np.int64(7), np.array(7), np.array([7]), torch.tensor(7), torch.tensor([7])]
    assert len({samples_fingerprint([{"id": each}]) for each in numbers}) == 1
