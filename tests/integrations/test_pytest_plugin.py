"""The pytest plugin, as a project uses it in its own tests."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
def sound(rank, world_size):
    return [{"sample_id": [number]} for number in range(rank, 18, world_size)]

def broken(rank, world_size):
    return [{"sample_id": [number]} for number in range(18)]

OPTIONS = {"epochs": 1, "start_methods": ["fork"]}

def test_sound(rankfeed):
    assert rankfeed.assert_exactly_once(sound, ranks=2, workers=0, **OPTIONS).verdict == "sound"

def test_broken(rankfeed):
    rankfeed.assert_exactly_once(broken, ranks=2, workers=0, **OPTIONS)
"""

pytestmark = pytest.mark.timeout(1200)


def test_a_project_holds_its_loaders_to_it(tmp_path: Path) -> None:
    (tmp_path / "test_feed.py").write_text(PROJECT)
    # Whether or not the package is installed: by its module alone.
    plugin = ["-p", "no:rankfeed", "-p", "rankfeed.integrations.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "--import-mode=importlib", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "not-sharded-by-rank" in done.stdout
    assert "remedy: give each rank its share" in done.stdout


def test_the_plugin_costs_nothing_until_it_is_asked_for() -> None:
    code = "import rankfeed.integrations.pytest_plugin, sys; print({'torch', 'pyarrow', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
