"""The functions that the page on watching shows write the figures to TensorBoard and Prometheus."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.documented import ROOT, program_of

#: Runs after the code of the page, while its endpoint still answers.
CHECK = """
from urllib.request import urlopen
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator("runs/feed").Reload()
assert {*events.Tags()["scalars"]} == {f"rankfeed/train/{name}" for name in loader.stats()}
points = [(event.step, event.value) for event in events.Scalars("rankfeed/train/epoch_step")]
assert points[-1] == (3 * len(loader), len(loader)), points  # the third of the page's loops over the loader

answer = urlopen("http://127.0.0.1:18700/metrics", timeout=30).read().decode()
samples = [sample for family in text_string_to_metric_families(answer) for sample in family.samples]
ours = [sample for sample in samples if sample.labels == {"rank": "0", "loader": "train"}]
values = [(sample.name.removeprefix("rankfeed_"), sample.value) for sample in ours]
assert sorted(name for name, _ in values) == sorted(loader.stats())
assert dict(values)["steps"] == 4 * len(loader) == loader.stats()["steps"], values
"""


@pytest.mark.timeout(300)
def test_the_code_of_the_watch_page_writes_the_loader_stats_to_tensorboard_and_prometheus(tmp_path: Path) -> None:
    program, _ = program_of(ROOT / "docs" / "tasks" / "watch.md")
    job = subprocess.run(
        [sys.executable, "-c", program + CHECK], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr
