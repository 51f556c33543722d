"""The shuffle is a bijection of every size, as good as numpy's own, and the same for ever."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.plan.permutation import MAX_SIZE, Key, mix, mix_one, permutation

Orders = npt.NDArray[np.int64]  # [orders, n]

#: Statistics below are standard normal for a perfect shuffle, but for the largest of a few hundred of them.
#: The keys are fixed, so these tests pass always or never.
LIMIT = 5.0

AROUND_POWERS = [n for k in range(9, 21) for n in (2**k - 1, 2**k, 2**k + 1)]
ONE_MORE_THAN_EVEN_POWERS = [2 ** (2 * k) + 1 for k in range(1, 12)]  # where a peer repeats a sample


def is_bijection(order: npt.NDArray[np.int64]) -> bool:
    return bool((np.bincount(order, minlength=order.size) == 1).all()) and order.min() >= 0


@pytest.mark.parametrize("epoch", range(5))
def test_permutation_is_a_bijection_for_every_size_up_to_300(epoch: int) -> None:
    for n in range(1, 301):
        assert Counter(permutation(range(n), n, Key.of("small", epoch)).tolist()) == Counter(range(n)), n


@pytest.mark.parametrize("n", [*AROUND_POWERS, *ONE_MORE_THAN_EVEN_POWERS])
def test_permutation_is_a_bijection_for_sizes_around_powers_of_two(n: int) -> None:
    assert is_bijection(permutation(np.arange(n), n, Key.of("powers", n)))


@given(n=st.integers(1, 30_000), seed=st.integers())
def test_permutation_is_a_bijection_for_random_sizes_and_keys(n: int, seed: int) -> None:
    assert is_bijection(permutation(np.arange(n), n, Key.of(seed)))


@pytest.mark.parametrize("bits", range(24, 63, 2))
@pytest.mark.parametrize("offset", [-1, 0, 1, 12_345])
def test_permuted_indices_of_huge_sizes_are_distinct_and_in_range(bits: int, offset: int) -> None:
    n = min(2**bits + offset, MAX_SIZE)
    edges = np.concatenate([np.arange(5_000), np.arange(n - 5_000, n)])
    anywhere = np.random.default_rng(bits).integers(5_000, n - 5_000, 10_000)
    indices = np.unique(np.concatenate([edges, anywhere]))
    order = permutation(indices, n, Key.of("huge", bits))
    assert order.min() >= 0
    assert order.max() < n
    assert max(Counter(order.tolist()).values()) == 1


@given(n=st.integers(2**20, MAX_SIZE), start=st.floats(0, 1), seed=st.integers(0, 9))
def test_permuted_consecutive_indices_of_huge_sizes_are_distinct_and_in_range(
    n: int, start: float, seed: int
) -> None:
    first = min(int(start * n), n - 500)
    order = permutation(np.arange(first, first + 500), n, Key.of(seed))
    assert order.min() >= 0
    assert order.max() < n
    assert max(Counter(order.tolist()).values()) == 1


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2**64 - 1)), min_size=1, max_size=20))
def test_many_small_shuffles_in_one_call_are_each_a_bijection(shuffles: list[tuple[int, int]]) -> None:
    largest = max(size for size, _ in shuffles)
    indices = np.concatenate([np.arange(size) for size, _ in shuffles])
    sizes = np.concatenate([np.full(size, size, np.uint64) for size, _ in shuffles])
    tweaks = np.concatenate([np.full(size, tweak, np.uint64) for size, tweak in shuffles])
    order = permutation(indices, largest, Key.of("many"), tweaks=tweaks, sizes=sizes)
    ends = np.cumsum([size for size, _ in shuffles])
    for part, (size, _) in zip(np.split(order, ends[:-1]), shuffles, strict=True):
        assert Counter(part.tolist()) == Counter(range(size))


@given(n=st.integers(2, MAX_SIZE), seed=st.integers(), data=st.data())
def test_permutation_by_numpy_equals_the_native_library(n: int, seed: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, 2**64 - 1)), max_size=40))
    indices = np.array([row for row, _ in rows], np.int64)
    tweaks = np.array([tweak for _, tweak in rows], np.uint64) if seed % 2 else None
    # Sizes much smaller than n would take long.
    sizes = np.full(len(rows), n - 1 if n > 2 and indices.max(initial=0) < n - 1 else n, np.uint64)
    key, options = Key.of(seed), {"tweaks": tweaks, "sizes": sizes if seed % 3 else None}
    native = permutation(indices, n, key, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankfeed.plan.permutation.native_library", lambda: None)
        assert np.array_equal(permutation(indices, n, key, **options), native)


# Keys


def test_keys_of_neighbouring_seeds_and_epochs_are_distinct() -> None:
    keys = Counter(Key.of("global", seed, epoch) for seed in range(-20, 80) for epoch in range(100))
    assert max(keys.values()) == 1


@pytest.mark.parametrize(
    ("one", "other"), [((1, 11), (11, 1)), (("1",), (1,)), (("a", "b"), ("a, b",)), (("a|int:1",), ("a", 1))]
)
def test_keys_made_of_different_parts_are_distinct(one: tuple[str | int, ...], other: tuple[str | int]) -> None:
    assert Key.of(*one) != Key.of(*other)


def test_orders_of_neighbouring_seeds_and_epochs_agree_no_more_than_by_chance() -> None:
    n = 2_000
    keys = [Key.of("global", seed, epoch) for seed in range(5, 15) for epoch in range(5)]
    orders = np.array([permutation(np.arange(n), n, key) for key in keys])
    same = [int((a == b).sum()) for index, a in enumerate(orders) for b in orders[:index]]
    assert max(same) < 10  # one is expected, distributed as Poisson
    assert abs(np.mean(same) - 1) < LIMIT / math.sqrt(len(same))


def test_mix_is_splitmix64() -> None:
    # The first values of the reference implementation seeded with 0.
    state = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


# Quality. Each statistic is computed for ours, keyed both ways, and for numpy's own, and held to the same limit.


def by_key(n: int, orders: int) -> Orders:
    return np.array([permutation(np.arange(n), n, Key.of("quality", order)) for order in range(orders)])


def by_tweak(n: int, orders: int) -> Orders:
    tweaks = np.repeat(mix(np.arange(orders, dtype=np.uint64)), n)
    return permutation(np.tile(np.arange(n), orders), n, Key.of("quality"), tweaks=tweaks).reshape(orders, n)


def by_numpy(n: int, orders: int) -> Orders:
    return np.random.default_rng(20).permuted(np.tile(np.arange(n), (orders, 1)), axis=1)


def chi_square(counts: npt.NDArray[np.int64], freedom: int) -> float:
    """Standardised: 0 is expected, 1 is one standard deviation too uneven."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def position_by_value(orders: Orders) -> float:
    n = orders.shape[1]
    counts = np.bincount((orders + n * np.arange(n)).reshape(-1), minlength=n * n)
    return chi_square(counts, (n - 1) ** 2)


def differences(orders: Orders) -> float:
    """How far apart, modulo n, values land that were near each other: the worst of many distances."""
    n = orders.shape[1]
    distances = sorted({*range(1, min(n, 9)), *(2**k for k in range(4, 9) if 2**k < n), n // 2})
    distances_at = [((orders[:, lag:] - orders[:, :-lag]) % n).reshape(-1) for lag in distances]
    return max(chi_square(np.bincount(gaps, minlength=n)[1:], n - 2) for gaps in distances_at)


def ascents(orders: Orders) -> float:
    n = orders.shape[1]
    total = int((np.diff(orders, axis=1) > 0).sum())  # Eulerian: mean (n - 1) / 2, variance (n + 1) / 12
    return abs(total - len(orders) * (n - 1) / 2) / math.sqrt(len(orders) * (n + 1) / 12)


def serial_correlation(orders: Orders) -> float:
    n = orders.shape[1]
    centred = orders - (n - 1) / 2
    products = (centred[:, 1:] * centred[:, :-1]).mean(axis=1) / centred[0].var()
    return abs(products.mean() + 1 / (n - 1)) * math.sqrt(len(orders) * n)


def parity(orders: Orders) -> float:
    """Odd against even permutations."""
    n = orders.shape[1]
    inversions = sum((orders[:, index, None] > orders[:, index + 1 :]).sum(axis=1) for index in range(n - 1))
    return abs(float((inversions % 2).mean()) - 0.5) * 2 * math.sqrt(len(orders))


MAKERS = [by_key, by_tweak, by_numpy]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("n", range(2, 7))
def test_all_permutations_of_a_few_elements_are_equally_likely(
    n: int, make: Callable[[int, int], Orders], thorough: bool
) -> None:
    every = math.factorial(n)
    orders = make(n, ({6: 15} if thorough else {5: 20, 6: 8}).get(n, 50) * every)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == every
    assert abs(chi_square(np.array(list(counts.values())), every - 1)) < LIMIT


@pytest.mark.parametrize("make", [by_tweak, by_numpy])
@pytest.mark.parametrize("statistic", [position_by_value, differences, ascents, serial_correlation, parity])
def test_small_shuffles_pass_statistical_tests_of_randomness(
    statistic: Callable[[Orders], float], make: Callable[[int, int], Orders], thorough: bool
) -> None:
    for n in [*range(3, 35), 40, 49, 60, 63, 64, 65, 66, 97, 100, 127, 128, 129, 180][:: 1 if thorough else 3]:
        assert statistic(make(n, 120_000 // n)) < LIMIT, n


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("statistic", [differences, ascents, serial_correlation])
@pytest.mark.parametrize("n", [1_000, 1_025, 5_000, 65_535, 65_537, 100_003])
def test_large_shuffles_pass_statistical_tests_of_randomness(
    n: int, statistic: Callable[[Orders], float], make: Callable[[int, int], Orders]
) -> None:
    assert statistic(make(n, max(3, 300_000 // n))) < LIMIT


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("n", [10_000, 65_537, 100_003])
def test_every_sixteenth_of_a_permutation_draws_evenly_from_all_sixteenths_of_the_data(
    n: int, make: Callable[[int, int], Orders]
) -> None:
    parts = 16
    orders = make(n, max(3, 200_000 // n))
    squares = orders * parts // n + parts * (np.arange(n) * parts // n)
    counts = np.bincount(squares.reshape(-1), minlength=parts * parts)
    assert abs(chi_square(counts, (parts - 1) ** 2)) < LIMIT


@pytest.mark.parametrize("n", [10**9, 10**12, 2**40, 2**60 + 2**28, 2**61 + 12_345, MAX_SIZE])
def test_bits_of_permuted_indices_do_not_correlate_with_bits_of_the_input_indices(n: int) -> None:
    rng = np.random.default_rng(3)
    indices = rng.integers(0, n, 20_000)

    def strongest_correlation(values: npt.NDArray[np.int64]) -> float:
        shifts = np.arange((n - 1).bit_length() - 1)  # the top bit of some sizes is all but always 0
        was, goes = (((places[:, None] >> shifts) & 1).astype(float) for places in (indices, values))
        was, goes = was - was.mean(axis=0), goes - goes.mean(axis=0)
        scale = np.outer(was.std(axis=0), goes.std(axis=0)) * math.sqrt(len(indices))
        return float(np.abs(was.T @ goes / scale).max())

    assert strongest_correlation(rng.integers(0, n, 20_000)) < LIMIT + 0.5  # largest of thousands
    assert strongest_correlation(permutation(indices, n, Key.of("bits"))) < LIMIT + 0.5


@pytest.mark.parametrize("n", [10**9, 10**12, 2**61 + 12_345])
def test_distances_between_permuted_neighbours_of_huge_sizes_are_uniform(n: int) -> None:
    order = permutation(np.arange(200_000), n, Key.of("neighbours"))
    steps = (np.diff(order) % n) * 0.999999 // (n / 64)
    assert abs(chi_square(np.bincount(steps.astype(np.int64), minlength=64), 63)) < LIMIT


# The order is part of every checkpoint: another one must never come without a word.

PINNED = {
    1: [0],
    2: [1, 0],
    3: [2, 0, 1],
    5: [0, 1, 4, 3, 2],
    6: [0, 1, 5, 3, 2, 4],
    10: [6, 0, 1, 7, 8, 9, 4, 3, 2, 5],
    1000: [389, 461, 93, 420],
    65537: [24759, 3411, 57390, 23836],
    1000000: [477641, 794725, 393106, 756426],
    1000000000: [414137272, 410221528, 64669460, 704652647],
    1000000000000: [76278994877, 86516066110, 716421910501, 953564658502],
    2**62: [3267059568225817520, 3263267158300655005, 1546936894311256869, 3709509270247427672],
}


@pytest.mark.parametrize("n", PINNED)
def test_permutation_equals_the_recorded_order_of_the_first_release(n: int) -> None:
    indices = range(n) if n <= 10 else [0, 1, n // 2, n - 1]
    assert permutation(indices, n, Key.of("pinned", 7)).tolist() == PINNED[n]


def test_permutation_with_tweaks_and_sizes_equals_the_recorded_order_of_the_first_release() -> None:
    tweaks = np.repeat(mix(np.array([0, 1], np.uint64)), 5)
    sizes = np.array([5, 5, 5, 5, 5, 4, 4, 4, 4], np.uint64)
    order = permutation([0, 1, 2, 3, 4, 0, 1, 2, 3], 5, Key.of("pinned", 7), tweaks=tweaks[:9], sizes=sizes)
    assert order.tolist() == [4, 2, 3, 1, 0, 1, 3, 0, 2]


def test_mix_one_of_a_value_equals_mix_of_an_array() -> None:
    values = [0, 1, 2**63, 2**64 - 1]
    assert list(map(mix_one, values)) == mix(np.array(values, np.uint64)).tolist()
