"""Coverage counts positions as a plain enumeration does, for any ranks, batch sizes, lanes and steps."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.plan import Coverage, Gap, Plan, PositionOrder, Schedule
from rankfeed.topology import Topology


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    samples, lanes, seed = draw(st.integers(1, 200)), draw(st.sampled_from([1, 3, 8])), draw(st.integers(0, 9))
    if lanes == 1:
        return Plan(samples, seed=seed)
    plan = Plan(samples, shuffle="window", seed=seed, lanes=lanes, window=5)
    return plan.with_order(draw(st.sampled_from([1, 2])))


@st.composite
def coverages(draw: st.DrawFn) -> tuple[Coverage, list[Counter[int]]]:
    """A pass, and the positions that each rank delivered, counted one by one."""
    plan, world_size = draw(plans()), draw(st.integers(1, 5))
    tail = draw(st.sampled_from(["even", "drop", "pad"] if plan.num_samples >= world_size else ["pad"]))
    start, batch_size = draw(st.integers(0, plan.num_samples)), draw(st.integers(1, 7))
    options: dict[str, Any] = {"batch_size": batch_size, "epoch": 3, "start": start, "tail": tail}
    order = PositionOrder.of(plan.describe())
    schedules = [Schedule(order, topology=Topology(rank, world_size), **options) for rank in range(world_size)]
    steps = {
        rank: draw(st.integers(0, len(schedules[0]))) for rank in range(world_size) if draw(st.integers(0, 4))
    }
    counts = [Counter[int]() for _ in range(world_size)]
    for rank, count in steps.items():
        for step in range(count):
            counts[rank].update(schedules[rank].batch(step)[schedules[rank].valid(step)].tolist())
    return Coverage(order, 3, start, batch_size, world_size, tail, steps), counts


@given(coverages(), st.integers(0, 220), st.integers(0, 220))
def test_coverage_counts_delivered_positions_like_a_plain_enumeration(
    drawn: tuple[Coverage, list[Counter[int]]], low: int, until: int
) -> None:
    coverage, counts = drawn
    assert len(coverage) == sum(count.total() for count in counts)
    for rank, count in enumerate(counts):
        below = sum(number for position, number in count.items() if position < low)
        assert coverage.samples(rank, coverage.steps.get(rank, 0), low) == below
    taken_over = Coverage(**{**vars(coverage), "until": until})
    between = sum(low <= position < until for count in counts for position in count.elements())
    assert taken_over.samples_from(low) == between


@given(coverages(), st.floats(0, 1))
def test_coverage_gaps_contain_exactly_the_undelivered_positions(
    drawn: tuple[Coverage, list[Counter[int]]], share: float
) -> None:
    coverage, counts = drawn
    last = coverage.schedule().end
    for end in {coverage.start + round(share * (last - coverage.start)), last}:
        gaps = [*coverage.gaps(end)]
        missing = Counter(position for gap in gaps for part in gap.positions() for position in part.tolist())
        delivered = sum(counts, Counter[int]())
        assert missing == Counter(range(coverage.start, end)) - delivered
        assert [gap.samples for gap in gaps] == [sum(map(len, gap.positions())) for gap in gaps]
        for gap in gaps:
            positions = [position for part in gap.positions() for position in part.tolist()]
            assert gap.low <= min(positions)
            assert max(positions) < gap.high <= end


def test_an_epoch_missing_from_all_ledgers_is_one_gap_over_all_positions() -> None:
    gap = Gap(2, 0, 70_000, 70_000)
    assert Counter(position for part in gap.positions() for position in part.tolist()) == Counter(range(70_000))
    assert str(gap) == "epoch 2, positions 0 to 70,000: 70,000 samples are in no ledger"


@pytest.mark.parametrize("tail", ["even", "drop"])
def test_coverage_and_gaps_are_computed_for_a_trillion_samples(tail: Any) -> None:
    coverage = Coverage(PositionOrder(10**12 + 3), 0, 0, 1000, 64, tail, dict.fromkeys(range(64), 10**6))
    assert (len(coverage), coverage.reached(10**6)) == (64 * 10**9, 64 * 10**9)
    one_short = Coverage(**{**vars(coverage), "steps": {**coverage.steps, 7: 10}})
    (gap,) = one_short.gaps(64 * 10**9)
    assert (gap.rank, gap.first_step, gap.samples) == (7, 10, (10**6 - 10) * 1000)
    assert next(gap.positions()).tolist() == [*range(10 * 64_000 + 7000, 10 * 64_000 + 8000)]
