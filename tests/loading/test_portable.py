"""Loaders without worker processes, and samplers, need nothing that only Linux has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.environ import of_no_launcher
from tests.support.portable import HIDE_LINUX_CALLS

SCRIPT = """
import rankfeed as rf

source = rf.from_dataset([{"x": number, "tokens": [1] * (number % 3)} for number in range(40)])

def double(sample, rng):
    return {**sample, "y": 2 * sample["x"], "draw": rng.random()}

for workers in (0, 2):
    loader = rf.Loader(source, 4, shuffle=True, transform=double, num_workers=workers)
    batches = list(loader)
    assert sorted(x for batch in batches for x in batch["x"].tolist()) == list(range(40))
    assert loader.state_dict()["epoch"] == 1
    assert loader.stats()["private_bytes"] == 0
    stream = rf.Loader(rf.from_iterable(lambda: ({"x": number} for number in range(9))), 2, num_workers=workers)
    assert [x for batch in stream for x in batch["x"].tolist()] == list(range(9))
assert sorted(rf.DistributedSampler(9, 2, shuffle=True)) == list(range(9))
assert len(rf.DistributedBatchSampler(9, 2)) == 5
assert list(rf.split(range(3))) == [0, 1, 2]
try:
    next(iter(rf.Loader(source, 4, num_workers=2, worker_kind="process")))
except rf.errors.ArgumentError as error:
    print(error)
"""


@pytest.mark.timeout(300)
def test_loaders_and_samplers_work_without_linux_calls_and_worker_processes_are_refused() -> None:
    command = [sys.executable, "-c", HIDE_LINUX_CALLS + SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=of_no_launcher(), check=False)
    assert done.returncode == 0, done.stderr
    assert "worker processes need Linux 5.3" in done.stdout
    assert "worker_kind='thread'" in done.stdout
