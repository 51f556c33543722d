"""A build that waits for itself is an error as far as that can be detected; other processes wait."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.prepared import build

import rankfeed as rf
from rankfeed.errors import PrepareError
from rankfeed.prepare.marker import changed_files

WAITS = (
    "import sys, rankfeed as rf\n"
    "try: rf.prepare_once(sys.argv[1], print, timeout=60)\n"
    "except rf.errors.PrepareError as error: print(str(error).splitlines()[0])\n"
    "else: print('there')\n"
)


def test_a_child_process_that_prepares_what_its_parent_builds_raises(path: Path) -> None:
    said: list[str] = []

    def starts(staging: Path) -> None:
        command = [sys.executable, "-c", WAITS, str(path)]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout)
        with rf.prepare_once(path.with_name("inner")) as inner:  # another folder may be prepared inside
            assert inner is not None
            build(inner)
        build(staging)

    before = dict(os.environ)
    rf.prepare_once(path, starts)
    assert said == ["deadlock: the process that started this one is already preparing this directory\n"]
    assert changed_files(path) == []
    assert dict(os.environ) == before


def test_a_child_process_started_by_another_thread_waits_for_the_build(path: Path) -> None:
    building, go = threading.Event(), threading.Event()

    def slow(staging: Path) -> None:
        building.set()
        assert go.wait(60)
        build(staging)

    thread = threading.Thread(target=rf.prepare_once, args=(path, slow))
    thread.start()
    assert building.wait(60)
    command = [sys.executable, "-c", WAITS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waits:
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(1)
        go.set()
        assert waits.communicate(timeout=60)[0] == "there\n"
    thread.join(60)


def test_a_thread_that_waits_for_its_own_process_times_out_and_logs_that(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rankfeed.prepare.wait._FIRST_REPORT", 0.05)
    told: list[str] = []

    def worker() -> None:
        try:
            rf.prepare_once(path, build, timeout=1)
        except PrepareError as error:
            told.append(str(error))

    def starts(staging: Path) -> None:
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join(60)
        build(staging)

    with caplog.at_level(logging.WARNING, "rankfeed"):
        rf.prepare_once(path, starts)
    assert "after 1 s" in told[0]
    assert "that is this process" in caplog.text
