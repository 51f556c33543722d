"""A Trainer under a watch: trains as ever, and where a rank fails the others say which."""

import json
import re
import sys
from pathlib import Path

import pytest
from tests.support.jobs import run

JOB = Path(__file__).parent / "jobs" / "lightning_lockstep.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightning_lockstep_error_names_the_rank_and_step_that_failed(tmp_path: Path) -> None:
    cases = ["nowhere", "training", "validation"]
    run([sys.executable, str(JOB), str(tmp_path), *cases], tmp_path / "log", 280)
    told = {
        case: [json.loads((tmp_path / case / f"{rank}.json").read_text()) for rank in (0, 1)] for case in cases
    }
    assert told["nowhere"] == ["trained", "trained"]
    assert told["training"][1] == told["validation"][1] == "ValueError: the user's own"
    training = r"LockstepError: rank 1 \(.*\) failed in step 3 of pass 2: ValueError: the user's own"
    assert re.match(training, told["training"][0]), told["training"][0]
    validation = r"LockstepError: rank 1 \(.*\) failed in step 4 of pass 1: ValueError: the user's own"
    assert re.match(validation, told["validation"][0]), told["validation"][0]
