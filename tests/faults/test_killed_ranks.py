"""Ranks are killed at any moment: relative to the checkpoints each sample comes once, as the ledgers say too."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support import jobs
from tests.support.marks import slow, soak

import rankfeed as rf
from rankfeed.diagnostics import verify_run

SCRIPT = Path(__file__).parent / "job.py"
SAMPLES = 1201


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed") / "data"
    rows = ({"x": np.full(i % 7, i, np.int32)} for i in range(SAMPLES))
    rf.write(rows, path, shard_bytes=4000, progress=False)
    return path


def campaign(data: Path, folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """Start, kill a random rank at a random time, start on another number of ranks; at the end let it finish.

    Returns the figures: epochs counted, kills, samples missing, repeated, and delivered again after a kill.
    """
    chance = random.Random(seed)
    ranks, kills = 2, 0
    # More epochs than the kills can stop; what is left over is cut off at the end.
    epochs = rounds + 1
    for index in range(rounds + 1):
        last = index == rounds
        if last:
            epochs = int(json.loads((folder / "checkpoint.json").read_text())["epoch"]) + 1 if kills else 1
        kind, workers = chance.choice([("thread", 0), ("thread", 2), ("process", 1)])
        log = folder / f"run{index}.log"
        command = jobs.torchrun(ranks, SCRIPT, data, folder, index, epochs, workers, kind)
        with jobs.started(command, log) as job:
            if last:
                assert job.wait(120) == 0, log.read_text()[-6000:]
            else:
                first = folder / f"run{index}.rank0"
                jobs.until(lambda file=first: file.exists() and file.stat().st_size, job, log, 90)
                time.sleep(chance.uniform(0.0, 1.5))
                children = psutil.Process(job.pid).children()
                victims = [child for child in children if SCRIPT.name in " ".join(child.cmdline())]
                assert len(victims) == ranks, log.read_text()[-6000:]
                chance.choice(victims).kill()
                kills += 1
        ranks = chance.choice([count for count in (1, 2, 3, 4) if count != ranks])
    figures = {"kills": kills, **count(folder, rounds + 1)}
    check_ledgers(folder / "ledger", figures)
    return figures


def check_ledgers(folder: Path, figures: dict[str, int]) -> None:
    """The loaders' ledgers say what the ranks wrote down themselves."""
    verdict = verify_run(folder)
    assert verdict.sound, str(verdict)
    (loader,) = verdict.loaders
    assert [(epoch.delivered, epoch.missing) for epoch in loader.epochs] == [(SAMPLES, 0)] * figures["epochs"]
    # A rank that was killed or ended may have been about to write down a batch of four samples.
    assert 0 <= loader.again - figures["again"] <= 4 * 4 * figures["kills"], (loader.again, figures)


def count(folder: Path, runs: int) -> dict[str, int]:
    """Each run counts from where it began to where the next one began; the last one to its end."""
    begins = [json.loads((folder / f"run{run}.begin").read_text()) for run in range(runs)]
    places = [(state["epoch"], state["steps"]) for state in begins]
    ends = [*places[1:], (1 << 60, 0)]
    delivered, again = Counter[tuple[int, int]](), 0
    for run in range(runs):
        for file in folder.glob(f"run{run}.rank*"):
            text = file.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                epoch, step, ids = json.loads(line)
                if (epoch, step) <= ends[run]:
                    delivered.update((epoch, sample) for sample in ids)
                else:
                    again += len(ids)
    epochs = max(epoch for epoch, _ in delivered) + 1
    promised = Counter((epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES))
    return {
        "epochs": epochs,
        "delivered": delivered.total(),
        "missing": (promised - delivered).total(),
        "repeated": (delivered - promised).total(),
        "again": again,
    }


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [1, slow(2), soak(50)])
def test_runs_resumed_after_killed_ranks_lose_and_repeat_no_sample(
    rounds: int, data: Path, tmp_path: Path
) -> None:
    figures = campaign(data, tmp_path, rounds, seed=rounds)
    print(f"\n{figures}")
    assert (figures["kills"], figures["missing"], figures["repeated"]) == (rounds, 0, 0)
