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


def test_doctor_exits_with_1_and_prints_json_findings_for_a_loader_with_uneven_steps(tmp_path: Path) -> None:
    done = doctor(tmp_path, "pipeline:train", "--key", "id", "--epochs", "1", "--start-method", "fork", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert (told["sound"], told["verdict"]) == (False, "diseased")
    assert [finding["code"] for finding in told["findings"] if finding["severity"] == "error"] == ["uneven-steps"]
    assert told["findings"][0]["remedy"]
    assert [rank["epochs"][0]["steps"] for rank in told["runs"][0]["by_rank"]] == [5, 4]


def test_doctor_exits_with_3_and_prints_a_remedy_if_the_ids_are_not_found(tmp_path: Path) -> None:
    done = doctor(tmp_path, "pipeline:train", "--key", "other", "--epochs", "1", "--start-method", "fork")
    assert done.returncode == 3, done.stderr
    assert "[no-ids]" in done.stdout
    assert "remedy:" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not proven")


def test_doctor_exits_with_2_for_a_factory_that_names_no_function(tmp_path: Path) -> None:
    done = doctor(tmp_path, "nothing")
    assert done.returncode == 2
    assert "names no function" in done.stderr


def test_output_printed_by_the_loader_is_not_mixed_into_the_json_of_doctor(tmp_path: Path) -> None:
    """Output of the factory, of workers and of their subprocesses, by print and by file descriptor."""
    factory = f"{bad_factories.__file__}:prints"
    options = ("--ranks", "1", "--workers", "1", "--other-ranks", "1", "--epochs", "1", "--start-method", "fork")
    done = doctor(tmp_path, factory, *options, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "sound"), done.stderr
