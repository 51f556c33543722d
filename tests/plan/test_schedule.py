"""The steps of all ranks, held to the design's words: a plain model in lists, and what every user is promised."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.errors import ArgumentError, PlanError
from rankfeed.plan import Plan, Schedule
from rankfeed.topology import Topology

TAILS = ["even", "drop", "pad", "rest"]
TOPOLOGIES = [(world_size, batch_size) for world_size in (1, 2, 3, 4) for batch_size in range(1, 9)]


class Step(NamedTuple):
    """What the design says about one step, in plain lists."""

    positions: list[int]  # of all ranks together, sorted by (lane, place)
    fill: list[int]  # positions of the padding under "pad"
    end: int


def model(samples: int, lanes: int, batch_size: int, world_size: int, start: int, tail: str) -> list[Step]:
    whole, left = batch_size * world_size, samples - start
    if left % whole == 0 or tail == "drop":
        sizes = [whole] * (left // whole)
    elif tail in ("pad", "rest"):
        sizes = [whole] * (left // whole) + [left % whole]
    elif left < whole:
        sizes = [left]
    elif batch_size == 1:
        sizes = [whole] * (left // whole - 1) + [whole + left % whole]
    else:
        rest = whole + left % whole
        smaller = rest // 2
        sizes = [whole] * (left // whole - 1) + [rest - smaller, smaller]
    steps = []
    for size in sizes:
        positions = sorted(range(start, start + size), key=lambda p: (p % lanes, p // lanes))
        fill = [index % samples for index in range(whole - size)] if tail == "pad" else []
        start += size
        steps.append(Step(positions, fill, start))
    return steps


def ranks_of(plan: Plan, world_size: int, batch_size: int, **options: Any) -> list[Schedule]:
    return [
        Schedule(plan, batch_size=batch_size, topology=Topology(rank=rank, world_size=world_size), **options)
        for rank in range(world_size)
    ]


def hold_to_the_model(
    plan: Plan, world_size: int, batch_size: int, epoch: int = 0, start: int = 0, tail: str = "even"
) -> None:
    """Every promise about one schedule, rank by rank and step by step."""
    ranks = ranks_of(plan, world_size, batch_size, epoch=epoch, start=start, tail=tail)
    order = plan.sample_ids(epoch, np.arange(plan.num_samples)).tolist()
    expected = model(plan.num_samples, plan.lanes, batch_size, world_size, start, tail)
    assert [len(rank) for rank in ranks] == [len(expected)] * world_size
    low = start
    for step, (positions, fill, end) in enumerate(expected):
        delivered, filled, sizes = list[int](), list[int](), list[int]()
        for rank in ranks:
            ids, valid = rank.batch(step), rank.valid(step)
            assert ids.dtype == np.int64
            assert valid.dtype == bool
            assert ids.shape == valid.shape
            rows, real = len(ids), int(valid.sum())
            assert valid.tolist() == [True] * real + [False] * (rows - real)  # what fills comes last
            assert rank.first_position(step) == low + len(delivered)
            delivered += ids[:real].tolist()
            filled += ids[real:].tolist()
            sizes.append(real)
            if tail == "pad":
                assert rows == batch_size
            elif len(positions) < world_size and tail != "rest":
                assert rows == 1
            else:
                assert rows == real
            assert rank.position_after(step) == end
        if plan.order == 1 or plan.shuffle != "window":
            assert delivered == [order[position] for position in positions]
        else:
            assert Counter(delivered) == Counter(order[position] for position in positions)
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0 or len(positions) < world_size
        assert max(sizes) <= (batch_size if batch_size > 1 or tail != "even" else 2)
        if tail == "pad":
            assert filled == [order[position] for position in fill]
        assert ranks[0].global_batch(step).tolist() == order[low:end] + [order[position] for position in fill]
        low = end
    assert all(rank.end == low for rank in ranks)
    if tail != "drop":
        assert low == plan.num_samples


def plan_of(n: int) -> Plan:
    """A plan of n samples, its kind and number of lanes changing with n."""
    shuffle: Any = ("none", "global", "window")[n % 3]
    return Plan(n, shuffle=shuffle, seed=n, lanes=(1, 2, 3, 5, 64)[n % 5], window=7).with_order(1 + n // 3 % 2)


# The model


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_schedule_batches_of_several_steps_equal_those_computed_one_by_one(
    tail: Any, lanes: int, shuffle: Any, thorough: bool
) -> None:
    for (world_size, batch_size), samples in product(TOPOLOGIES[:: 1 if thorough else 5], (7, 24, 61)):
        topology = Topology(rank=world_size - 1, world_size=world_size)
        plan = Plan(samples, shuffle=shuffle, window=5, lanes=lanes)
        schedule = Schedule(plan, batch_size=batch_size, topology=topology, tail=tail)
        for first, stride in product(range(len(schedule)), (1, 2, 5)):
            steps = range(first, len(schedule), stride)
            ids, edges = schedule.batches(steps)
            together = [ids[low:high].tolist() for low, high in pairwise(edges)]
            assert together == [schedule.batch(step).tolist() for step in steps]


@pytest.mark.parametrize("tail", TAILS)
def test_schedule_delivers_every_sample_once_in_equal_steps_for_any_topology(tail: str, thorough: bool) -> None:
    sizes = [*range(1, 26), *([64, 121, 255, 256, 300] if thorough else [64, 257])]
    for n, (world_size, batch_size) in product(sizes, TOPOLOGIES[:: 1 if thorough else 3]):
        if n >= world_size or tail == "pad":
            hold_to_the_model(plan_of(n), world_size, batch_size, tail=tail)


@pytest.mark.parametrize("tail", TAILS)
def test_schedule_from_every_start_position_of_a_small_epoch_equals_the_reference_model(
    tail: str, thorough: bool
) -> None:
    for n, world_size, batch_size in product((4, 9, 17, *([24] if thorough else [])), (1, 2, 3, 4), (1, 2, 3, 5)):
        for start in range(n + 1):
            hold_to_the_model(plan_of(n), world_size, batch_size, epoch=1, start=start, tail=tail)


@given(
    n=st.integers(1, 400),
    lanes=st.integers(1, 80),
    world_size=st.integers(1, 20),
    batch_size=st.integers(1, 40),
    start=st.integers(0, 400),
    tail=st.sampled_from(TAILS),
    shuffle=st.sampled_from(["none", "global", "window"]),
)
def test_random_schedules_equal_the_reference_model(
    n: int, lanes: int, world_size: int, batch_size: int, start: int, tail: str, shuffle: Any
) -> None:
    if n >= world_size or tail == "pad":
        plan = Plan(n, lanes=lanes, shuffle=shuffle, window=10)
        hold_to_the_model(plan, world_size, batch_size, start=min(start, n), tail=tail)


@pytest.mark.parametrize("world_size", [5, 7, 8, 16, 33, 64])
def test_schedules_with_many_ranks_equal_the_reference_model(world_size: int) -> None:
    for n, batch_size, tail in product((64, 65, 100, 129, 200), (1, 2, 3), TAILS):
        hold_to_the_model(plan_of(n), world_size, batch_size, tail=tail)


# Resuming


def delivered(ranks: list[Schedule], steps: int) -> Iterator[int]:
    for step, rank in product(range(steps), ranks):
        yield from rank.batch(step)[rank.valid(step)].tolist()


def stops(ranks: list[Schedule]) -> Iterator[tuple[int, int]]:
    """Every point between two steps: how many were taken, and the position then."""
    yield 0, ranks[0].start
    for step in range(len(ranks[0])):
        yield step + 1, ranks[0].position_after(step)


SMALL = list(product((1, 2, 3, 4), (1, 2, 3)))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n", [4, 7, 12, pytest.param(17, marks=pytest.mark.slow)])
def test_resuming_on_another_topology_loses_and_repeats_no_sample(n: int, tail: str) -> None:
    plan = plan_of(n)
    for before, after in product(SMALL, SMALL):
        ranks = ranks_of(plan, *before, epoch=2, tail=tail)
        for steps, position in stops(ranks):
            resumed = ranks_of(plan, *after, epoch=2, start=position)
            assert len({len(rank) for rank in resumed}) == 1
            count = Counter(delivered(ranks, steps)) + Counter(delivered(resumed, len(resumed[0])))
            assert count == Counter(range(n)), (n, before, after, steps)
            assert resumed[0].end == n
            assert position < n or len(resumed[0]) == 0


@given(
    n=st.integers(8, 500),
    lanes=st.integers(1, 20),
    legs=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 9), st.integers(0, 9)), max_size=8),
)
def test_a_chain_of_resumes_on_changing_topologies_loses_and_repeats_no_sample(
    n: int, lanes: int, legs: list[tuple[int, int, int]]
) -> None:
    plan, position, count = Plan(n, lanes=lanes), 0, Counter[int]()
    for world_size, batch_size, steps in [*legs, (1, 7, n)]:
        ranks = ranks_of(plan, world_size, batch_size, start=position)
        steps = min(steps, len(ranks[0]))
        count.update(delivered(ranks, steps))
        position = ranks[0].position_after(steps - 1) if steps else position
    assert position == n
    assert count == Counter(range(n))


def test_resuming_on_the_same_topology_gives_the_same_remaining_batches() -> None:
    plan = Plan(101, lanes=4)
    for tail, (world_size, batch_size) in product(TAILS, SMALL):
        ranks = ranks_of(plan, world_size, batch_size, tail=tail)
        whole = plan.num_samples // (world_size * batch_size) - 1  # the steps that are full for sure
        for steps, position in list(stops(ranks))[:whole]:
            resumed = ranks_of(plan, world_size, batch_size, tail=tail, start=position)
            for before, after in zip(ranks, resumed, strict=True):
                assert len(after) == len(before) - steps
                for step in range(len(after)):
                    assert np.array_equal(after.batch(step), before.batch(step + steps))
                    assert after.position_after(step) == before.position_after(step + steps)


# The same global batches


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("whole", [4, 6, 12, pytest.param(24, marks=pytest.mark.slow)])
def test_global_batches_contain_the_same_samples_for_any_number_of_ranks(whole: int, tail: str) -> None:
    # A batch of one row is the design's exception under "even".
    worlds = [w for w in range(1, whole + 1) if whole % w == 0 and (w < whole or tail != "even")]
    for n in [*range(whole, 2 * whole + 3), 3 * whole - 1, 100]:
        for start in (0, 1, n // 2):
            seen = []
            for world_size in worlds:
                ranks = ranks_of(plan_of(n), world_size, whole // world_size, epoch=1, start=start, tail=tail)
                batches = []
                for step in range(len(ranks[0])):
                    count = Counter(np.concatenate([rank.batch(step) for rank in ranks]).tolist())
                    batches.append(Counter(ranks[0].global_batch(step).tolist()))
                    if n - start >= world_size or tail != "even":  # otherwise some ranks have a masked row
                        assert count == batches[-1]
                seen.append(batches)
            assert all(batches == seen[0] for batches in seen), (n, start)


# Tails, by example


#: The sizes of steps on the ranks, of an epoch of (samples, ranks, batch size, tail).
TAIL_SIZES: dict[tuple[int, int, int, str], list[list[int]]] = {
    # The last two steps take the larger and the smaller half of the rest.
    (10, 1, 4, "even"): [[4], [3], [3]],
    (9, 1, 4, "even"): [[4], [3], [2]],
    (11, 1, 4, "even"): [[4], [4], [3]],
    (5, 1, 4, "even"): [[3], [2]],
    (13, 2, 3, "even"): [[3, 3], [2, 2], [1, 2]],
    # A rest alone is one step, and a multiple has only full ones.
    (3, 1, 4, "even"): [[3]],
    (8, 2, 2, "even"): [[2, 2], [2, 2]],
    (5, 4, 8, "even"): [[1, 1, 1, 2]],
    # With batches of one, the rest joins the last step.
    (7, 3, 1, "even"): [[1, 1, 1], [1, 1, 2]],
    (5, 3, 1, "even"): [[1, 2, 2]],
    (5, 1, 1, "even"): [[1]] * 5,
    (11, 2, 2, "drop"): [[2, 2], [2, 2]],
    (3, 2, 2, "drop"): [],
    (11, 2, 2, "pad"): [[2, 2], [2, 2], [1, 2]],
}


@pytest.mark.parametrize("epoch", TAIL_SIZES, ids=str)
def test_sizes_of_the_last_steps_of_an_epoch_follow_the_tail_option(epoch: tuple[int, int, int, str]) -> None:
    samples, world_size, batch_size, tail = epoch
    ranks = ranks_of(Plan(samples), world_size, batch_size, tail=tail)
    sizes = [[int(rank.valid(step).sum()) for rank in ranks] for step in range(len(ranks[0]))]
    assert sizes == TAIL_SIZES[epoch]


def test_pad_repeats_an_epoch_smaller_than_a_batch_as_often_as_it_takes() -> None:
    ranks = ranks_of(Plan(2, shuffle="none"), 3, 2, tail="pad")
    assert [rank.valid(0).tolist() for rank in ranks] == [[False, False], [True, False], [True, False]]
    assert ranks[0].global_batch(0).tolist() == [0, 1, 0, 1, 0, 1]


# Asking


def test_writing_into_a_returned_batch_does_not_change_the_schedule() -> None:
    schedule = Schedule(Plan(100), batch_size=10, topology=Topology())
    before = schedule.batch(3).tolist()
    schedule.batch(3)[:] = -1
    assert schedule.batch(3).tolist() == before


def test_threads_reading_one_schedule_at_once_get_correct_batches() -> None:
    def epochs() -> list[Schedule]:
        plan = Plan([5, 0, 11] * 100, shuffle="window", window=64, lanes=4)
        return [Schedule(plan, batch_size=4, topology=Topology(0, 2), epoch=epoch) for epoch in range(8)]

    expected = [[schedule.batch(step).tolist() for step in range(190)] for schedule in epochs()]
    shared = epochs()

    def read(seed: int) -> int:
        asked = np.random.default_rng(seed).integers(0, [8, 190], (300, 2)).tolist()
        return sum(shared[epoch].batch(step).tolist() != expected[epoch][step] for epoch, step in asked)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(read, range(8))) == 0
    finally:
        sys.setswitchinterval(interval)


def test_a_pickled_schedule_is_small_and_gives_the_same_batches() -> None:
    schedule = Schedule(Plan(10**12, lanes=64), batch_size=16_384, topology=Topology(5, 8), start=77)
    before = schedule.batch(1_000)
    text = pickle.dumps(schedule)
    assert len(text) < 2_000
    assert np.array_equal(pickle.loads(text).batch(1_000), before)


@pytest.mark.parametrize("step", [-1, 5, 2**70, 1.0, True, None, "0"])
@pytest.mark.parametrize("ask", ["batch", "valid", "global_batch", "position_after", "first_position"])
def test_schedule_with_an_invalid_step_raises_an_error(ask: str, step: Any) -> None:
    with pytest.raises((ArgumentError, PlanError), match="step"):
        getattr(Schedule(Plan(10), batch_size=2, topology=Topology()), ask)(step)


@pytest.mark.parametrize(
    "options",
    [
        *({"batch_size": 0}, {"batch_size": -2}, {"batch_size": 2.0}, {"batch_size": True}),
        *({"batch_size": None}, {"epoch": -1}, {"epoch": 1.5}, {"start": -1}, {"start": 11}, {"start": 2.0}),
        *({"start": None}, {"tail": "pads"}, {"tail": None}, {"tail": True}),
    ],
    ids=str,
)
def test_schedule_with_invalid_options_raises_an_error(options: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, PlanError)):
        Schedule(Plan(10), **{"batch_size": 2, "topology": Topology(), **options})


@pytest.mark.parametrize("tail", ["even", "drop"])
def test_schedule_with_fewer_samples_than_ranks_raises_plan_error_suggesting_pad(tail: Any) -> None:
    with pytest.raises(PlanError, match=r"(?s)fewer samples than there are ranks.*pad"):
        Schedule(Plan(3), batch_size=2, topology=Topology(0, 4), tail=tail)
    with pytest.raises(PlanError, match="fewer samples than there are ranks"):
        Schedule(Plan(3), batch_size=2, topology=Topology(0, 4), tail=tail, start=3)


def test_schedule_accepts_numpy_integers() -> None:
    numbers: dict[str, Any] = {"batch_size": np.int32(4), "epoch": np.uint8(1), "start": np.int64(2)}
    schedule = Schedule(Plan(np.int64(30)), topology=Topology(0, 2), **numbers)
    same = Schedule(Plan(30), batch_size=4, topology=Topology(0, 2), epoch=1, start=2)
    assert [type(schedule.position_after(np.int64(0))), type(len(schedule))] == [int, int]
    assert np.array_equal(schedule.batch(np.int16(1)), same.batch(1))


@pytest.mark.parametrize("tail", TAILS)
def test_schedule_shares_gives_rows_and_valid_rows_of_all_ranks_on_every_rank(tail: str, thorough: bool) -> None:
    for (world_size, batch_size), samples in product(TOPOLOGIES, range(4, 40, 1 if thorough else 5)):
        ranks = ranks_of(Plan(samples), world_size, batch_size, tail=tail)
        for step in range(len(ranks[0])):
            wanted = [(len(rank.batch(step)), int(rank.valid(step).sum())) for rank in ranks]
            assert all(rank.shares(step) == wanted for rank in ranks)


def test_schedule_errors_state_the_epoch_and_the_rank() -> None:
    topology = Topology(rank=1, world_size=3)
    plan = Plan(2)
    with pytest.raises(PlanError, match="where: epoch 4, rank 1 of 3"):
        Schedule(plan, batch_size=1, topology=topology, epoch=4)
    with pytest.raises(PlanError, match="where: epoch 4, rank 1"):
        Schedule(plan, batch_size=1, topology=topology, epoch=4, start=3)
    with pytest.raises(PlanError, match=r"(?s)counted from start=1.*where: epoch 4, rank 1"):
        Schedule(Plan(9), batch_size=1, topology=topology, epoch=4, start=1).batch(7)
    with pytest.raises(PlanError, match="where: epoch 4"):
        plan.sample_ids(4, [2])
