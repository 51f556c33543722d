"""No cause is found in healthy jobs, and the right rank is named in the others."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rankfeed.diagnostics.lockstep.find_cause import SETTLE, SILENT, JobHistory, find_cause
from rankfeed.diagnostics.lockstep.status import Cause, GroupCalls, LoopFailure, Progress, RankStatus, State

LIMIT = 100.0
LONG = 2 * LIMIT


def way(passes: int, steps: int, *, left: bool = False) -> list[Progress]:
    """All positions of a rank, from before its first step to the end."""
    positions = [Progress()]
    done = (0, 0)
    for pass_number in range(1, passes + 1):
        positions.append(Progress(0, pass_number, 0, "data", done=done))
        for step in range(1, steps + 1):
            positions.append(Progress(0, pass_number, step, "step", done=done))
            positions.append(Progress(0, pass_number, step, "data", done=done))
        done = (pass_number, steps)
        positions.append(Progress(0, pass_number, steps, "left" if left else "ended", done=done))
    positions.append(positions[-1]._replace(closed=True))
    return [progress._replace(sequence=index) for index, progress in enumerate(positions)]


def at(steps: int, state: State = "step", **facts: Any) -> Progress:
    return Progress(1, 1, steps, state, **facts)


def rank(index: int, at: Progress, age: float = 0.0, **facts: Any) -> RankStatus:
    facts = {"age": age, **facts}
    return RankStatus(index, f"host{index}", 100 + index, beat=1, progress=at, **facts)


def entered(**numbers: int) -> dict[str, Any]:
    """Collectives that were entered by a rank that makes no progress."""
    return {"numbers": numbers, "ages": dict.fromkeys(numbers, LONG), "age": LONG}


def job(
    *statuses: RankStatus, silent: dict[int, float] | None = None, uneven: bool = False, confirmed: bool = True
) -> Cause | None:
    """The cause after two equal statuses of each rank (one if not confirmed), and a silence."""
    history = JobHistory(len(statuses), LIMIT, uneven)
    for beat in (1, 2) if confirmed else (2,):
        history.update([structs.replace(status, beat=beat * status.beat) for status in statuses], 0.0)
    history.received |= {index: -seconds for index, seconds in (silent or {}).items()}
    return find_cause(history)


def failed(error: str, *, is_echo: bool = False) -> dict[str, Any]:
    return {"failure": LoopFailure(error, ["a"], is_echo)}


def blamed(*statuses: RankStatus, **options: Any) -> tuple[int, str]:
    cause = job(*statuses, **options)
    assert cause is not None
    return cause.rank, cause.summary


@st.composite
def healthy(draw: st.DrawFn) -> tuple[list[RankStatus], dict[int, float]]:
    """Ranks that enter a collective in each step and leave it when all have entered it, seen at earlier times."""
    ranks = draw(st.integers(2, 5))
    positions = way(draw(st.integers(1, 3)), draw(st.integers(0, 4)), left=draw(st.booleans()))
    slowest = draw(st.integers(0, len(positions) - 1))
    furthest = slowest  # until the next step is left by all, others may proceed into it
    while furthest + 1 < len(positions) and positions[furthest].state != "step":
        furthest += 1
    statuses, silent = [], {}
    for index in range(ranks):
        true = slowest if index == 0 else draw(st.integers(slowest, furthest))
        seen = draw(st.integers(0, true))
        steps = sum(progress.state == "step" for progress in positions[: seen + 1])
        inside = positions[seen].state == "step" and draw(st.booleans())
        numbers = {"all": max(steps - inside, 0)}  # it may not have entered that of this step
        age = draw(st.floats(0, LIMIT - 1))
        others = dict.fromkeys(range(ranks), "stopped")
        statuses.append(rank(index, positions[seen], age, numbers=numbers, ages={"all": age}, peers=others))
        silent[index] = draw(st.floats(0, SILENT - 0.1))
    return statuses, silent


@given(healthy(), st.booleans())
def test_find_cause_finds_no_cause_in_a_healthy_job(
    observed: tuple[list[RankStatus], dict[int, float]], uneven: bool
) -> None:
    statuses, silent = observed
    assert job(*statuses, silent=silent, uneven=uneven) is None


@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from(["data", "step"]), st.floats(LIMIT, 5 * LIMIT))
def test_no_cause_is_found_if_all_ranks_are_equally_long_in_the_same_step(
    ranks: int, step: int, state: Literal["data", "step"], long: float
) -> None:
    for facts in ({}, {"numbers": {"all": 7}}, {"numbers": {"all": 7}, "ages": {"all": long}}):
        assert job(*(rank(index, at(step, state), long, **facts) for index in range(ranks))) is None


def test_the_wait_of_the_first_rank_to_end_a_common_pause_counts_from_the_end_of_the_pause() -> None:
    first = rank(0, at(5), 0.2, numbers={"all": 6}, ages={"all": 0.1})
    assert job(first, rank(1, at(4), LONG, numbers={"all": 5}, ages={"all": LONG})) is None


def test_a_long_step_in_which_a_rank_still_enters_collectives_is_no_hang() -> None:
    """Rank 1 is slow in an evaluation of one step that takes longer than the limit."""
    moving = {"numbers": {"all": 7}, "ages": {"all": 0.6 * LIMIT}}
    assert job(rank(0, at(3), **entered(all=8)), rank(1, at(3), LONG, **moving)) is None


def test_a_late_rank_is_blamed_only_after_two_equal_statuses_or_silence() -> None:
    waits, late = rank(0, at(5), **entered(all=6)), rank(1, at(5), **entered(all=5))
    assert blamed(waits, late)[0] == 1
    assert job(waits, late, confirmed=False) is None
    assert blamed(waits, late, silent={1: SILENT})[0] == 1


@pytest.mark.parametrize("state", ["data", "step", "left", "ended"])
def test_the_rank_that_has_not_entered_the_collective_of_the_others_is_blamed(state: State) -> None:
    text = "rank 2 (host host2, process 102) has been "
    late = rank(
        2, at(5, state, done=(1, 5) if state in ("left", "ended") else (0, 0)), **entered(all=5), stack=["a"]
    )
    culprit, summary = blamed(rank(0, at(5), **entered(all=6)), rank(1, at(5), **entered(all=6)), late)
    assert (culprit, summary[: len(text)]) == (2, text)
    assert summary.endswith("for 200 s, and rank 0 has waited for 200 s, in step 5 of pass 1")


def test_the_last_rank_in_a_chain_of_waiting_process_groups_is_blamed() -> None:
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which is in neither's collective."""
    first, second = rank(0, at(5), **entered(left=4)), rank(1, at(5), **entered(left=3, right=6))
    assert blamed(first, second, rank(2, at(5), **entered(right=5)))[0] == 2
    slow = rank(2, at(5), 1.0, numbers={"right": 5}, ages={"right": 1.0})
    assert job(first, second, slow) is None  # it makes progress, and all others wait for it


def test_two_ranks_that_wait_for_each_other_in_two_process_groups_are_reported() -> None:
    one, other = rank(0, at(5), **entered(left=4, right=4)), rank(1, at(5), **entered(left=3, right=5))
    assert blamed(one, other)[0] == 0


def recorded(number: int, last: int, *kinds: str, inside: bool = True) -> dict[str, Any]:
    """A rank without progress whose collectives torch has recorded, up to the last one; others count calls too."""
    calls = dict(enumerate(kinds, last + 1 - len(kinds)))
    return {**entered(all=number), "calls": {"all": GroupCalls(last, inside * last, calls)}}


def test_counts_of_point_to_point_calls_are_not_compared_between_ranks() -> None:
    """Only two ranks count such a call, so that a lower number on rank 2 is no sign of a hang."""
    counts = [30, 30, 18]
    pause = (rank(i, at(3), **recorded(counts[i], 9, "all_reduce", inside=False)) for i in range(3))
    assert job(*pause) is None
    hang = [rank(i, at(3), **recorded(counts[i], 9, "all_reduce")) for i in range(3)]
    assert job(*hang) is None  # a network that hangs is not told from one that is slow
    hang[1] = rank(1, at(3), **recorded(29, 8, "all_reduce", inside=False))
    assert blamed(*hang)[0] == 1


def test_a_rank_that_has_left_its_collective_waits_for_no_other() -> None:
    """The last status of rank 1 is from before it, and native code holds the GIL there since."""
    late = rank(1, at(5), numbers={"all": 5})
    assert job(rank(0, at(5), **recorded(6, 6, "all_reduce", inside=False)), late, silent={1: LIMIT}) is None
    inside = rank(0, at(5), **recorded(6, 6, "all_reduce"), peers={1: "alive"})
    assert "holds the interpreter's lock" in blamed(inside, late, silent={1: LIMIT})[1]


def test_the_rank_that_is_in_a_different_collective_is_blamed() -> None:
    reduces = [rank(i, at(5), **recorded(6, 6, "all_reduce", "all_reduce")) for i in range(3)]
    leaves = rank(1, at(5, "left", done=(1, 5)), **recorded(6, 6, "all_reduce", "barrier"))
    text = (
        "rank 1 (host host1, process 101) has been out of its loop, which it left in step 5 of pass 1 for 200 s, "
        "in barrier as collective 6 of process group all, which is all_reduce on rank 0, in step 5 of pass 1"
    )
    assert blamed(reduces[0], leaves) == (1, text)
    assert blamed(reduces[0], leaves, reduces[2]) == (1, text)
    gathers = rank(1, at(5), **recorded(6, 6, "all_reduce", "all_gather"))
    assert blamed(reduces[0], gathers, reduces[2])[0] == 1
    ahead = rank(1, at(5), **recorded(8, 8, "broadcast", "reduce", "barrier"))
    assert blamed(reduces[0], ahead, reduces[2])[0] == 1  # the root of a broadcast need not wait for the others
    early = structs.replace(reduces[0], age=1.0, ages={"all": 1.0})
    assert job(early, leaves) is None
    assert job(reduces[0], leaves, confirmed=False) is None
    ended = rank(0, at(5), **recorded(6, 6, "all_reduce", "all_reduce", inside=False))
    assert job(ended, rank(1, at(5), **recorded(6, 6, "all_reduce", "barrier", inside=False))) is None


@pytest.mark.parametrize("numbers", [{}, {"all": 7}])  # of no group, or of one without collectives
def test_without_collectives_the_rank_at_an_earlier_step_is_blamed(numbers: dict[str, int]) -> None:
    for waiter in (at(5), at(9, "ended", done=(1, 9))):
        statuses = rank(0, waiter, LONG, numbers=numbers), rank(1, at(4, "data"), LONG, numbers=numbers)
        assert blamed(*statuses)[0] == 1
        assert job(*statuses, uneven=True) is None
    assert job(rank(0, at(5, "data"), LONG), rank(1, at(4), LONG)) is None  # it waits for data
    assert job(rank(0, at(9), LONG), rank(1, at(9, "left"), LONG)) is None  # a checkpoint in the last step


def test_a_silent_rank_is_blamed_with_the_step_where_it_was_last_seen() -> None:
    waits = rank(0, at(5), **entered(all=6), peers={1: "stopped"})
    culprit, summary = blamed(waits, rank(1, at(5), numbers={"all": 5}), silent={1: LIMIT})
    assert culprit == 1
    silence = "published nothing for 100 s: its process is stopped (SIGSTOP, or a debugger)"
    assert f"{silence}; it was last seen in step 5" in summary
    assert summary.endswith("and rank 0 has waited for 200 s, in step 5 of pass 1")
    assert blamed(waits, rank(1, at(5), LIMIT - 4, numbers={"all": 5}), silent={1: 4.0})[0] == 1
    same = rank(1, at(5), numbers={"all": 6})
    assert blamed(waits, same, silent={1: LIMIT})[0] == 1  # in the same collective
    assert job(waits, same, silent={1: LIMIT - 1}) is None
    seen = rank(0, at(5), **entered(all=6), peers={1: "alive"})
    assert job(seen, same, silent={1: LIMIT}) is None  # native code in a common pause, as far as is known
    assert "holds the interpreter's lock" in blamed(seen, rank(1, at(5), numbers={"all": 5}), silent={1: LIMIT})[1]


def test_a_rank_that_does_not_reach_its_first_step_within_the_limit_is_blamed() -> None:
    here = rank(0, at(1), **entered(all=6))
    for uneven in (False, True):
        culprit, summary = blamed(here, RankStatus(1), silent={1: LIMIT}, uneven=uneven)
        assert culprit == 1
        assert "rank 1 has not reached its first step" in summary


@given(st.integers(2, 5), st.data())
def test_a_rank_that_runs_out_of_data_before_the_others_is_blamed_unless_uneven(
    ranks: int, data: st.DataObject
) -> None:
    steps = data.draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
    statuses = [
        rank(index, at(count, "ended", done=(1, count), closed=data.draw(st.booleans())))
        for index, count in enumerate(steps)
    ]
    if len(set(steps)) == 1:
        assert job(*statuses) is None
    else:
        culprit, summary = blamed(*statuses)
        assert steps[culprit] == min(steps)
        assert f"ran out of data after {min(steps)} steps of pass 1" in summary
        assert f"has begun step {max(steps)}" in summary
    assert job(*statuses, uneven=True) is None


def test_an_error_is_blamed_instead_of_the_failed_collective_that_it_causes_on_another_rank() -> None:
    echo = rank(0, at(4), 90.0, **failed("RuntimeError: gloo", is_echo=True))
    culprit, summary = blamed(echo, rank(1, at(4, "left"), **failed("ValueError: label")))
    assert (culprit, summary) == (
        1,
        "rank 1 (host host1, process 101) failed in step 4 of pass 1: ValueError: label",
    )
    assert blamed(echo, rank(1, at(4, "data"), **failed("no shard")))[1].endswith(
        "the data of step 5 of pass 1: no shard"
    )


def test_a_rank_with_a_failed_collective_is_blamed_only_if_no_other_cause_appears_in_time() -> None:
    def echo(age: float = 0.0, **facts: Any) -> RankStatus:
        return rank(0, at(4), age, **failed("RuntimeError: gloo", is_echo=True), **facts)

    inside, left = rank(1, at(4)), at(4, "left", done=(1, 4))
    assert job(echo(), inside) is None
    assert blamed(echo(peers={1: "dead"}), inside)[0] == 1
    assert job(echo(), rank(1, left._replace(closed=True))) is None
    late = echo(SETTLE)
    assert blamed(late, rank(1, left, SETTLE), rank(2, left._replace(closed=True), SETTLE))[0] == 2
    assert blamed(late, rank(1, left), rank(2, left, SETTLE))[0] == 2  # rank 1 is about to publish an error
    assert blamed(late, rank(1, left._replace(closed=True)), silent={1: SETTLE})[0] == 1  # it has ended
    assert blamed(late, inside, silent={1: SILENT})[0] == 1
    culprit, summary = blamed(late, inside)
    assert culprit == 0
    assert "no rank is known to be the cause" in summary


def test_a_dead_process_is_blamed_only_if_its_rank_still_had_steps_to_take() -> None:
    missing: dict[str, Any] = {"peers": {1: "dead"}}
    assert blamed(rank(0, at(4), **missing), rank(1, at(4)))[0] == 1
    ended = rank(1, at(4, "ended", done=(1, 4)))
    assert job(rank(0, at(4), **missing), ended) is None
    assert blamed(rank(0, Progress(1, 2, 0, "step"), **missing), ended)[0] == 1
    assert job(rank(0, at(4), **missing), rank(1, at(4, "left", done=(1, 4), closed=True))) is None


def test_a_rank_is_blocked_by_one_that_has_not_entered_its_collective() -> None:
    late = rank(1, at(5), **entered(all=5))
    cause = Cause(1, "", status=late, hangs=True)
    assert cause.blocks(late)
    assert cause.blocks(rank(0, at(5), **entered(all=6)))
    assert not cause.blocks(rank(0, at(5), **entered(all=5)))
    other = Cause(1, "", status=rank(1, at(5), **recorded(5, 5, "barrier")), hangs=True)
    assert other.blocks(rank(0, at(5), **recorded(5, 5, "all_reduce")))
    assert not other.blocks(rank(0, at(5), **recorded(5, 5, "all_reduce", inside=False)))


def test_find_cause_blames_the_one_late_rank_of_a_thousand() -> None:
    statuses = [rank(index, at(7), **entered(all=9)) for index in range(1000)]
    assert job(*statuses) is None
    statuses[612] = rank(612, at(7), **entered(all=8))
    assert blamed(*statuses)[0] == 612
