"""An epoch's order holds every sample once, in few open blocks, whatever the blocks, lanes and windows."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import peak

from rankfeed.errors import ArgumentError, PlanError, RankfeedError
from rankfeed.plan import Plan, Schedule
from rankfeed.plan.permutation import MAX_SIZE
from rankfeed.topology import Topology

KINDS = ["none", "global", "window"]

BLOCKS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def order(plan: Plan, epoch: int = 0) -> list[int]:
    return [int(sample) for sample in plan.sample_ids(epoch, np.arange(plan.num_samples))]


# Once


@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 64, 500])
@pytest.mark.parametrize("shuffle", KINDS)
def test_plan_contains_every_sample_once_for_every_size_up_to_300(shuffle: Any, lanes: int) -> None:
    for n in range(1, 301):
        plan = Plan(n, shuffle=shuffle, seed=n, lanes=lanes, window=1 + n % 17)
        assert Counter(order(plan, epoch=n % 3)) == Counter(range(n)), n


@given(
    blocks=BLOCKS,
    shuffle=st.sampled_from(KINDS),
    seed=st.integers(),
    window=st.integers(1, 300),
    lanes=st.integers(1, 700),
    epoch=st.integers(0, 2**70),
)
def test_plan_contains_every_sample_once_for_any_block_sizes(
    blocks: list[int], shuffle: Any, seed: int, window: int, lanes: int, epoch: int
) -> None:
    plan = Plan(blocks, shuffle=shuffle, seed=seed, window=window, lanes=lanes)
    assert Counter(order(plan, epoch)) == Counter(range(sum(blocks)))


@pytest.mark.parametrize(
    "blocks",
    [[1], [1] * 50, [0, 1], [1, 0], [0, 0, 5, 0, 0], [0, 3, 0, 0, 4, 0], [1, 1000, 1], [0] * 99 + [7] + [0] * 99],
    ids=str,
)
@pytest.mark.parametrize("lanes", [1, 2, 5, 2000])
@pytest.mark.parametrize("window", [1, 2, 3, 10, 10**9, 2**80])
def test_windowed_plan_contains_every_sample_once_with_empty_and_tiny_blocks(
    blocks: list[int], lanes: int, window: int
) -> None:
    plan = Plan(blocks, shuffle="window", lanes=lanes, window=window)
    for epoch in range(3):
        assert Counter(order(plan, epoch)) == Counter(range(sum(blocks)))


@pytest.mark.parametrize("lanes", [1, 2, 1000, 2**40])
@pytest.mark.parametrize("window", [1, 1000, 65536, 2**61])
@pytest.mark.parametrize("shuffle", KINDS)
@pytest.mark.parametrize("n", [2**53 + 1, 10**18 + 9, MAX_SIZE - 1, MAX_SIZE])
def test_sample_ids_of_the_largest_plans_are_distinct_and_in_range(
    n: int, shuffle: Any, window: int, lanes: int
) -> None:
    plan = Plan(n, shuffle=shuffle, window=window, lanes=lanes)
    middle = np.random.default_rng(0).integers(300, n - 300, 300)
    positions = np.unique(np.concatenate([np.arange(300), middle, np.arange(n - 300, n)]))
    ids = plan.sample_ids(0, positions)
    assert ids.min() >= 0
    assert ids.max() < n
    assert max(Counter(ids.tolist()).values()) == 1


# Order


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_plan_orders_differ_between_seeds_and_epochs(shuffle: Any) -> None:
    orders = Counter(
        tuple(order(Plan([7] * 10, shuffle=shuffle, seed=seed, window=20), epoch))
        for seed in range(-5, 10)
        for epoch in range(10)
    )
    assert max(orders.values()) == 1


def test_plan_without_shuffle_keeps_the_stored_order_within_each_lane() -> None:
    assert order(Plan([3, 4], shuffle="none"), epoch=8) == list(range(7))
    assert order(Plan(7, shuffle="none", lanes=3)) == [0, 3, 5, 1, 4, 6, 2]


@given(blocks=BLOCKS, seed=st.integers(0, 99))
def test_window_of_1_reads_whole_blocks_in_shuffled_order_each_rotated_to_a_random_first_row(
    blocks: list[int], seed: int
) -> None:
    line = order(Plan(blocks, shuffle="window", window=1, seed=seed))
    ends, read = np.cumsum(blocks), Counter[int]()
    place = 0
    while place < len(line):
        block = int(ends.searchsorted(line[place], side="right"))
        stop, size = int(ends[block]), blocks[block]
        assert line[place : place + size] == [*range(line[place], stop), *range(stop - size, line[place])]
        read[block] += 1
        place += size
    assert read == Counter(np.flatnonzero(blocks).tolist())


def test_windowed_plan_shuffles_samples_across_each_whole_window() -> None:
    window = 1000
    plan = Plan([100] * 100, shuffle="window", window=window)
    line = {sample: place for place, sample in enumerate(order(Plan([100] * 100, shuffle="window", window=1)))}
    places = np.array([line[sample] for sample in order(plan)]).reshape(-1, window)
    assert ((places // window) == np.arange(10)[:, None]).all()
    inside = places % window
    stayed = (inside == np.arange(window)).sum(axis=1)  # one is expected
    assert stayed.max() < 9
    assert (np.abs(np.array([np.corrcoef(place, np.arange(window))[0, 1] for place in inside])) < 0.16).all()
    assert max(Counter(map(tuple, inside.tolist())).values()) == 1  # each window in an order of its own


@pytest.mark.parametrize("size", [100, 1_000])
def test_windowed_plan_has_few_blocks_open_at_a_time(size: int) -> None:
    window = 2_000
    plan = Plan([size] * (200_000 // size), shuffle="window", window=window)
    blocks = plan.sample_ids(0, np.arange(plan.num_samples)) // size
    # A block is open from its first sample to its last: count how many are at each position.
    opened, closed = np.zeros(len(blocks) + 1, int), np.zeros(len(blocks) + 1, int)
    for block in np.unique(blocks):
        at = np.flatnonzero(blocks == block)
        opened[at[0]] += 1
        closed[at[-1] + 1] += 1
    assert np.cumsum(opened - closed).max() <= window // size + 3


def test_windowed_plan_without_block_sizes_chooses_its_own_blocks() -> None:
    plan = Plan(10_000, shuffle="window", window=100)
    assert Counter(order(plan)) == Counter(range(10_000))
    assert plan.num_blocks == 100
    assert Plan(MAX_SIZE, shuffle="window", window=1).num_blocks <= 2**20


# Positions


@given(
    blocks=BLOCKS,
    shuffle=st.sampled_from(KINDS),
    lanes=st.integers(1, 50),
    data=st.data(),
    epoch=st.integers(0, 9),
)
def test_sample_ids_of_a_list_of_positions_equal_those_of_single_positions(
    blocks: list[int], shuffle: Any, lanes: int, data: st.DataObject, epoch: int
) -> None:
    plan = Plan(blocks, shuffle=shuffle, lanes=lanes, window=7)
    positions = data.draw(st.lists(st.integers(0, plan.num_samples - 1), max_size=30))
    one_by_one = [int(plan.sample_ids(epoch, position)) for position in positions]
    assert plan.sample_ids(epoch, positions).tolist() == one_by_one


@pytest.mark.parametrize("shuffle", KINDS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0), (20, 500)])
def test_sample_ids_are_int64_in_the_shape_of_the_positions(shuffle: Any, shape: tuple[int, ...]) -> None:
    plan = Plan([4_000, 6_000], shuffle=shuffle, lanes=3, window=100)
    positions = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    ids = plan.sample_ids(0, positions)
    assert ids.dtype == np.int64
    assert ids.shape == shape
    assert np.array_equal(ids.reshape(-1), plan.sample_ids(0, positions.reshape(-1)))
    if ids.ndim:  # views of any strides
        assert np.array_equal(plan.sample_ids(0, positions.T[::-1]), ids.T[::-1])
    assert np.array_equal(positions.reshape(-1), np.arange(positions.size))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64", ">i4"])
@pytest.mark.parametrize("shuffle", KINDS)
def test_positions_and_block_sizes_may_have_any_integer_dtype(shuffle: Any, dtype: str) -> None:
    plan, same = (Plan(sizes, shuffle=shuffle) for sizes in ([50, 0, 50], np.array([50, 0, 50], dtype)))
    positions = np.arange(100).astype(dtype)
    assert same.fingerprint == plan.fingerprint
    assert same.sample_ids(0, positions[::-1]).tolist() == order(plan)[::-1]


@pytest.mark.parametrize(
    "positions",
    [
        *(-1, 10, [0, 10], [0, -1], 2**63, 2**64 - 1, [2**64], -(2**63), 0.0, [1.0], [True], ["1"], [None]),
        *([[0], [1, 2]], np.array([1], object), np.array([float("nan")]), np.array(["2020-01-01"], "M8[D]")),
        *({0}, {0: 1}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shuffle", KINDS)
def test_sample_ids_of_invalid_positions_raise_an_error(shuffle: Any, positions: Any) -> None:
    with pytest.raises((ArgumentError, PlanError)):
        Plan(10, shuffle=shuffle, lanes=3).sample_ids(0, positions)


@pytest.mark.parametrize("epoch", [-1, 0.0, True, None, "0", np.float64(1), [0]])
def test_sample_ids_of_an_invalid_epoch_raise_argument_error(epoch: Any) -> None:
    with pytest.raises(ArgumentError, match="epoch"):
        Plan(10).sample_ids(epoch, [0])


@pytest.mark.parametrize(
    "blocks",
    [
        *(0, [], [0], [0, 0], -1, [-1], [5, -1], True, 5.0, [5.0], "5", ["5"], None, [None], [True], {5}, {5: 5}),
        *([[5]], [[5], [5, 6]], np.array([5], object), np.zeros((2, 2), int), np.array(5.0), MAX_SIZE + 1, 2**100),
        *([2**62, 1], [2**61, 2**61, 64], [2**63] * 2, [2**100], [2**62] * 8),
        pytest.param(iter([5]), id="an iterator"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shuffle", KINDS)
def test_plan_with_invalid_block_sizes_raises_an_error(shuffle: Any, blocks: Any) -> None:
    with pytest.raises((ArgumentError, PlanError)):
        Plan(blocks, shuffle=shuffle)


@pytest.mark.parametrize(
    "options",
    [
        *({"shuffle": "blocks"}, {"shuffle": True}, {"shuffle": None}, {"shuffle": ["none"]}, {"seed": 1.0}),
        *({"seed": None}, {"window": 0}, {"window": -1}, {"window": 2.5}, {"lanes": 0}, {"lanes": 2**64}),
        *({"lanes": True}, {"lanes": None}),
    ],
    ids=repr,
)
def test_plan_with_invalid_options_raises_argument_error(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Plan(10, **options)


def test_errors_name_the_block_of_a_negative_size_and_the_range_of_invalid_positions() -> None:
    with pytest.raises(RankfeedError, match=r"(?s)found: -3.*where: block 2"):
        Plan([5, 1, -3, 4])
    with pytest.raises(RankfeedError, match=r"(?s)expected: 0 to 9.*found: -1 to 12"):
        Plan(10).sample_ids(0, [3, -1, 12])


# Small


@pytest.mark.parametrize("shuffle", KINDS)
def test_schedules_of_a_trillion_samples_on_16_384_ranks_need_less_than_100_mib(shuffle: Any) -> None:
    blocks = np.full(10**6, 10**6)

    def batches() -> list[np.ndarray]:
        plan = Plan(blocks, shuffle=shuffle, lanes=16_384, seed=1)
        ids_of_steps = []
        for rank in (0, 8_191, 16_383):
            topology = Topology(rank=rank, world_size=16_384)
            schedule = Schedule(plan, batch_size=32, topology=topology, start=123_456_789)
            ids_of_steps += [schedule.batch(0), schedule.batch(len(schedule) - 1)]
        return ids_of_steps

    most, ids_of_steps = peak(batches)
    assert most < 100 * 2**20
    ids = np.concatenate(ids_of_steps)
    assert max(Counter(ids.tolist()).values()) == 1
    assert 0 <= ids.min() <= ids.max() < 10**12


@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_memory_of_a_plan_does_not_grow_with_the_number_of_samples(shuffle: Any) -> None:
    def most(samples: int) -> int:
        last = np.arange(samples - 20_000, samples)
        return peak(lambda: len(Plan(samples, shuffle=shuffle, lanes=64).sample_ids(0, last)))[0]

    assert most(10**15) < 1.1 * most(10**6) + 10_000


@pytest.mark.parametrize("shuffle", KINDS)
def test_a_pickled_plan_is_small_and_gives_the_same_order(shuffle: Any) -> None:
    plan = Plan([10] * 1000, shuffle=shuffle, lanes=7, seed=4, window=55)
    before = order(plan, epoch=3)
    text = pickle.dumps(plan)
    assert len(text) < 8 * 1000 + 1000
    assert order(pickle.loads(text), epoch=3) == before
    assert len(pickle.dumps(Plan(10**12))) < 1000


# Fingerprint

BASE: dict[str, Any] = {"blocks": [5, 5, 10], "shuffle": "window", "seed": 1, "window": 4, "lanes": 2}


@pytest.mark.parametrize(
    "change",
    [
        *({"blocks": [5, 10, 5]}, {"blocks": [5, 5, 11]}, {"blocks": [5, 5, 10, 0]}, {"blocks": 20}),
        *({"shuffle": "global"}, {"shuffle": "none"}, {"seed": 2}, {"window": 5}, {"lanes": 1}),
    ],
    ids=str,
)
def test_plan_fingerprint_changes_with_each_option_that_changes_the_order(change: dict[str, Any]) -> None:
    assert Plan(**{**BASE, **change}).fingerprint != Plan(**BASE).fingerprint


def test_plans_with_the_same_order_have_the_same_fingerprint() -> None:
    plan = Plan(**BASE)
    plan.sample_ids(3, [0])
    assert plan.fingerprint == Plan(**{**BASE, "blocks": np.array([5, 5, 10], np.uint8)}).fingerprint
    assert plan.fingerprint == pickle.loads(pickle.dumps(plan)).fingerprint
    assert Plan([5, 15]).fingerprint == Plan(20, window=3).fingerprint  # "global" looks at neither
    assert len(plan.fingerprint) == 32
    assert int(plan.fingerprint, 16) >= 0


# The order is part of every checkpoint: another one must never come without a word.


@pytest.mark.parametrize(
    ("version", "shuffle", "lanes", "expected"),
    [
        (1, "none", 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]),
        (1, "none", 3, [0, 5, 10, 1, 6, 11, 2, 7, 12, 3, 8, 13, 4, 9]),
        (1, "global", 1, [11, 3, 12, 9, 4, 10, 0, 1, 5, 2, 7, 13, 8, 6]),
        (1, "global", 3, [11, 10, 7, 3, 0, 13, 12, 1, 8, 9, 5, 6, 4, 2]),
        (1, "window", 1, [2, 0, 3, 4, 1, 6, 10, 5, 8, 9, 7, 13, 12, 11]),
        (1, "window", 3, [2, 6, 7, 0, 10, 13, 3, 5, 12, 4, 8, 11, 1, 9]),
        (2, "window", 1, [9, 13, 10, 11, 8, 0, 6, 12, 1, 2, 7, 5, 4, 3]),
        (2, "window", 3, [7, 1, 4, 9, 12, 6, 5, 8, 0, 2, 13, 10, 3, 11]),
        (2, "window", 4, [8, 3, 7, 1, 10, 0, 12, 4, 9, 2, 13, 6, 5, 11]),
        (2, "window", 64, [13, 8, 5, 2, 12, 7, 1, 3, 10, 6, 4, 9, 11, 0]),
    ],
)
def test_plan_order_of_each_version_equals_the_recorded_order(
    version: int, shuffle: Any, lanes: int, expected: list[int]
) -> None:
    plan = Plan([3, 0, 4, 1, 6], shuffle=shuffle, seed=5, window=5, lanes=lanes)
    assert order(plan if version == 2 else plan.with_order(version), epoch=1) == expected


FAR_POSITIONS = [0, 1, 2, 10**9, 10**12 - 1]


def test_plan_order_version_1_of_a_trillion_samples_equals_the_recorded_order() -> None:
    ids = [947174574738, 288543916434, 300561310602, 799614988616, 92613703839]
    assert Plan(10**12, seed=5).sample_ids(1, FAR_POSITIONS).tolist() == ids
    plan = Plan(10**12, shuffle="window", seed=5, lanes=64).with_order(1)
    ids = [433688519413, 807416554623, 594035583733, 904421871659, 863116874671]
    assert plan.sample_ids(1, FAR_POSITIONS).tolist() == ids
    assert plan.fingerprint == "aa4f9b78af9b9e809270fee93d6e1cfe"


def test_windowed_order_version_2_of_a_trillion_samples_equals_the_recorded_order() -> None:
    plan = Plan(10**12, shuffle="window", seed=5, lanes=64)
    ids = [902145769610, 494853704858, 594329678903, 152782063494, 522940770504]
    assert plan.sample_ids(1, FAR_POSITIONS).tolist() == ids
    assert plan.fingerprint == "52d6c029a1a9bf97865e976a7785673c"
    schedule = Schedule(plan, batch_size=4, topology=Topology(rank=5, world_size=16), epoch=1)
    assert schedule.batch(3).tolist() == [745254023799, 440452341976, 988899490639, 832930836118]


@pytest.mark.parametrize("version", [0, 3, -1, "2", None, 1.5])
def test_an_unknown_version_of_the_windowed_order_raises_plan_error(version: Any) -> None:
    with pytest.raises(PlanError, match="unknown version of the windowed order"):
        Plan([5] * 9, shuffle="window", window=3).with_order(version)
    plan = Plan([5] * 9)
    assert plan.with_order(version) is plan  # only windows have versions
