"""The house stands: style, types, floors and documentation hold, and coming in is quick."""

import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import rankfeed

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(sysconfig.get_path("scripts"))

# Torch is read for its types: a first run without mypy's cache takes a while.
pytestmark = pytest.mark.timeout(600)


def run(tool: str, *arguments: str) -> None:
    environ = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [SCRIPTS / tool, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_room_imports_only_from_the_floors_below_it() -> None:
    run("lint-imports", "--no-cache")


def test_code_keeps_to_the_style() -> None:
    run("ruff", "check", ".")


def test_code_is_formatted() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_types_are_complete_and_agree() -> None:
    run("mypy", "--strict", "src")


@pytest.mark.slow
def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    run("mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))


def test_records_can_be_read_by_several_threads_at_once() -> None:
    lines = [line for path in (ROOT / "src").rglob("*.py") for line in ["", *path.read_text().splitlines()]]
    records = [before for before, line in pairwise(lines) if re.match(r"class \w+\(msgspec\.Struct", line)]
    assert Counter(records) == {"@decodable": len(records)}


@pytest.mark.parametrize(
    "heavy", ["torch", "pyarrow", "lance", "ray", "lightning", "accelerate", "transformers", "typer"]
)
def test_importing_rankfeed_leaves_heavy_packages_alone(heavy: str) -> None:
    assert python(f"import rankfeed, sys; print({heavy!r} in sys.modules)") == "False"


def test_making_data_ready_imports_no_torch(tmp_path: Path) -> None:
    """It takes seconds on each rank, and is needed by whoever trains alone."""
    code = f"""if True:
        import pathlib, sys
        import rankfeed as rf
        def build(staging): (staging / "rows").touch()
        rf.prepare_once({str(tmp_path / "once")!r}, build)
        packed = rf.write(({{"x": i}} for i in range(9)), {str(tmp_path / "p")!r}, workers=0, progress=False)
        packed = rf.write(packed, {str(tmp_path / "q")!r}, map=lambda row, rng: row, workers=0, progress=False)
        print(len(packed), "torch" in sys.modules)"""
    assert python(code) == "9 False"


def test_typing_information_is_shipped() -> None:
    assert (Path(rankfeed.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", rankfeed.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(rankfeed, name) is not None
    assert name in dir(rankfeed)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        rankfeed.Lodaer  # noqa: B018
