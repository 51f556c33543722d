"""The rules of the doctor: counts in, verdict out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.doctor.rows import shingles_of
from rankfeed.diagnostics.doctor.rules import Counts, Facts, Tokens, judge, judge_tokens, length_of, window

N = 96
FACTS = Facts("epoch 0", ranks=2, workers=2, batch=4)


def said(
    orders: Sequence[Sequence[int]], control: int | Sequence[int] = N, **changes: Any
) -> list[tuple[str, str]]:
    expected: Counter[Any] = Counter(range(control) if isinstance(control, int) else control)
    found = judge(Counts(expected, orders), replace(FACTS, ranks=len(orders), **changes))
    return [(each.code, each.severity) for each in found]


def shares(ids: Sequence[int], ranks: int = 2) -> list[list[int]]:
    return [[*ids[rank::ranks]] for rank in range(ranks)]


EVERYTHING = [*range(N)]
RESAMPLED = [random.Random(rank).choices(EVERYTHING, k=N // 2) for rank in range(2)]

#: What the ranks received, what else is known, and what must be found.
TABLE: dict[str, tuple[Sequence[Sequence[int]], dict[str, Any], list[tuple[str, str]]]] = {
    "each sample once": (shares(EVERYTHING), {}, []),
    "labels only, equal counts": (shares(EVERYTHING), {"exact": False}, [("not-counted", "unproven")]),
    "padding": ([EVERYTHING[::2], [*EVERYTHING[1::2][:-1], 0]], {"control": 95},
                [("padded-with-repeats", "note")]),
    "a whole batch again": ([EVERYTHING[:47], [*EVERYTHING[47:], *EVERYTHING[:4]]],
                            {"padding": Counter(EVERYTHING[:4])}, [("padded-with-repeats", "note")]),
    "extra rows on one rank": ([EVERYTHING[::2], [*EVERYTHING[1::2], 0, 2, 4]], {},
                               [("not-sharded-by-rank", "error")]),
    "the first row of the next rank": ([EVERYTHING[:49], EVERYTHING[48:]], {}, [("not-sharded-by-rank", "error")]),
    "all on all ranks": ([EVERYTHING] * 2, {}, [("not-sharded-by-rank", "error")]),
    "all on all ranks, tiny": ([[0, 1, 2, 3]] * 2, {"control": 4}, [("not-sharded-by-rank", "error")]),
    "all on all ranks, labels only": ([EVERYTHING] * 2, {"exact": False}, [("not-sharded-by-rank", "error")]),
    "the same half on both ranks": ([EVERYTHING[::2]] * 2, {}, [("not-sharded-by-rank", "error")]),
    "each worker repeats": ([EVERYTHING[rank::2] * 2 for rank in range(2)], {},
                            [("duplicated-by-workers", "error")]),
    "ranks and workers repeat": ([EVERYTHING * 2] * 2, {},
                                 [("not-sharded-by-rank", "error"), ("duplicated-by-workers", "error")]),
    "sharded twice by ranks": (shares(EVERYTHING[::2]), {"workers": 0}, [("sharded-twice", "error")]),
    "sharded twice by both": (shares(EVERYTHING[::4]), {}, [("sharded-twice", "error")]),
    "a third missing": (shares([each for each in EVERYTHING if each % 3]), {}, [("missing-samples", "error")]),
    "remainder, declared": (shares(EVERYTHING[:90]), {"drops": True}, [("missing-samples", "note")]),
    "remainder, another each epoch": (shares(EVERYTHING[:90]), {"same_lack": False},
                                      [("missing-samples", "note")]),
    "remainder, the same, shuffled": (shares(EVERYTHING[:90]), {"same_lack": True, "shuffles": True},
                                      [("missing-samples", "error")]),
    "remainder, the same, in order": (shares(EVERYTHING[:90]), {"same_lack": True}, [("missing-samples", "note")]),
    "padded by the sampler, last batch dropped": ([EVERYTHING[:44:2], [*EVERYTHING[1:42:2], 0]],
                                                  {"control": 44, "drops": True},
                                                  [("padded-with-repeats", "note"), ("missing-samples", "note")]),
    "a repeat for a missing sample": ([EVERYTHING[:44:2], [*EVERYTHING[1:42:2], 0]], {"control": 44},
                                      [("not-sharded-by-rank", "error")]),
    "with replacement, declared": (RESAMPLED, {"replaces": True}, [("drawn-with-replacement", "unproven")]),
    "with replacement, allowed": (RESAMPLED, {"replaces": True, "allows_replacement": True},
                                  [("drawn-with-replacement", "note")]),
    "one rank draws what the control does": (RESAMPLED, {"replaces": True, "control": RESAMPLED[0]},
                                             [("drawn-with-replacement", "unproven")]),
    "equal samples, all on all ranks": ([[each // 2 for each in EVERYTHING]] * 2,
                                        {"replaces": True, "control": [each // 2 for each in EVERYTHING]},
                                        [("not-sharded-by-rank", "error")]),
    "the same draws": ([RESAMPLED[0]] * 2, {"replaces": True}, [("not-sharded-by-rank", "error")]),
    "the same draws, allowed": ([RESAMPLED[0]] * 2, {"replaces": True, "allows_replacement": True},
                                [("not-sharded-by-rank", "error")]),
    "two different orders, each cut": ([random.Random(rank).sample(EVERYTHING, N // 2) for rank in range(2)], {},
                                       [("not-sharded-by-rank", "error")]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_one_epoch_against_its_control(name: str) -> None:
    orders, changes, expected = TABLE[name]
    assert said(orders, **changes) == expected


@given(st.permutations(range(40)), st.integers(1, 5), st.integers(0, 3), st.integers(1, 9))
def test_every_partition_is_sound(order: list[int], ranks: int, workers: int, batch: int) -> None:
    assert said(shares(order, ranks), control=40, workers=workers, batch=batch) == []


@given(st.integers(2, 200), st.integers(2, 5), st.integers(1, 9), st.integers(0, 3))
def test_ranks_that_read_everything_are_never_sound(size: int, ranks: int, batch: int, workers: int) -> None:
    found = said([range(size)] * ranks, control=size, workers=workers, batch=batch)
    assert ("not-sharded-by-rank", "error") in found


@given(st.integers(1, 300), st.integers(2, 6), st.integers(1, 8))
def test_a_distributed_sampler_is_never_accused(size: int, ranks: int, batch: int) -> None:
    each = -(-size // ranks)
    padded = [number % size for number in range(each * ranks)]
    found = said(shares(padded, ranks), control=size, workers=0, batch=batch)
    assert all(severity == "note" for _, severity in found)


@given(st.integers(1, 100), st.lists(st.lists(st.integers(0, 120), max_size=150), min_size=2, max_size=4))
def test_soundness_needs_every_sample(size: int, orders: list[list[int]]) -> None:
    """Whatever arrives: no error and nothing unproven means at most a padding or a remainder."""
    found = said(orders, control=size, same_lack=True, shuffles=True)
    counts = Counter(key for order in orders for key in order)
    excess = (counts - Counter(range(size))).total()
    lack = (Counter(range(size)) - counts).total()
    if all(severity == "note" for _, severity in found):
        assert lack == 0
        assert excess < len(orders) * FACTS.batch


def packed(documents: int, parts: int, *, forgets: bool = False, half: bool = False, seed: int = 1) -> Tokens:
    """Documents dealt to `parts` packers, each cutting its stream of tokens into sequences of 64."""
    tokens = [np.random.default_rng(number).integers(0, 30000, 100 + number % 300) for number in range(documents)]
    order = list(range(documents))
    random.Random(seed).shuffle(order)
    found, count = [Counter[Any]() for _ in range(-(-parts // 2))], 0
    for part in range(parts):
        mine = order if forgets else order[part::parts]
        if half:
            mine = mine[::2]
        stream = np.concatenate([tokens[number] for number in mine])
        rows = [stream[start : start + 64] for start in range(0, len(stream) - 63, 64)]
        found[part // 2].update(key for row in rows for key in shingles_of(row))
        count += 64 * len(rows)
    return Tokens(found, count, 64)


def test_packed_sequences_are_compared_by_their_shingles() -> None:
    control = packed(400, 1)
    judged = {
        "sound": judge_tokens(control, packed(400, 4), FACTS),
        "in another order": judge_tokens(control, packed(400, 4, seed=2), FACTS),
        "forgotten": judge_tokens(control, packed(400, 4, forgets=True), FACTS),
        "half": judge_tokens(control, packed(400, 4, half=True), FACTS),
        "few": judge_tokens(packed(4, 1), packed(4, 4), FACTS),
    }
    assert {name: each.severity for name, each in judged.items()} == {
        "sound": "note",
        "in another order": "note",
        "forgotten": "error",
        "half": "error",
        "few": "unproven",
    }
    assert judged["half"].code == "missing-samples"
    assert judged["forgotten"].code == "duplicated-by-workers"
    forgets_rank = replace(control, by_rank=control.by_rank * 2, count=2 * control.count)
    assert judge_tokens(control, forgets_rank, FACTS).code == "not-sharded-by-rank"


def test_the_beginning_of_an_endless_loader_shows_repeats_only() -> None:
    control: Counter[Any] = Counter(range(200))
    same = [Counter[Any](range(100)), Counter[Any](range(100))]
    own = [Counter[Any](range(100)), Counter[Any](range(100, 200))]
    assert [each.code for each in window(same, control, FACTS)] == ["not-sharded-by-rank"]
    assert window(own, control, FACTS) == []
    assert window(same, Counter([*range(100)] * 2), FACTS) == []


@pytest.mark.parametrize(
    ("length", "counts"),
    [(10, "rank"), (11, "rank"), (20, "all ranks"), (24, "all ranks"), (40, None), (5, None), (100, None)],
)
def test_a_length_counts_the_steps_of_a_rank_or_of_all(length: int, counts: str | None) -> None:
    assert length_of(length, steps=10, total=20, ranks=2, workers=2) == counts
