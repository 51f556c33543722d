"""The sdist and the wheel have the files of the project, with and without a C compiler."""

import zipfile
from pathlib import Path

import pytest
from tests.packages.build import build, build_all, unpack
from tests.packages.install import user_extras
from tests.packages.uses import PAGES, PROGRAMS

pytestmark = pytest.mark.timeout(600)
LIBRARY = "rankfeed/_util/_native.so"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, its sdist unpacked, and both packages."""
    folder = tmp_path_factory.mktemp("packages")
    build_all(folder)
    return folder


def files(folder: Path) -> set[str]:
    """Files of a folder, without those that a build adds."""
    paths = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {
        path.as_posix() for path in paths if path.parts[0] != "build" and "rankfeed.egg-info" not in path.parts
    }


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name.partition("/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }


def test_the_sdist_has_every_file_of_the_project(folder: Path) -> None:
    (unpacked,) = (folder / "unpacked").iterdir()
    assert files(unpacked) == files(folder / "project") | {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_every_file_below_src_the_examples_and_the_native_library(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    sources = files(folder / "project" / "src")
    examples = {f"rankfeed/examples/{name}" for name in files(folder / "project" / "examples")}
    packed = {name for name in members(wheel) if ".dist-info/" not in name}
    assert packed == sources | examples | {LIBRARY}
    assert {"rankfeed/py.typed", "rankfeed/diagnostics/report/page.html"} <= packed


def test_the_wheel_is_small_has_its_licenses_and_is_tagged_for_any_python_3_on_one_platform(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 1_000_000
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert not wheel.name.endswith("-any.whl")
    described = metadata(wheel)
    assert {"licenses/LICENSE", "licenses/examples/data/README.md"} <= set(described)
    assert "\nLicense-Expression: Apache-2.0\n" in described["METADATA"]
    assert "rankfeed = rankfeed.cli:main" in described["entry_points.txt"]


def test_every_extra_for_users_has_a_page_or_program_that_uses_it() -> None:
    assert {*PAGES, *PROGRAMS} == set(user_extras())


def test_a_wheel_built_without_a_c_compiler_is_pure_python(folder: Path, tmp_path: Path) -> None:
    (sdist,) = folder.glob("*.tar.gz")
    project = unpack(sdist, tmp_path / "unpacked")
    wheel = build(project, "wheel", tmp_path, CC="/no/compiler", PATH="/no/programs")
    assert wheel.name.endswith("-py3-none-any.whl")
    (complete,) = folder.glob("*.whl")
    names = [{name for name in members(path) if ".dist-info/" not in name} for path in (complete, wheel)]
    assert names[0] - names[1] == {LIBRARY}
    assert names[1] <= names[0]
