"""Which ranks are silent and which are stuck, by rank 0's clock alone."""

from pathlib import Path

import msgspec
import pytest

from rankfeed.building import rank_hearts
from rankfeed.building.rank_files import Member


@pytest.mark.parametrize(("stopped", "expected"), [(99.0, "stuck"), (2.4, "silent")], ids=["hangs", "stopped"])
def test_a_rank_that_takes_no_more_steps_is_stuck_while_it_beats_and_silent_otherwise(
    stopped: float, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its last step at 2 s, before its last beat: with patience for 3 s that may not be judged first."""
    clock = [0.0]
    monkeypatch.setattr(rank_hearts.time, "monotonic", lambda: clock[0])
    heart = rank_hearts.LeadHeart(tmp_path, 2, "job", "digest", 1, 3.0, 0.3)
    member = Member(1, "name", "job", 2, 1)
    seen: list[str | None] = [None]
    for tick in range(100):
        clock[0] = tick / 10
        if tick % 3 == 0 and clock[0] <= stopped:
            member = msgspec.structs.replace(member, beat=tick, steps=min(tick, 20))
        problem = heart._problem(member)
        if seen[-1] != problem:
            seen.append(problem)
    assert seen == [None, expected]
