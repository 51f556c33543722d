"""Wrong and unusual arguments of every public function end in a RankfeedError, or in a right result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
from tests.support.arguments import LIMIT, cases, failure, targets
from tests.support.environ import of_no_launcher

import rankfeed as rf

ROOT = Path(__file__).parent.parent
TARGETS = targets()
#: Of the plain tests, one case in so many; those that touch files, threads and processes are slower.
FEW = 23


def test_every_public_name_is_among_the_targets() -> None:
    """A new public function is fuzzed, or named here with the reason."""
    no_functions = {"__version__", "errors", "AuditReport", "Source"}  # Source is abstract, AuditReport a result
    named = {name.replace(",", ".").split(".")[0].split(" ")[0] for name in TARGETS}
    assert set(rf.__all__) - no_functions - named == set()


@pytest.mark.parametrize("name", TARGETS)
def test_some_odd_arguments_are_refused_or_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = TARGETS[name]
    failures = {
        (parameter, value): failed
        for parameter, value in cases(target, FEW, zlib.crc32(name.encode()))
        if (failed := failure(target, parameter, value)) is not None
    }
    assert failures == {}


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_all_odd_arguments_are_refused_or_used(name: str, tmp_path: Path) -> None:
    """Each target in a process of its own: a value that crashes the interpreter, or hangs in C, is found too."""
    environ = {**of_no_launcher(), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.support.arguments", name, "1", "0"]
    count = len(cases(TARGETS[name]))
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=60 + LIMIT * count
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    begun = [line[1:] for line in lines if line[0] == "begin"]
    ended = [line[1] for line in lines if line[0] == "end"]
    failures = [(case, failed) for case, failed in zip(begun, ended, strict=False) if failed is not None]
    if len(ended) < count:
        failures.append((begun[-1] if begun else None, f"exit status {done.returncode}: {done.stderr[-2000:]}"))
    print(f"{name}: {len(ended)} cases, {len(failures)} failures")
    assert failures == [], Counter(failed for _, failed in failures)
