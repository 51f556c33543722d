"""A verdict on a plan finds what is wrong with it."""

import numpy as np
import numpy.typing as npt
import pytest

from rankfeed.diagnostics.verify import plans
from rankfeed.plan import Plan
from rankfeed.plan.plan import Shuffle


class Broken(Plan):
    """A plan that reads sample 3 instead of sample 4."""

    def sample_ids(self, epoch: int, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        ids = super().sample_ids(epoch, positions)
        return np.where(ids % 10 == 4, ids - 1, ids)


@pytest.mark.parametrize("tail", ["even", "drop", "pad"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 7, 99, 100])
def test_verify_plan_finds_a_plan_sound_and_counts_its_deliveries_for_each_tail_and_start(
    tail: plans.Tail, ranks: int, start: int
) -> None:
    verdict = plans.verify_plan(Plan(100, seed=2), ranks=ranks, batch_size=3, start=start, tail=tail)
    assert verdict.sound
    assert verdict.counted
    assert verdict.deliveries == 100 - start - verdict.left_out


def test_verify_plan_of_a_plan_too_long_to_count_and_without_steps_is_unproven() -> None:
    done = plans.verify_plan(Plan(10**12), ranks=2, batch_size=5, start=10**12)
    assert (done.sound, done.steps, done.left_out) == (None, (0, 0), 0)
    dropped = plans.verify_plan(Plan(10**9), ranks=2, batch_size=10**9, tail="drop")
    assert (dropped.sound, dropped.steps, dropped.left_out) == (None, (0, 0), 10**9)


@pytest.mark.parametrize("shuffle", ["none", "global", "window"])
def test_verify_plan_counts_the_missing_and_repeated_samples_of_a_broken_plan(shuffle: Shuffle) -> None:
    verdict = plans.verify_plan(Broken(100, shuffle=shuffle, window=10, lanes=4), ranks=3, batch_size=4)
    assert verdict.sound is False
    assert (verdict.missing, verdict.repeated) == (10, 10)


def test_verify_plan_finds_repeats_in_a_plan_too_long_to_count_by_checking_some_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "COUNTED", 1000)
    sampled = plans.verify_plan(Plan(100_000), ranks=3, batch_size=64)
    assert sampled.sound is None
    assert [finding.code for finding in sampled.findings] == ["sampled"]
    assert "audit=" in sampled.findings[0].remedy
    verdict = plans.verify_plan(Broken(100_000), ranks=3, batch_size=64)
    assert verdict.sound is False
    assert verdict.repeated > 0
