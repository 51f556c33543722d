"""A Trainer's processes have data prepared where Lightning lets them: on one rank alone, and on all."""

import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.support.jobs import family, run, started
from tests.support.marks import slow, soak
from tests.support.packages import need_package

need_package("lightning")
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent / "jobs" / "lightning_prepare.py"
#: Seconds in which a job has to end: far more than it takes.
HANG = 100
FAILED = "preparing the data failed: KeyError: 'no such column'"


def command(folder: Path, fails: str = "") -> list[str]:
    (folder / "out").mkdir()
    return [sys.executable, str(SCRIPT), str(folder), str(folder / "out"), fails]


def outcomes(out: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(out.glob("*.outcome"))}


def builds(out: Path) -> Counter[str]:
    return Counter(path.name.removeprefix("built-").partition("@")[0] for path in out.glob("built-*"))


@pytest.mark.slow
def test_prepare_once_under_lightning_builds_once_and_every_rank_gets_the_result(tmp_path: Path) -> None:
    run(command(tmp_path), tmp_path / "log", HANG)
    assert outcomes(tmp_path / "out") == {
        "outside-before-0": "before",
        "outside-before-1": "before",
        "prepare_data-both-0": "both",
        "setup-both-0": "both",
        "setup-both-1": "both",
        "setup-late-0": "late",
        "setup-late-1": "late",
    }
    assert builds(tmp_path / "out") == Counter({"before": 1, "both": 1, "late": 1})
    assert sorted(path.name for path in (tmp_path / "out").glob("done-*")) == ["done-0", "done-1"]


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        # All ranks are there, one of them when it is over.
        soak("late", ["setup-late-0", "setup-late-1"]),
        # Rank 1 waits in a barrier of Lightning's, which the end of rank 0 breaks.
        slow("both", ["prepare_data-both-0"]),
        # There is but one process yet.
        soak("before", ["outside-before-0"]),
    ],
)
def test_a_failing_prepare_once_build_under_lightning_ends_all_ranks(
    fails: str, told: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    seen: dict[int, psutil.Process] = {}
    with started(command(tmp_path, fails), log) as job:
        deadline = time.monotonic() + HANG
        while job.poll() is None and time.monotonic() < deadline:
            seen.update((process.pid, process) for process in family(job.pid))
            time.sleep(0.05)
        seen.pop(job.pid, None)
        _, left = psutil.wait_procs(seen.values(), timeout=HANG)
        assert job.poll() == 1, log.read_text()[-6000:]
        assert left == [], log.read_text()[-6000:]
    assert outcomes(tmp_path / "out") == dict.fromkeys(told, FAILED), log.read_text()[-6000:]
    assert builds(tmp_path / "out") == Counter({fails: 1})
