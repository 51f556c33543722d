"""A loader whose batches are poorly mixed says so once, with the remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from tests.loading.feeds import Memory

import rankfeed as rf
from rankfeed.plan import Plan


def complaints(loader: rf.Loader, epochs: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            list(loader)
    about_mixture = [warning for warning in caught if "poorly mixed" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in about_mixture)  # the line that iterates
    return [str(warning.message) for warning in about_mixture]


def poor(rank: int = 0, **options: Any) -> rf.Loader:
    """One of 16 ranks over eight blocks, each row of which is read with its neighbours."""
    options = {"batch_size": 32, "shuffle": "window", "window": 2, **options}
    return rf.Loader(Memory(4000, 500), topology=rf.Topology(rank=rank, world_size=16), **options)


@pytest.mark.parametrize("engine", [{}, {"num_workers": 2}], ids=str)
def test_a_poorly_mixed_loader_warns_once_on_rank_0_only(engine: dict[str, Any]) -> None:
    (message,) = complaints(poor(**engine))
    for part in ("% of the classes", "blocks on average", "16 ranks", "batch_size=32", "window=2", "row groups"):
        assert part in message
    assert complaints(poor(1, **engine)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": "global"},
        {"shuffle": False},  # no mixture was requested
        {"window": 4000},
        {"window": 65536},
        {"batch_size": 1},
    ],
    ids=str,
)
def test_a_well_mixed_or_unshuffled_loader_gives_no_mixing_warning(options: dict[str, Any]) -> None:
    assert complaints(poor(**options), epochs=1) == []


def test_mixing_warning_names_a_resumed_checkpoint_of_an_earlier_order_version() -> None:
    plan = Plan(Memory(4000, 500).blocks, shuffle="window", window=2, lanes=64).with_order(1)
    state = poor(shuffle=False, window=65536, plan=plan).state_dict()
    loader = poor()
    loader.load_state_dict(state)
    (message,) = complaints(loader)
    assert "a checkpoint of an earlier version" in message
