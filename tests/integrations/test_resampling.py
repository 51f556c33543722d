"""Draws: a formula that every rank computes alike, whatever part of an epoch it asks for."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.errors import ArgumentError
from rankfeed.integrations.webdataset.samples import ResamplingPlan


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.booleans(), st.integers(0, 9), st.data())
def test_resampling_ids_of_positions_are_the_same_queried_together_or_one_by_one(
    population: int, size: int, replacement: bool, epoch: int, data: st.DataObject
) -> None:
    draws = ResamplingPlan(population, size, replacement=replacement, seed=data.draw(st.integers(-(2**70), 2**70)))
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = draws.sample_ids(epoch, places)
    assert together.tolist() == [int(draws.sample_ids(epoch, [place])[0]) for place in places]
    assert together.dtype == np.int64
    assert 0 <= together.min() <= together.max() < population


@given(st.integers(1, 300), st.integers(1, 1000), st.integers(0, 5), st.integers(0, 5))
def test_resampling_without_replacement_uses_all_samples_before_repeating_any(
    population: int, size: int, seed: int, epoch: int
) -> None:
    ids = ResamplingPlan(population, size, replacement=False, seed=seed).sample_ids(epoch, np.arange(size))
    for first in range(0, size, population):
        deal = Counter(ids[first : first + population].tolist())
        assert max(deal.values()) == 1
        if size - first >= population:
            assert deal == Counter(range(population))


def test_resampling_with_replacement_draws_samples_uniformly() -> None:
    population, size = 100, 100_000
    for seed in range(3):
        ids = ResamplingPlan(population, size, seed=seed).sample_ids(seed, np.arange(size))
        expected = size / population
        chi_square = float(((np.bincount(ids, minlength=population) - expected) ** 2 / expected).sum())
        assert 50 < chi_square < 170  # 99 degrees of freedom: outside in less than one of 10,000 draws


def test_consecutive_resampling_draws_are_independent() -> None:
    ids = ResamplingPlan(10, 100_000).sample_ids(0, np.arange(100_000))
    pairs = np.bincount(ids[:-1] * 10 + ids[1:], minlength=100)
    assert 50 < float(((pairs - 1000) ** 2 / 1000).sum()) < 170


@pytest.mark.parametrize("replacement", [True, False])
def test_resampling_draws_differ_between_seeds_and_epochs(replacement: bool) -> None:
    def drawn(seed: int, epoch: int) -> Any:
        plan = ResamplingPlan(1000, replacement=replacement, seed=seed)
        return plan.sample_ids(epoch, np.arange(1000)).tolist()

    first = drawn(5, 1)
    for other in (drawn(5, 0), drawn(6, 0), drawn(6, 1), drawn(-5, 1)):
        assert sum(one == two for one, two in zip(first, other, strict=True)) < 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0,), "population"), ((5, 0), "epoch_size"), ((5, 2.5), "epoch_size"), ((5, True), "epoch_size")],
)
def test_resampling_plan_of_no_samples_or_no_draws_raises_argument_error(
    arguments: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        ResamplingPlan(*arguments)


def test_resampling_draws_equal_recorded_values() -> None:
    """Checkpoints store a position in the draws, so the draws must not change."""
    assert ResamplingPlan(4, 6, replacement=False).sample_ids(0, range(6)).tolist() == [3, 2, 0, 1, 1, 2]
