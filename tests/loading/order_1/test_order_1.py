"""What f18391a recorded still means the same: states, orders that did not change, augmentations and ledgers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.loading.order_1 import record

RECORDED: dict[str, Any] = json.loads((record.HERE / "recorded.json").read_text())


def test_orders_without_windows_are_unchanged() -> None:
    for case in RECORDED["orders"]:
        assert record.order_of(case["arguments"]) == case["digests"], case["arguments"]


@pytest.mark.parametrize("file", record.FILES)
def test_a_state_continues_in_the_order_that_it_was_saved_in(file: str) -> None:
    cases = [case for case in RECORDED["states"] if case["file"] == file]
    assert cases
    for case in cases:
        assert record.resumed(case) == case["digests"], case["options"]


def test_the_state_of_a_sampler_continues_in_its_order() -> None:
    for case in RECORDED["samplers"]:
        assert record.resumed_sampler(case) == case["digests"], case["kind"]


def test_random_streams_are_unchanged() -> None:
    assert record.augmentations() == RECORDED["augmentations"]


def test_ledgers_are_read_in_the_order_that_they_were_written_in() -> None:
    found = record.judged_ledgers()
    assert json.loads(json.dumps(found)) == RECORDED["ledgers"]
    assert len(found["epochs"][0][1]) == 32
