"""Progress bars are shown on terminals only."""

import subprocess
import sys

SCRIPT = """
from rankfeed._util.progress import progress_bar
with progress_bar("reading", 3) as advance:
    for _ in range(3):
        advance()
"""


def test_a_progress_bar_writes_nothing_if_standard_error_is_no_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={"FORCE_COLOR": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("", "")
