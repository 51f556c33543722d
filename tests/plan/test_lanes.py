"""Version 2 of the windowed order: each round visits each lane once, and ranks divide groups of lanes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rankfeed.plan.lanes import ScrambledLanes

LANES = st.sampled_from([1, 2, 3, 5, 8, 16, 64, 65, 128, 300])


@given(lanes=LANES, samples=st.integers(1, 3000), epoch=st.integers(0, 9), seed=st.integers())
def test_lanes_visit_every_position_of_every_lane_exactly_once(
    lanes: int, samples: int, epoch: int, seed: int
) -> None:
    order = ScrambledLanes(max(samples, lanes), lanes, 1, seed)
    visited, places = order.visit(epoch, np.arange(order.num_samples))
    rest = order.num_samples % lanes
    lengths = {lane: order.num_samples // lanes + (lane < rest) for lane in range(lanes)}
    expected = Counter((lane, place) for lane, length in lengths.items() for place in range(length))
    assert Counter(zip(visited.tolist(), places.tolist(), strict=True)) == expected
    assert order.positions(epoch, visited, places).tolist() == list(range(order.num_samples))


@pytest.mark.parametrize("lanes", [2, 16, 64, 256])
def test_aligned_runs_of_positions_visit_each_equal_interval_of_lanes_once(lanes: int) -> None:
    visited, _ = ScrambledLanes(lanes * 50, lanes, 1, 3).visit(7, np.arange(lanes * 50))
    run = 1
    while run <= lanes:
        intervals = visited.reshape(-1, run) * run // lanes
        assert (np.sort(intervals, axis=1) == np.arange(run)).all()
        run *= 2


def test_lane_orders_differ_between_rounds_and_epochs_and_are_balanced() -> None:
    order = ScrambledLanes(64 * 100, 64, 1, 3)
    rounds = [order.visit(epoch, np.arange(6400))[0].reshape(-1, 64) for epoch in range(3)]
    assert max(Counter(map(tuple, np.concatenate(rounds).tolist())).values()) == 1
    # Each lane is as often at each place of a round.
    counts = np.bincount((np.concatenate(rounds) * 64 + np.arange(64)).reshape(-1), minlength=64 * 64)
    assert abs(counts - 300 / 64).max() < 16


@given(
    lanes=LANES,
    groups=st.integers(1, 300),
    samples=st.integers(1, 2000),
    size=st.integers(1, 2000),
    start=st.integers(0, 2000),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_arrange_returns_the_positions_of_a_step_sorted_by_lane_group(
    lanes: int, groups: int, samples: int, size: int, start: int, cut: tuple[float, float]
) -> None:
    order = ScrambledLanes(max(samples, lanes), lanes, min(groups, lanes), 1)
    size = min(size, order.num_samples)
    assume(size > 1)
    steps = min(5, order.num_samples // size)
    starts = start % (order.num_samples - steps * size + 1) + np.arange(steps) * size
    cuts = [(0, size // 2), (size // 2, size)]  # the whole of a step would not be sorted
    parts = [order.arrange(2, starts, size, *cut) for cut in cuts]
    visited, places = (np.concatenate(rows, axis=1) for rows in zip(*parts, strict=True))
    group = visited * order.groups // lanes
    assert (np.diff(group, axis=1) >= 0).all()
    positions = order.positions(2, visited, places)
    for step, low in enumerate(starts.tolist()):
        assert Counter(positions[step].tolist()) == Counter(range(low, low + size))
    # Neither the rows that are asked for nor the other steps change a row.
    first, last = sorted(int(share * size) for share in cut)
    for step, low in enumerate(starts.tolist()):
        if last - first < size:
            alone = order.arrange(2, np.array([low]), size, first, last)
            together = [part[step, first:last].tolist() for part in (visited, places)]
            assert [part[0].tolist() for part in alone] == together


@pytest.mark.parametrize("groups", [64, 16, 8, 7])
def test_lanes_within_a_group_are_shuffled_evenly_between_ranks(groups: int) -> None:
    lanes, width = 64, -(-64 // groups)
    order = ScrambledLanes(lanes * 1000, lanes, groups, 0)
    visited, places = order.arrange(0, np.arange(50) * 16 * lanes, 16 * lanes, 0, 16 * width)
    assert (visited < width).all()
    # Ranks that divide the group get each lane equally often.
    for part in np.split(visited, 2, axis=1):
        counts = np.bincount(part.ravel(), minlength=width)
        assert counts.min() > 0.8 * counts.mean()
    assert max(Counter(map(tuple, (places - places.min(axis=1, keepdims=True)).tolist())).values()) == 1


@given(lanes=LANES, groups=st.integers(1, 300), units=st.integers(1, 3000), epoch=st.integers(0, 9))
def test_unit_order_is_a_permutation_of_the_units(lanes: int, groups: int, units: int, epoch: int) -> None:
    order = ScrambledLanes(10**6, lanes, min(groups, lanes), 5).unit_order(units, epoch)
    assert Counter(order.tolist()) == Counter(range(units))


@pytest.mark.parametrize("groups", [8, 16, 32, 64])
def test_units_read_at_the_same_time_are_from_different_eighths_of_the_data(groups: int) -> None:
    units, width = 1024, 64 // groups
    parts = ScrambledLanes(10**6, 64, groups, 1).unit_order(units, 3).reshape(groups, width, -1) * 8 // units
    turns = 8 // width  # units of a lane that are read together
    together = parts[:, :, : parts.shape[2] // turns * turns].reshape(groups, width, -1, turns)
    together = np.sort(np.moveaxis(together, 2, 1).reshape(-1, 8), axis=1)
    assert (together == np.arange(8)).all()
