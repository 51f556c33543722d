"""Epoch after epoch a rank holds no more memory, files, threads, processes or shared memory."""

import json
import statistics
from pathlib import Path

import pytest
from tests.support import jobs
from tests.support.packages import need_package

need_package("accelerate")
need_package("lightning")

SCRIPT = Path(__file__).parent / "jobs" / "long_run.py"
CELLS = [
    f"{framework}:{workers}"
    for framework in ("lightning", "accelerate")
    for workers in ("threads", "processes", "persistent", "new")
]
EPOCHS = 200
#: Bytes that memory may grow by from the second quarter to the last: allocators keep some of what they are given.
GROWTH = 4 << 20

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.soak
def test_many_epochs_leak_no_memory_files_threads_or_processes(tmp_path: Path) -> None:
    jobs.run(jobs.torchrun(2, SCRIPT, tmp_path, EPOCHS, *CELLS), tmp_path / "log", 3000)
    for cell in CELLS:
        for rank in range(2):
            notes = json.loads((tmp_path / f"{cell.replace(':', '-')}-{rank}.json").read_text())
            assert len(notes) == EPOCHS
            quarter = EPOCHS // 4
            early, late = notes[quarter : 2 * quarter], notes[-quarter:]
            for what in ("files", "threads", "processes", "shared"):
                # What leaks stays. A single look may see a thread of a queue of torch's that is about to end.
                most, least = max(note[what] for note in early), min(note[what] for note in late)
                assert least <= most, (cell, rank, what)
            before, after = (statistics.median(note["memory"] for note in part) for part in (early, late))
            growth = after - before
            last = late[-1]
            line = (
                f"{cell}, rank {rank}: {growth / 1024:.0f} KiB more, at {after / 2**20:.0f} MiB, "
                f"{last['files']} files, {last['threads']} threads, {last['processes']} processes"
            )
            print(line)
            assert growth <= GROWTH, line
