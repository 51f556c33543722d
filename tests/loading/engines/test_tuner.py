"""The fastest way gets most of the steps, whatever disturbs a measurement."""

from collections import Counter

import pytest

from rankfeed.loading.engines.thread import FIRST_RUN_STEPS, MAX_RUN_STEPS, TRIAL_STEPS, EngineTuner


def shares(costs: dict[str, float], steps: int, epoch: int) -> Counter[str]:
    """How many steps each way gets, in epochs of that many."""
    pace, taken, done = EngineTuner(tuple(costs)), Counter[str](), 0
    while done < steps:
        way, count = pace.next()
        count = min(count, epoch - done % epoch)
        pace.record(count, [costs[way] * 1e-4] * (count // 16))
        taken[way] += count
        done += count
    return taken


@pytest.mark.parametrize("fastest", ["together", "alone", "inline"])
@pytest.mark.parametrize("epoch", [7, 40, 313, 100_000])
def test_engine_tuner_gives_most_steps_to_the_fastest_mode_in_epochs_of_any_length(
    fastest: str, epoch: int
) -> None:
    costs = {way: 1.0 if way == fastest else 3.0 for way in ("together", "alone", "inline")}
    taken = shares(costs, 20_000, epoch)
    if epoch >= 16:  # shorter epochs end before anything is measured
        assert taken[fastest] > 0.95 * taken.total()


def test_engine_tuner_measures_a_slower_mode_again_from_time_to_time() -> None:
    assert shares({"threads": 2.0, "inline": 1.0}, 4 * MAX_RUN_STEPS, 1000)["threads"] >= 3 * TRIAL_STEPS


def test_engine_tuner_ignores_one_slow_outlier_step() -> None:
    pace = EngineTuner(("threads", "inline"))
    pace.next()
    pace.record(TRIAL_STEPS, [1e-4, 1e-4, 6e-3, 1e-4])
    pace.next()
    pace.record(TRIAL_STEPS, [2e-4] * 4)
    assert pace.next() == ("threads", FIRST_RUN_STEPS)


def test_engine_tuner_keeps_slow_large_batches_in_the_first_mode() -> None:
    pace = EngineTuner(("together", "alone", "inline"))
    for _ in range(20):
        way, count = pace.next()
        assert way == "together"
        pace.record(count, [0.5] * (count // 16))
