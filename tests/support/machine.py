"""What a machine may lack: a test that needs it is skipped with the reason, or fails where all has to be there."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


def missing(requirement: str) -> NoReturn:
    """Skip the test, or fail it in a run of all tests (`.ci/run` sets RANKFEED_REQUIRE_LAUNCHERS)."""
    if os.environ.get("RANKFEED_REQUIRE_LAUNCHERS") == "1":
        pytest.fail(f"needs {requirement}")
    pytest.skip(f"needs {requirement}", allow_module_level=True)


def need_root(purpose: str) -> None:
    """To mount, to have namespaces, or to be two users."""
    if not _is_root():
        missing(f"root that may mount and make namespaces (unshare): {purpose}")


@contextmanager
def mounted(kind: str, folder: Path, options: str) -> Iterator[None]:
    need_root("mounting")
    subprocess.run(["mount", "-t", kind, "-o", options, kind, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@functools.cache
def _is_root() -> bool:
    """Whether this is root, and not that of a container which may do less."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    spaces = ["--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc"]
    return subprocess.run(["unshare", *spaces, "true"], capture_output=True, check=False).returncode == 0
