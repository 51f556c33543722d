"""The tutorial's commands print what the page says."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import jobs
from tests.test_documented_code import ROOT, program_of

pytestmark = pytest.mark.timeout(400)


@pytest.mark.soak
def test_the_training_script_of_the_tutorial_resumes_on_three_ranks_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "tutorial.md"
    program, files = program_of(page)
    commands = re.findall(r"^ +torchrun --nproc-per-node=(\d) train.py$", page.read_text(), re.MULTILINE)
    assert commands == ["2", "3"]
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
    Path("train.py").write_text(files["train.py"].replace("time.sleep(0.5)", "time.sleep(0.1)"))
    log = tmp_path / "log"
    with jobs.started(jobs.torchrun(2, Path("train.py")), log) as job:
        jobs.until(lambda: "epoch 0, step 3 of 20, loss" in log.read_text(), job, log, 150)
        job.send_signal(signal.SIGINT)  # as Ctrl-C does
        job.wait(100)
    steps = log.read_text().count("epoch 0, step")
    jobs.run(jobs.torchrun(3, Path("train.py")), log, 200)
    said = [line for line in log.read_text().splitlines() if line.startswith(("resumed", "epoch", "all"))]
    resumed = re.fullmatch(r"resumed on 3 ranks in epoch 0, after (\d+) of 640 samples", said[0])
    assert resumed is not None
    done = int(resumed[1])
    assert done in (32 * steps, 32 * (steps + 1))  # the checkpoint is written before the line
    audits = [line for line in said if line.endswith("0 missing, 0 repeated")]
    counts = [f"epoch 0: {640 - done} samples, ranks [0, 1, 2] of 3", "epoch 1: 640 samples, ranks [0, 1, 2] of 3"]
    assert [line.partition(", steps")[0] for line in audits] == counts
    jobs.run(jobs.torchrun(2, Path("train.py")), log, 100)
    assert "all 2 epochs are done" in log.read_text()
