"""Many healthy jobs hear nothing, and many that hang or die end in time with the right rank named.

The campaign runs in pieces: ``pytest -m soak -s tests/diagnostics/test_lockstep_campaign.py -k "faulty and 3"``.
How late this machine scheduled a process meanwhile is printed beside each figure.
"""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.diagnostics.jobs.lockstep import CASES, HEALTHY
from tests.diagnostics.test_lockstep import check, played, quiet

SEED = int(os.environ.get("LOCKSTEP_SEED", "1"))
#: Seconds after the limit, or after what needs no limit, until all ranks have ended.
LATEST = 5.0
#: In a common pause of these, ranks of different speed enter collectives.
IN_PAUSE = ("long evaluation", "groups", "background", "messages")
#: How a case must be played; the others are under a "with" or, one in four, a bare wrapper.
PLAYED = {
    "subgroup": "subgroups",
    "slow": "no collectives",
    "evaluation": "evaluation",
    "after": "after",
    "leave": "with",
    "return to barrier": "with",
    "gather": "with",
    "pipeline": "stages",
    "never": "with",
    "sys.exit": "with",
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(5))
def test_lockstep_raises_no_alarm_in_forty_random_healthy_jobs(piece: int, tmp_path: Path) -> None:
    chance = random.Random(f"{SEED} healthy {piece}")
    rounds = []
    others = [how for how in HEALTHY if how not in IN_PAUSE]
    for index in range(40):
        how = IN_PAUSE[(10 * piece + index) % len(IN_PAUSE)] if index < 10 else chance.choice(others)
        ranks = chance.choice([3, 4] if how in ("groups", "messages", "pipeline") else [2, 3, 4])
        rounds.append(f"healthy,{index},8,{ranks},{chance.choice([3, 3, 4])},{how}")
    played(tmp_path, 120, *rounds, at_once=3)
    alarms = []
    for spec in rounds:
        try:
            quiet(tmp_path, spec)
        except (AssertionError, OSError) as error:
            logs = sorted((tmp_path / spec).glob("*.log"))
            alarms.append("\n".join([f"{spec}: {error}", *(log.read_text()[-3000:] for log in logs)]))
    print(f"\nhealthy jobs {piece}: {len(rounds)} jobs, {len(alarms)} alarms; {scheduling(tmp_path, rounds)}")
    assert not alarms, "\n".join(alarms)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("piece", range(5))
def test_lockstep_names_the_failed_rank_in_time_in_twenty_random_faulty_jobs(piece: int, tmp_path: Path) -> None:
    chance = random.Random(f"{SEED} faulty {piece}")
    rounds = []
    for index in range(20 * piece, 20 * piece + 20):
        case = list(CASES)[index % len(CASES)]
        how = PLAYED.get(case) or chance.choice(["with", "with", "with", "bare"])
        # Of two ranks in different collectives, either may be the one at fault.
        ranks = 4 if how == "subgroups" else chance.choice([3, 4] if case == "gather" else [2, 3, 3, 4])
        bad = 0 if index // len(CASES) % 3 == 0 else chance.randrange(ranks)
        rounds.append(f"{case},{bad},{chance.randrange(5, 36)},{ranks},{chance.choice([3, 4, 5])},{how}")
    played(tmp_path, 60, *rounds, at_once=3)
    wrong, late = [], []
    for spec in rounds:
        try:
            seconds = check(tmp_path, spec)
        except (AssertionError, OSError) as error:
            wrong.append(f"{spec}: {error}")
            continue
        print(f"\n{spec}: {seconds:.1f} s; {scheduling(tmp_path, [spec])}", end="")
        late += [spec] if seconds > LATEST else []
    print(f"\nfaulty jobs {piece}: {len(rounds)} jobs, {len(wrong)} wrong, {len(late)} later than {LATEST:.0f} s")
    assert not wrong, "\n".join(wrong)
    assert not late


def scheduling(folder: Path, rounds: Sequence[str]) -> str:
    """How late a sleeping process was scheduled during rounds."""
    records = [json.loads((folder / spec / "delays.json").read_text()) for spec in rounds]
    delays = [seconds for record in records for _, seconds in record]
    return f"scheduled late by {sum(delays):.1f} s in all, {max(delays, default=0.0):.2f} s at once"
