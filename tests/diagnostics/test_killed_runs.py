"""Ranks are killed with SIGKILL, and the job goes on elsewhere: the ledgers say what the ranks say themselves."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import jobs

import rankfeed as rf
from rankfeed.diagnostics import verify_run

SCRIPT = Path(__file__).parent / "jobs" / "recorded.py"
SAMPLES = 400


def start(run: Path, launch: int, ranks: int, given: list[Any], stack: ExitStack) -> list[subprocess.Popen[bytes]]:
    """Ranks that know of each other by a name of their launch alone, as under a launcher."""
    processes = []
    for rank in range(ranks):
        log = run / f"log-{launch}-{rank}"
        environ = {**jobs.ENVIRON, "TORCHELASTIC_RUN_ID": f"job-{launch}"}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, [SAMPLES, run, launch, ranks, rank, *given])],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        stack.callback(lambda process=process: (jobs.end(jobs.family(process.pid)), process.wait(10)))
        processes.append(process)
    return processes


def lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def campaign(run: Path, rounds: int, seed: int) -> dict[str, int]:
    """Start, kill all ranks at random moments, resume from a checkpoint some steps old on other ranks; finish."""
    chance = random.Random(seed)
    plan = rf.Plan(SAMPLES, seed=3)
    place = [
        dict(zip(plan.sample_ids(e, np.arange(SAMPLES)).tolist(), range(SAMPLES), strict=True)) for e in range(3)
    ]
    state: Any = None
    epochs = 3
    counts: Counter[tuple[int, int]] = Counter()
    again: Counter[int] = Counter()
    kills = 0
    for launch in range(rounds + 1):
        ranks, batch = chance.randint(1, 3), chance.choice([3, 5, 8])
        kind = chance.choice(["inline", "thread", "process"])
        given = [json.dumps(state)] if state else []
        begun = (state["epoch"], state["position"]) if state else (0, 0)
        for taken in [key for key in counts if key >= begun]:
            again[taken[0]] += counts.pop(taken)
        with ExitStack() as stack:
            processes = start(run, launch, ranks, [batch, epochs, kind, *given], stack)
            if launch == rounds:
                for rank, process in enumerate(processes):
                    assert process.wait(120) == 0, (run / f"log-{launch}-{rank}").read_text()[-3000:]
            else:
                wanted = chance.randint(1, 25)
                deadline = time.monotonic() + 90
                while min(len(lines(run / f"said-{launch}-{rank}")) for rank in range(ranks)) < wanted:
                    assert all(process.poll() in (None, 0) for process in processes), run
                    assert time.monotonic() < deadline
                    if all(process.poll() == 0 for process in processes):
                        break
                    time.sleep(0.005)
                for process in processes:
                    process.kill()
                    kills += 1
        states = [lines(run / f"states-{launch}-{rank}") for rank in range(ranks)]
        for rank in range(ranks):
            said = [line for line in lines(run / f"said-{launch}-{rank}") if line != "done"]
            counts.update((epoch, place[epoch][sample]) for epoch, ids in said for sample in ids)
        # A checkpoint that all ranks had come to, or one of a few steps before it.
        common = min(len(each) for each in states)
        old = max(0, common - 1 - chance.randint(0, 6))
        if launch < rounds and common:
            state = states[0][old]
            if state["epoch"] >= epochs:
                break
    verdict = verify_run(run / "ledger")
    assert max(counts.values()) == 1
    (told,) = verdict.loaders
    assert verdict.sound, str(verdict)
    for epoch in told.epochs:
        assert epoch.missing == 0
        mine = sum(key[0] == epoch.epoch for key in counts)
        assert (epoch.delivered, epoch.ahead) == (mine, 0) == (SAMPLES, 0), f"{epoch} {mine}"
    # A killed rank may have written down one step more than it said.
    difference = told.again - again.total()
    assert 0 <= difference <= 8 * kills, (told.again, again)
    return {
        "launches": len(told.launches),
        "kills": kills,
        "samples": counts.total(),
        "again": told.again,
        "written and not said": difference,
        "missing": told.missing,
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_verdict_on_killed_ranks_is_what_they_said_themselves(tmp_path: Path) -> None:
    campaign(tmp_path, rounds=1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_kills(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(int(os.environ.get("ROUNDS", "20"))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        total.update(campaign(folder, rounds=5, seed=100 + seed))
        print(dict(total), flush=True)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ranks_of_a_process_group_agree_on_a_name_for_their_launch(tmp_path: Path) -> None:
    """torchrun without a name, twice with the same one, and each time other launches."""
    for number in range(2):
        command = jobs.torchrun(2, SCRIPT.with_name("grouped.py"), tmp_path / "ledger")
        command[3:3] = ["--rdzv-id", "same"]
        jobs.run(command, tmp_path / f"log{number}", 250)
    (told,) = verify_run(tmp_path / "ledger").loaders
    assert [(launch["ranks"], launch["ledgers"]) for launch in told.launches] == [(2, 2), (2, 2)]
    assert len({launch["name"] for launch in told.launches}) == 2
    assert (told.again, told.missing) == (100, 0)
