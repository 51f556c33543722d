"""The judge says nothing of jobs that are well, and names the right rank of those that are not."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.diagnostics.lockstep.judge import SETTLE, Ranks, judge
from rankfeed.diagnostics.lockstep.words import Verdict, Word

LIMIT = 100.0

#: What a rank says on its way: of two passes with some steps each, and at the very end.
Said = list[dict[str, Any]]


def way(passes: int, steps: int, *, left: bool = False) -> Said:
    said: Said = [{}]
    done = (0, 0)
    for lap in range(1, passes + 1):
        said.append({"lap": lap, "step": 0, "state": "data", "done": done})
        for step in range(1, steps + 1):
            said.append({"lap": lap, "step": step, "state": "step", "done": done})
            said.append({"lap": lap, "step": step, "state": "data", "done": done})
        done = (lap, steps)
        said.append({"lap": lap, "step": steps, "state": "left" if left else "ended", "done": done})
    return [*said, {**said[-1], "closed": True}]


def word(rank: int, **facts: Any) -> Word:
    return Word(rank, f"host{rank}", 100 + rank, **{"beat": 1, **facts})


def judged(*words: Word, silent: dict[int, float] | None = None, uneven: bool = False) -> Verdict | None:
    heard = {**{each.rank: 0.0 for each in words}, **(silent or {})}
    return judge(Ranks({each.rank: each for each in words}, heard, LIMIT, uneven))


def blamed(*words: Word, **known: Any) -> tuple[int, str]:
    verdict = judged(*words, **known)
    assert verdict is not None
    return verdict.rank, verdict.summary


@st.composite
def healthy(draw: st.DrawFn) -> tuple[list[Word], dict[int, float]]:
    """The words of ranks that leave a step when all have begun it, each of them heard at any earlier time."""
    ranks = draw(st.integers(2, 5))
    said = way(draw(st.integers(1, 3)), draw(st.integers(0, 4)), left=draw(st.booleans()))
    slowest = draw(st.integers(0, len(said) - 1))
    # Until the next step is left by all, others may go on: to the end of the step after the one they are in.
    furthest = slowest
    steps_begun = said[slowest].get("state") == "step"
    while furthest + 1 < len(said) and not (said[furthest].get("state") == "step" and not steps_begun):
        furthest += 1
        steps_begun = False
    heards = []
    for rank in range(ranks):
        true = slowest if rank == 0 else draw(st.integers(slowest, furthest))
        heard = draw(st.integers(0, true))
        heards.append(said[heard])
    # Processes end when all others know that they are through; others may be stopped for a while.
    missing = {rank: "gone" if each.get("closed") else "stopped" for rank, each in enumerate(heards)}
    words, silent = [], {}
    for rank, each in enumerate(heards):
        still = draw(st.floats(0, LIMIT - 1))
        others = {other: how for other, how in missing.items() if other != rank}
        words.append(word(rank, **each, still=still, waits=draw(st.floats(0, still)), missing=others))
        silent[rank] = draw(st.floats(0, 3 * LIMIT))
    return words, silent


@given(healthy(), st.booleans())
def test_a_healthy_job_is_never_judged(job: tuple[list[Word], dict[int, float]], uneven: bool) -> None:
    words, silent = job
    assert judged(*words, silent=silent, uneven=uneven) is None


@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from(["data", "step"]), st.floats(LIMIT, 5 * LIMIT))
def test_an_evaluation_of_any_length_is_no_hang(
    ranks: int, step: int, state: Literal["data", "step"], long: float
) -> None:
    """All stand in one step and work; or stand at one line that waits for a device."""
    here = {"lap": 1, "step": step, "state": state, "still": long}
    assert judged(*(word(rank, **here) for rank in range(ranks))) is None
    assert judged(*(word(rank, **here, waits=long, lines=["a line"]) for rank in range(ranks))) is None


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("silent", [0.0, 2 * LIMIT])
@pytest.mark.parametrize("state", ["left", "ended"])
def test_a_rank_may_be_busy_in_the_last_step_after_others_have_left(
    state: str, silent: float, closed: bool
) -> None:
    busy = word(0, lap=1, step=9, state="step", still=2 * LIMIT)  # it writes a checkpoint, say
    gone = word(1, lap=1, step=9, state=state, done=(1, 9), closed=closed, still=2 * LIMIT)
    assert judged(busy, gone, silent={1: silent}) is None
    waits = word(0, lap=1, step=9, state="step", still=LIMIT, waits=LIMIT)
    if state == "left":
        assert blamed(waits, gone)[0] == 1


@given(st.data(), st.integers(2, 5), st.floats(LIMIT, 5 * LIMIT))
def test_the_rank_that_stands_still_is_blamed(data: st.DataObject, ranks: int, long: float) -> None:
    said = way(2, 3)
    at = data.draw(st.sampled_from([i for i, each in enumerate(said) if each.get("state") in ("data", "step")]))
    steps = [i for i, each in enumerate(said) if each.get("state") == "step" and i >= at]
    if not steps:  # after the last step nobody waits for anybody
        return
    bad = data.draw(st.integers(0, ranks - 1))
    words = [word(rank, **said[steps[0]], still=long, waits=long) for rank in range(ranks)]
    words[bad] = word(bad, **said[at], still=long)
    assert blamed(*words)[0] == bad
    words[bad] = word(bad, **said[at])
    rank, summary = blamed(*words, silent={bad: long})
    assert rank == bad
    assert "has not been heard of" in summary


def test_nobody_is_blamed_because_its_word_is_late() -> None:
    """Rank 1 is slow; rank 2 waits for it like rank 0, but was not heard of for a while."""
    waits, slow = {"lap": 1, "step": 3, "state": "step"}, {"lap": 1, "step": 2, "state": "data"}
    words = [word(0, **waits, still=LIMIT), word(1, **slow, still=LIMIT - 1), word(2, **waits, still=LIMIT - 3)]
    assert judged(*words, silent={2: 4.0}) is None
    words[1] = word(1, **slow, still=LIMIT)
    assert blamed(*words, silent={2: 4.0})[0] == 1
    in_step = [word(rank, **waits, still=LIMIT - rank, waits=LIMIT - rank) for rank in range(2)]
    assert judged(*in_step, word(2, **waits, still=LIMIT - 1), silent={1: 4.0}) is None
    assert blamed(*in_step, word(2, **waits, still=LIMIT), silent={1: 4.0})[0] == 2


@given(st.integers(2, 5), st.data())
def test_a_rank_that_ends_before_the_others_is_blamed(ranks: int, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    words = [
        word(r, lap=1, step=n, state="ended", done=(1, n), closed=data.draw(st.booleans()))
        for r, n in enumerate(steps)
    ]
    if len(set(steps)) == 1:
        assert judged(*words) is None
    else:
        rank, summary = blamed(*words)
        assert steps[rank] == min(steps)
        assert f"ran out of data after {min(steps)} steps of pass 1" in summary
        assert f"has begun step {max(steps)}" in summary
    assert judged(*words, uneven=True) is None


def test_the_first_failure_is_told_and_its_echoes_are_not() -> None:
    here = {"lap": 1, "step": 4}
    echo = word(0, **here, state="failed", was="step", error="RuntimeError: gloo", collective=True, still=90.0)
    rank, summary = blamed(
        echo, word(1, **here, state="failed", was="step", error="ValueError: label", lines=["a"])
    )
    assert (rank, summary) == (1, "rank 1 (host host1, process 101) failed in step 4 of pass 1: ValueError: label")


def test_a_broken_collective_waits_for_its_cause() -> None:
    here: dict[str, Any] = {"lap": 1, "step": 4}
    echo = {**here, "state": "failed", "was": "step", "error": "RuntimeError: gloo", "collective": True}
    inside = word(1, **here, state="step")
    assert judged(word(0, **echo), inside) is None
    assert blamed(word(0, **echo, missing={1: "gone"}), inside)[0] == 1
    assert judged(word(0, **echo), word(1, **here, state="left", closed=True, done=(1, 4))) is None
    late = word(0, **echo, still=SETTLE)
    left: dict[str, Any] = {**here, "state": "left", "done": (1, 4)}
    assert blamed(late, word(1, **left, still=SETTLE), word(2, **left, closed=True, still=SETTLE))[0] == 2
    assert blamed(late, word(1, **left), word(2, **left, still=SETTLE))[0] == 2  # rank 1 is about to tell an error
    assert blamed(late, inside, silent={1: 9.0})[0] == 1
    rank, summary = blamed(late, inside)
    assert rank == 0
    assert "no rank is known to be the cause" in summary


def test_a_process_that_ended_is_missed_only_where_it_was_needed() -> None:
    other = {"lap": 1, "step": 4, "state": "step", "missing": {1: "gone"}}
    assert blamed(word(0, **other), word(1, lap=1, step=4, state="step"))[0] == 1
    ended = word(1, lap=1, step=4, state="ended", done=(1, 4))
    assert judged(word(0, **other), ended) is None
    assert blamed(word(0, **{**other, "lap": 2, "step": 0}), ended)[0] == 1
    assert judged(word(0, **other), word(1, lap=1, step=4, state="left", done=(1, 4), closed=True)) is None


def test_a_rank_that_never_came_is_waited_for_in_vain() -> None:
    here = word(0, lap=1, step=1, state="step", still=LIMIT)
    rank, summary = blamed(here, Word(1, "?", 0), silent={1: LIMIT})
    assert rank == 1
    assert "rank 1 has not come to its first step" in summary


def test_ranks_in_different_collectives_are_told_of_both() -> None:
    here = {"lap": 1, "step": 2, "state": "step", "still": LIMIT, "waits": LIMIT}
    verdict = judged(*(word(rank, **here, lines=["barrier" if rank == 2 else "all_reduce"]) for rank in range(3)))
    assert verdict is not None
    assert verdict.rank == 2
    assert verdict.lines == ["barrier", "and of rank 0:", "all_reduce"]


@pytest.mark.parametrize("ranks", [1000])
def test_a_thousand_ranks_are_judged_in_one_look(ranks: int) -> None:
    words = [word(rank, lap=1, step=7, state="step") for rank in range(ranks)]
    assert judged(*words) is None
    words[612] = word(612, lap=1, step=6, state="ended", done=(1, 6))
    assert blamed(*words)[0] == 612
