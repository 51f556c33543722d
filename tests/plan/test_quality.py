"""Shuffled means mixed: batches of sorted data, for any blocks, ranks, batch sizes and windows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import peak

from rankfeed.plan import Plan, Schedule, measure_quality, measure_reading
from rankfeed.topology import Topology

SAMPLES = 102_400


def batches(plan: Plan, rank: int, world_size: int, batch_size: int, epoch: int = 0) -> np.ndarray:
    topology = Topology(rank=rank, world_size=world_size)
    schedule = Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, tail="drop")
    return schedule.batches(range(len(schedule)))[0].reshape(-1, batch_size)


def distinct(rows: np.ndarray) -> float:
    return float((1 + (np.diff(np.sort(rows, axis=1), axis=1) != 0).sum(axis=1)).mean())


def window_plan(blocks: int, window: int = 5, lanes: int = 64, **options: int) -> Plan:
    return Plan([SAMPLES // blocks] * blocks, shuffle="window", window=window, lanes=lanes, **options)


def relative_classes(rows: np.ndarray) -> float:
    return distinct(rows * 10 // SAMPLES) / (10 * (1 - 0.9 ** rows.shape[1]))


@pytest.mark.parametrize("world_size", [1, 4, 16, 64])
@pytest.mark.parametrize("blocks", [1, 4, 32, 100, 1024])
@pytest.mark.parametrize("batch_size", [4, 16, 32])
def test_batches_of_a_rank_are_mixed_as_if_drawn_from_eight_random_blocks(
    blocks: int, world_size: int, batch_size: int
) -> None:
    plan = window_plan(blocks)
    pieces = blocks * -(-64 // blocks)  # units of equal size
    expected = 8 * (1 - (7 / 8) ** batch_size)
    for rank in {0, world_size // 2, world_size - 1}:
        rows = batches(plan, rank, world_size, batch_size)
        assert distinct(rows * pieces // SAMPLES) >= 0.9 * expected
        # The pieces of a batch are of different parts of the data.
        assert distinct(rows * blocks // SAMPLES) >= 0.9 * blocks * (1 - (1 - 1 / blocks) ** expected)
        assert relative_classes(rows) >= 0.6
        # Of data that are sorted in each block, too, as from that number of random places.
        in_blocks = relative_classes(rows % (SAMPLES // blocks) * blocks)
        assert in_blocks >= 0.9 * (1 - 0.9**expected) / (1 - 0.9**batch_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_a_rank_reads_about_its_share_of_the_blocks_in_an_epoch(world_size: int) -> None:
    blocks = 1024
    plan = window_plan(blocks)
    for batch_size, rank in product((4, 10, 16, 64), {0, world_size - 1}):
        touched = len(np.unique(batches(plan, rank, world_size, batch_size) * blocks // SAMPLES))
        assert touched / blocks <= 1.3 * max(1 / world_size, 8 / 64)


def test_a_rank_reads_different_blocks_in_different_epochs() -> None:
    plan = window_plan(32)
    seen = [set(np.unique(batches(plan, 3, 16, 16, epoch) * 10 // SAMPLES).tolist()) for epoch in range(8)]
    assert len(set.union(*seen)) == 10
    assert len(set.intersection(*seen)) < 5


@given(
    blocks=st.lists(st.integers(0, 300), min_size=1, max_size=80).filter(lambda sizes: sum(sizes) >= 200),
    world_size=st.integers(1, 8),
    batch_size=st.integers(2, 40),
    lanes=st.sampled_from([1, 7, 64, 1000]),
    seed=st.integers(),
)
def test_windowed_shuffle_with_a_window_of_all_samples_equals_the_global_shuffle(
    blocks: list[int], world_size: int, batch_size: int, lanes: int, seed: int
) -> None:
    samples = sum(blocks)
    plan = Plan(blocks, shuffle="window", window=samples, lanes=lanes, seed=seed)
    alone = Plan(samples, shuffle="global", seed=seed)
    assert plan.sample_ids(2, range(samples)).tolist() == alone.sample_ids(2, range(samples)).tolist()
    quality = measure_quality(plan, batch_size=batch_size, world_size=world_size)
    assert quality.is_mixed
    assert quality.global_classes >= 0.9


@pytest.mark.parametrize("world_size", [1, 4, 16, 256])
def test_global_batches_draw_from_all_lanes(world_size: int) -> None:
    plan = window_plan(1024)
    for step in (0, 3):
        size = 4 * world_size
        ids = plan.sample_ids(0, np.arange(step * size, (step + 1) * size))
        # Windows that begin inside a block, and lanes that do: one less at most of every eight.
        assert len(np.unique(ids * 1024 // SAMPLES)) >= 0.85 * min(size, 64)


@pytest.mark.parametrize("blocks", [16, 32, 64, 65, 96, 128, 200, 1000])
@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_lanes_are_at_different_depths_of_their_blocks(blocks: int, world_size: int) -> None:
    samples = 1600
    plan = Plan([samples] * blocks, shuffle="window", window=100, lanes=64)
    for size, least in ((16, 0.6), (16 * world_size, 0.9)):
        starts = np.linspace(0, plan.num_samples - size, 50, dtype=np.int64)
        depths = plan.step_ids(0, starts, size, 0, size) % samples * 10 // samples
        assert distinct(depths) / (10 * (1 - 0.9**size)) >= least
    by_epoch = [plan.sample_ids(epoch, np.arange(plan.num_samples)).argsort() for epoch in (0, 1)]
    assert abs(np.corrcoef(by_epoch)[0, 1]) < 0.2


def test_measure_quality_is_low_for_order_version_1_and_high_for_version_2_on_sorted_blocks() -> None:
    windows = Plan([1600] * 64, shuffle="window", window=100, lanes=64)
    assert measure_quality(windows.with_order(1), batch_size=16, world_size=16).global_classes < 0.3
    assert measure_quality(windows, batch_size=16, world_size=16).global_classes >= 0.9


def test_measure_quality_reports_one_giant_block_beside_small_ones_as_mixed() -> None:
    for lanes, ranks in ((64, 4), (20, 1)):
        plan = Plan([1_000_000, *[1] * 999], shuffle="window", window=500, lanes=lanes)
        assert measure_quality(plan, batch_size=16, world_size=ranks).is_mixed


def test_measure_quality_agrees_with_classes_and_blocks_counted_in_batches() -> None:
    plan = window_plan(1024)
    quality = measure_quality(plan, batch_size=16, world_size=16)
    rows = np.concatenate([batches(plan, rank, 16, 16) for rank in (0, 8, 15)])
    assert quality.classes == pytest.approx(relative_classes(rows), rel=0.1)
    assert quality.blocks == pytest.approx(distinct(rows * 1024 // SAMPLES), rel=0.1)
    assert not quality.is_mixed
    assert measure_quality(Plan(SAMPLES), batch_size=16, world_size=16).is_mixed
    one_lane = Plan([100] * 200, shuffle="window", window=1, lanes=1)
    steps = [one_lane.sample_ids(0, np.arange(low, low + 1024)) for low in range(0, 19_456, 1024)]
    counted = np.mean([len(np.unique(ids // 2000)) for ids in steps]) / 10
    measured = measure_quality(one_lane, batch_size=16, world_size=64).global_classes
    assert measured == pytest.approx(counted, abs=0.1)
    stored = measure_quality(Plan(SAMPLES, shuffle="none"), batch_size=16, world_size=1)
    assert stored.classes < 0.2
    assert stored.global_classes < 0.2


def test_measure_reading_counts_blocks_decoded_again_after_leaving_the_cache() -> None:
    plan = Plan([10] * 100, shuffle="global")
    assert measure_reading(plan, batch_size=10, world_size=2).decoded == 100
    assert measure_reading(plan, batch_size=10, world_size=2).share == 1
    assert 400 < measure_reading(plan, batch_size=10, world_size=2, cached_blocks=5).decoded <= 500
    stored = measure_reading(Plan([0, 10] * 100, shuffle="none"), batch_size=5, world_size=1, cached_blocks=1)
    assert (stored.share, stored.decoded) == (1, 100)


def test_measure_reading_estimates_long_epochs_in_little_memory() -> None:
    plan = Plan([1000] * 40_000, shuffle="window", window=1000, lanes=64)
    most, cost = peak(lambda: measure_reading(plan, batch_size=16, world_size=4, cached_blocks=100))
    assert cost.share == pytest.approx(0.25, rel=0.1)
    assert cost.decoded == pytest.approx(10_000, rel=0.2)
    assert most < 100 << 20


def test_quality_and_reading_are_measured_for_fewer_samples_than_ranks_or_batch_size() -> None:
    for samples, ranks, size in ((1, 4, 3), (3, 1, 100), (12, 5, 2)):
        assert measure_quality(Plan(samples), batch_size=size, world_size=ranks).classes > 0
        assert measure_reading(Plan(samples), batch_size=size, world_size=ranks).decoded == 1
