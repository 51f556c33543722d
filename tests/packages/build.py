"""Builds the sdist from the files of the project, and the wheel from the sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a checkout has beside its files: environments, caches, and what builds and benchmarks leave.
_UNTRACKED = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.py[cod]", "*.so", "*.egg-info")
_RESULTS = ("build", "dist", "site", "demo-data", "results")
_FILES = ("*.md", "*.in", "*.py", "*.toml", "*.txt", "*.yml", "LICENSE", "Makefile", ".importlinter")
_FOLDERS = (".ci", "bench", "docs", "examples", "src", "tests")


def copy_project(target: Path) -> None:
    """Copy the files of the project, as a clone has them."""
    target.mkdir()
    for path in {path for pattern in _FILES for path in ROOT.glob(pattern)}:
        shutil.copy(path, target)
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*_UNTRACKED, *_RESULTS))


def build(project: Path, kind: str, out: Path, **environ: str) -> Path:
    """Build an "sdist" or a "wheel" of an unpacked project."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (package,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return package


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a folder, and return the project in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return project


def build_all(folder: Path) -> tuple[Path, Path]:
    """The sdist of this project, and the wheel of that sdist."""
    copy_project(folder / "project")
    sdist = build(folder / "project", "sdist", folder)
    return sdist, build(unpack(sdist, folder / "unpacked"), "wheel", folder)
