"""A cursor is the few integers that any rank may write and any other topology may read."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rankfeed.errors import ArgumentError
from rankfeed.plan import Cursor, Plan
from rankfeed.topology import Topology


def test_a_new_cursor_stands_at_the_start_of_the_first_epoch() -> None:
    assert Cursor() == Cursor(epoch=0, position=0, steps=0)


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


def test_a_cursor_carried_over_three_topologies_delivers_every_sample_once() -> None:
    plan, delivered = Plan(100, lanes=3), Counter[int]()
    cursor = Cursor(epoch=4)
    for world_size, batch_size, steps in ((2, 5, 3), (3, 4, 2), (4, 2, 99)):
        topologies = [Topology(rank=rank, world_size=world_size) for rank in range(world_size)]
        ranks = [cursor.schedule(plan, batch_size, topology, "even") for topology in topologies]
        steps = min(steps, len(ranks[0]))
        for step in range(steps):
            for rank in ranks:
                delivered.update(rank.batch(step)[rank.valid(step)].tolist())
        cursor = cursor.after(ranks[0], steps)
    assert cursor.position == 100
    assert delivered == Counter(range(100))
