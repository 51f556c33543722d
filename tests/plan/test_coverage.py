"""Coverage counts positions exactly, whatever the order and shape of the intervals."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.plan import Coverage, Plan, Schedule
from rankfeed.topology import Topology

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(st.lists(intervals, min_size=1, max_size=4))
def test_missing_and_repeated_positions_are_those_of_a_plain_count(ranks: list[list[tuple[int, int]]]) -> None:
    counts: Counter[int] = Counter()
    runs = []
    for rank in ranks:
        coverage = Coverage()
        for start, length in sorted(rank):
            coverage.add(start, start + length)
            counts.update(range(start, start + length))
        runs.extend(coverage.runs)
    together = Coverage(runs)
    assert len(together) == counts.total()
    missing = {p for low, high in together.missing(0, 80, most=99) for p in range(low, high)}
    assert missing == {p for p in range(80) if not counts[p]}
    repeated = {p for low, high in together.repeated(most=99) for p in range(low, high)}
    assert repeated == {p for p, count in counts.items() if count > 1}


@pytest.mark.parametrize("world_size", [1, 3, 64])
@pytest.mark.parametrize("tail", ["even", "drop"])
def test_an_epoch_of_any_size_is_a_few_runs(world_size: int, tail: str) -> None:
    plan = Plan(100_003)
    ranks = []
    for rank in range(world_size):
        schedule = Schedule(plan, batch_size=7, topology=Topology(rank, world_size), tail=tail)  # type: ignore[arg-type]
        coverage = Coverage()
        for step in range(len(schedule)):
            first = schedule.first_position(step)
            coverage.add(first, first + int(np.count_nonzero(schedule.valid(step))))
        assert len(coverage.runs) <= 3
        ranks.append(coverage)
    together = Coverage(run for rank in ranks for run in rank.runs)
    end = schedule.end
    assert (len(together), together.missing(0, end), together.repeated()) == (end, [], [])
    if world_size > 1:
        without = Coverage(run for rank in ranks[1:] for run in rank.runs)
        assert without.missing(0, end)[0] == (0, 7)
