"""Factories with faults of a program: each gets a verdict that says where, and leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.diagnostics.jobs import bad_factories

from rankfeed.diagnostics.doctor import Examination, examine
from rankfeed.errors import ArgumentError

FACTORIES = bad_factories.__file__

# What hangs is ended by the doctor; a busy machine is slow.
pytestmark = pytest.mark.timeout(1200)


def examined(name: str, **options: Any) -> Examination:
    one_run: dict[str, Any] = {"ranks": 1, "workers": 0, "other_ranks": 1, "epochs": 1, "timeout": 120}
    return examine(f"{FACTORIES}:{name}", **(one_run | options))


#: Factory, verdict, code of the first finding, where and how, options.
TABLE: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("state_raises", "diseased", "factory-raises", "taking the state: KeyError", {}),
    ("state_hangs", "diseased", "hangs", "taking the state: nothing came", {"timeout": 3}),
    ("state_cannot_be_saved", "diseased", "factory-raises", "taking the state: AttributeError: Can't pickle", {}),
    ("load_raises", "diseased", "factory-raises", "loading the state: KeyError", {}),
    ("load_hangs", "diseased", "hangs", "loading the state: nothing came", {"timeout": 3}),
    ("load_exits", "diseased", "process-died", "loading the state: the process ended: exit status 0", {}),
    ("set_epoch_raises", "diseased", "factory-raises", "calling set_epoch(0): KeyError", {}),
    ("set_epoch_hangs", "diseased", "hangs", "calling set_epoch(0): nothing came", {"timeout": 3}),
    ("raises_after_the_last_batch", "diseased", "factory-raises", "in epoch 0, step 8: KeyError", {}),
    ("exits_in_an_epoch", "diseased", "factory-raises", "in epoch 0, step 3: SystemExit", {}),
    ("raises_a_long_message", "diseased", "factory-raises", "in the factory: ValueError: xxx", {}),
    ("returns_text", "diseased", "factory-raises", "no iterable of batches but str", {}),
    ("returns_a_mapping", "diseased", "factory-raises", "no iterable of batches but dict", {}),
    ("contains_itself", "not proven", "not-counted", "", {}),
    ("guards_its_attributes", "sound", "", "", {}),
]


@pytest.mark.parametrize(("name", "verdict", "code", "evidence", "options"), TABLE, ids=[row[0] for row in TABLE])
def test_the_doctor_reports_in_which_phase_a_factory_or_its_loader_raises_hangs_or_exits(
    name: str, verdict: str, code: str, evidence: str, options: dict[str, Any]
) -> None:
    examination = examined(name, **options)
    document = json.dumps(examination.as_dict())
    assert (examination.verdict, len(document) < 20_000) == (verdict, True), str(examination)
    if code:
        assert examination.findings[0].code == code, str(examination)
        assert evidence in "\n".join(examination.findings[0].evidence), str(examination)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("raises.py", "raise ValueError('no data')", "ValueError: no data"),
        ("exits.py", "import sys; sys.exit(0)", "SystemExit: 0"),
        ("invalid.py", "def train(:", "SyntaxError"),
        ("binary.py", b"\xff\xfe\x00", "SyntaxError"),
        ("absent.py", None, "FileNotFoundError"),
        ("empty.py", "", "AttributeError"),
        ("notes.txt", "text", "ModuleNotFoundError"),
    ],
)
def test_examining_a_file_that_cannot_be_imported_raises_argument_error_without_rankfeed_frames(
    file: str, content: str | bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ArgumentError, match="cannot be imported") as raised:
        examine(f"{tmp_path / file}:train", ranks=1, workers=0, other_ranks=1)
    assert message in str(raised.value)
    assert "rankfeed/" not in str(raised.value.found)
    assert "importlib" not in str(raised.value.found)


@pytest.mark.parametrize("module", ["json", "numpy", "torch", "rankfeed", "test"])
def test_the_doctor_imports_a_factory_file_that_has_the_name_of_an_installed_module(
    module: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{module}.py"
    file.write_text("def train(): return [{'sample_id': [index]} for index in range(4)]")
    assert examine(f"{file}:train", ranks=1, workers=0, other_ranks=1, epochs=1).sound


@pytest.mark.parametrize(("name", "code"), [("leaves_processes", None), ("dies_with_a_process", "process-died")])
def test_the_doctor_ends_detached_processes_that_a_factory_started(
    name: str, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv(bad_factories.PIDS, str(pids))
    examination = examined(name)
    assert [finding.code for finding in examination.findings if finding.severity == "error"] == [code] * bool(code)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) >= 2
    assert [pid for pid in started if _is_running(pid)] == []


def test_a_handle_that_workers_share_is_reported_though_its_reader_raises_at_the_first_batch() -> None:
    examination = examined("reads_wrong_records", workers=2, start_methods=("fork",))
    assert ("handles-before-fork", "error") in [(one.code, one.severity) for one in examination.findings]
    assert examination.verdict == "diseased"


def _is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_the_doctor_leaves_no_temporary_directory_after_a_worker_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    examination = examined("hangs_in_a_worker", workers=1, start_methods=("fork",), timeout=10)
    assert examination.findings[0].code == "hangs", str(examination)
    assert [*tmp_path.iterdir()] == []
