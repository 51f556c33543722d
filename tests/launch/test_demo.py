"""The demo, as `make demo` runs it: real data that come with rankfeed, and no network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Imported by every Python that the demo starts: only this machine can be reached.
OFFLINE = """
import sys

def refuse(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
        if not host.startswith("127.") and host not in ("::1", "localhost"):
            raise OSError(f"no network: cannot reach {host}")

sys.addaudithook(refuse)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_runs_offline_and_reports_that_no_sample_is_missing_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OFFLINE)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-c", "from rankfeed.cli import main; main()", "demo", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["samples"] == 640
    assert (proof["missing"], proof["repeated"]) == (0, 0)
    assert len(proof["steps_before"]) == 2
    assert len(proof["steps_after"]) == 3
    assert len({*proof["steps_before"]}) == len({*proof["steps_after"]}) == 1
    assert proof["loss_after"] < proof["loss_before"]
