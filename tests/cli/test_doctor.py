"""``rankfeed doctor``: what it prints and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.diagnostics.jobs import bad_factories

COMMAND = [sys.executable, "-c", "from rankfeed.cli import main; main()", "doctor"]
PIPELINE = """
def train(rank, world_size):
    return [{"id": [number]} for number in range(rank, 9, world_size)]
"""

pytestmark = pytest.mark.timeout(1200)


def doctor(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "pipeline.py").write_text(PIPELINE)
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_broken_loader_ends_with_status_1_and_findings_for_machines(tmp_path: Path) -> None:
    done = doctor(tmp_path, "pipeline:train", "--key", "id", "--epochs", "1", "--start-method", "fork", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert (told["sound"], told["verdict"]) == (False, "diseased")
    assert [finding["code"] for finding in told["findings"] if finding["severity"] == "error"] == ["uneven-steps"]
    assert told["findings"][0]["remedy"]
    assert [rank["epochs"][0]["steps"] for rank in told["runs"][0]["by_rank"]] == [5, 4]


def test_what_could_not_be_proven_ends_with_status_3_and_a_remedy_for_people(tmp_path: Path) -> None:
    done = doctor(tmp_path, "pipeline:train", "--key", "other", "--epochs", "1", "--start-method", "fork")
    assert done.returncode == 3, done.stderr
    assert "[no-ids]" in done.stdout
    assert "remedy:" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not proven")


def test_arguments_that_cannot_be_meant_end_with_status_2(tmp_path: Path) -> None:
    done = doctor(tmp_path, "nothing")
    assert done.returncode == 2
    assert "names no function" in done.stderr


def test_what_the_loader_prints_is_no_part_of_the_document(tmp_path: Path) -> None:
    """Of the factory, of workers, of their subprocesses, by print and by descriptor."""
    factory = f"{bad_factories.__file__}:prints"
    options = ("--ranks", "1", "--workers", "1", "--other-ranks", "1", "--epochs", "1", "--start-method", "fork")
    done = doctor(tmp_path, factory, *options, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "sound"), done.stderr
