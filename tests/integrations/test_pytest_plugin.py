"""The pytest plugin, as a project uses it in its own tests."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import run_python

from rankfeed.diagnostics.doctor import Examination
from rankfeed.diagnostics.findings import Finding
from rankfeed.errors import ArgumentError
from rankfeed.integrations.pytest_plugin import Rankfeed

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


def test_pytest_plugin_fails_a_test_whose_loader_is_not_sharded_by_rank(tmp_path: Path) -> None:
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


def test_importing_the_pytest_plugin_does_not_import_torch_numpy_or_pyarrow() -> None:
    code = "import rankfeed.integrations.pytest_plugin, sys; print({'torch', 'pyarrow', 'numpy'} & {*sys.modules})"
    assert run_python(code) == "set()\n"


class Examined(Rankfeed):
    """The fixture after an examination that came to one error, one finding that is not proven, and a warning."""

    def examine(self, factory: Any, **options: Any) -> Examination:
        self.allow = options["allow"]
        severities: Any = {"uneven-steps": "error", "no-ids": "unproven", "starved": "warning"}
        return Examination("a:b", tuple(Finding(code, severity, code) for code, severity in severities.items()))


@pytest.mark.parametrize("allow", [["uneven-steps", "no-ids"], ["uneven-steps", "not proven", "shared-samples"]])
def test_assert_exactly_once_passes_if_all_findings_are_allowed(allow: list[str]) -> None:
    examined = Examined()
    assert examined.assert_exactly_once("a:b", allow=allow).verdict == "diseased"
    assert examined.allow == {*allow} & {"shared-samples"}, "the doctor is told what it can use"


@pytest.mark.parametrize(
    ("allow", "failing"),
    [((), ["uneven-steps", "no-ids"]), ("not proven", ["uneven-steps"]), (["uneven-steps"], ["no-ids"])],
)
def test_assert_exactly_once_fails_with_the_findings_that_are_not_allowed(allow: Any, failing: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        Examined().assert_exactly_once("a:b", allow=allow)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines[1:-1]] == failing


def test_assert_exactly_once_with_an_unknown_allow_name_raises_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)invalid allow.*'shared-samples'.*'not proven'.*'uneven-steps'"):
        Examined().assert_exactly_once("a:b", allow=["share"])
