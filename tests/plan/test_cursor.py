"""A cursor is the few integers that any rank may write and any other topology may read."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from rankfeed.errors import ArgumentError
from rankfeed.plan import Cursor, Plan
from rankfeed.topology import Topology


def test_steps_count_once_and_move_to_where_they_ended() -> None:
    cursor = Cursor(2, 10, 1)
    schedule = cursor.schedule(Plan(50), 3, Topology(rank=1, world_size=2), "drop")
    assert (schedule.epoch, schedule.start, len(schedule)) == (2, 10, 6)
    assert cursor.after(schedule, 1) == Cursor(epoch=2, position=16, steps=2)
    assert cursor.after(schedule, 6) == Cursor(epoch=2, position=46, steps=7)
    assert cursor.after(schedule, 0) == cursor


def test_the_next_epoch_starts_from_nothing() -> None:
    assert Cursor(2, 10, 1).next_epoch() == Cursor(epoch=3, position=0, steps=0)


def test_a_cursor_cannot_be_changed_and_is_plain_integers() -> None:
    cursor = Cursor(np.int64(1), np.uint8(2), np.int32(3))
    assert [type(each) for each in dataclasses.astuple(cursor)] == [int, int, int]
    assert pickle.loads(pickle.dumps(cursor)) == cursor
    with pytest.raises(dataclasses.FrozenInstanceError):
        cursor.epoch = 5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["epoch", "position", "steps"])
@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1"])
def test_what_is_no_count_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        Cursor(**{name: value})
