"""Layers, style, types and documentation of the code, and how fast rankfeed is imported."""

import ast
import os
import py_compile
import re
import subprocess
import sysconfig
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import grimp
import pytest
from tests.support.jobs import run_python

import rankfeed

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
SCRIPTS = Path(sysconfig.get_path("scripts"))

# Torch is read for its types: a first run without mypy's cache takes a while.
pytestmark = pytest.mark.timeout(600)


def run(tool: str, *arguments: str) -> None:
    environ = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [SCRIPTS / tool, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def test_packages_import_only_from_lower_layers() -> None:
    run("lint-imports", "--no-cache")


def test_modules_have_no_import_cycle() -> None:
    graph = grimp.build_graph("rankfeed", cache_dir=None)  # imports inside functions and for types count
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter({module: names - {"rankfeed"} for module, names in imports.items()}).prepare()


def test_directories_have_at_most_16_modules() -> None:
    count = Counter(path.parent for path in SRC.rglob("*.py") if path.name != "__init__.py")
    assert {str(path): n for path, n in count.items() if n > 16} == {}


def test_no_class_name_occurs_twice() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module_name(path))
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}


def test_ruff_check_finds_nothing_in_the_repository() -> None:
    run("ruff", "check", ".")


def test_all_code_is_formatted_by_ruff() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy_strict_finds_nothing_in_src() -> None:
    run("mypy", "--strict", "src")


@pytest.mark.slow
def test_documentation_builds_without_a_warning_and_publishes_no_code(tmp_path: Path) -> None:
    py_compile.compile(str(ROOT / "docs" / "images" / "epoch.py"))  # as its import does
    run("mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    assert (tmp_path / "site" / "index.html").exists()
    assert [path for path in (tmp_path / "site").rglob("*") if path.suffix.startswith(".py")] == []


def test_every_msgspec_struct_is_decorated_as_decodable() -> None:
    """So that several threads can decode records of one class at the same time."""
    lines = [line for path in (ROOT / "src").rglob("*.py") for line in ["", *path.read_text().splitlines()]]
    records = [before for before, line in pairwise(lines) if re.match(r"class \w+\(msgspec\.Struct", line)]
    assert Counter(records) == {"@decodable": len(records)}


def test_importing_rankfeed_does_not_import_heavy_packages() -> None:
    heavy = {"torch", "pyarrow", "lance", "ray", "lightning", "accelerate", "transformers", "typer"}
    assert run_python(f"import rankfeed, sys; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


def test_preparing_and_writing_data_import_no_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds on each rank."""
    code = f"""if True:
        import pathlib, sys
        import rankfeed as rf
        def build(staging): (staging / "rows").touch()
        rf.prepare_once({str(tmp_path / "once")!r}, build)
        packed = rf.write(({{"x": i}} for i in range(9)), {str(tmp_path / "p")!r}, workers=0, progress=False)
        packed = rf.write(packed, {str(tmp_path / "q")!r}, map=lambda row, rng: row, workers=0, progress=False)
        print(len(packed), "torch" in sys.modules)"""
    assert run_python(code) == "9 False\n"


def test_the_package_contains_a_py_typed_file() -> None:
    assert (Path(rankfeed.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", rankfeed.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(rankfeed, name) is not None
    assert name in dir(rankfeed)


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_rankfeed_runs_no_full_garbage_collection_and_keeps_the_collector_on_or_off(
    enabled: bool,
) -> None:
    code = """
import gc, sys, torch
(gc.enable if sys.argv[1] == "True" else gc.disable)()
full = gc.get_stats()[2]["collections"]
import rankfeed
rankfeed.Loader
assert gc.get_stats()[2]["collections"] == full
print(gc.isenabled())
"""
    assert run_python(code, enabled).strip() == str(enabled)


def test_an_unknown_name_of_rankfeed_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        rankfeed.Lodaer  # noqa: B018
