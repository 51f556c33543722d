"""The lines of `rf.watch` on a real terminal: in place, below printed output, also if the terminal is closed."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from tests.support.jobs import ENVIRON, end, family

JOB = Path(__file__).parent / "jobs" / "watched.py"
ROOT = Path(__file__).parent.parent.parent
LIMIT = 100


def on_a_terminal(tmp_path: Path, *, close_after: bytes | None) -> tuple[str, str]:
    """What a job wrote to its terminal, and what it said in the end."""
    ours, theirs = pty.openpty()
    said, go_on = tmp_path / "said", tmp_path / "go-on"
    environ = {**ENVIRON, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    job = subprocess.Popen(
        [sys.executable, "-W", "always", str(JOB), str(said), str(go_on)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the job has ended
                break
            if close_after is not None and close_after in seen:
                break
            if b"step 4 of 9" in seen:
                go_on.touch()
        os.close(ours)
        go_on.touch()
        assert job.wait(LIMIT) == 0, seen.decode()
    finally:
        end(family(job.pid))
        job.wait(10)
    return seen.decode(), said.read_text()


def test_watch_updates_its_lines_on_a_terminal_in_place_below_printed_output(tmp_path: Path) -> None:
    seen, said = on_a_terminal(tmp_path, close_after=None)
    assert said == "0 TextIOWrapper"
    assert seen.count("train, rank 0, epoch 2, step 3 of 9") > 1
    assert "\x1b[2K\x1b[1A\x1b[2K" in seen  # both lines are erased and written again
    assert "\x1b[2Kprinted meanwhile" in seen
    assert "the worker prints to TextIOWrapper" in seen
    # The last lines stay, and the cursor is there again.
    last = seen.rpartition("\x1b[2K")[2]
    assert seen.rstrip().endswith("\x1b[?25h")
    assert "step 4 of 9" in last or "step 7 of 9" in last


def test_a_watched_training_continues_when_its_terminal_is_closed(tmp_path: Path) -> None:
    _, said = on_a_terminal(tmp_path, close_after=b"the worker prints")
    assert said.endswith(" TextIOWrapper")  # it came to its end, with its own streams
