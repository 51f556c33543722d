"""The demo, as `make demo` runs it: it needs the package index for its data."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_ends_with_the_proof() -> None:
    command = [sys.executable, "-c", "from rankfeed.cli import main; main()", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["samples"] == 640
    assert (proof["missing"], proof["repeated"]) == (0, 0)
    assert len(proof["steps_before"]) == 2
    assert len(proof["steps_after"]) == 3
    assert len({*proof["steps_before"]}) == len({*proof["steps_after"]}) == 1
    assert proof["loss_after"] < proof["loss_before"]
