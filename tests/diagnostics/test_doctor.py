"""The doctor on small pipelines, sound and broken, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankfeed.diagnostics.doctor import Examination, examine
from rankfeed.diagnostics.doctor.resources import cpus
from rankfeed.errors import ArgumentError

PIPELINES = Path(__file__).parent / "jobs" / "pipelines.py"

# Whatever hangs is ended by the doctor; a busy machine is slow.
pytestmark = pytest.mark.timeout(1200)


def examined(name: str, **options: Any) -> Examination:
    usual: dict[str, Any] = {"start_methods": ("fork",), "timeout": 120}
    return examine(f"{PIPELINES}:{name}", **(usual | options))


def severe(found: Examination) -> list[str]:
    """Codes of errors and of what is unproven, and of warnings; the number of CPUs is not the loader's doing."""
    return [each.code for each in found.findings if each.severity != "note" and each.code != "too-many-workers"]


def left() -> list[psutil.Process]:
    """Processes of any examination."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            if b"RANKFEED_EXAMINATION" in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(process)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


#: Pipeline, verdict, the first finding, options.
ORDINARY: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("sound", "sound", [], {}),
    ("duplicated_by_workers", "diseased", ["duplicated-by-workers"], {"epochs": 1}),
    ("same_noise", "diseased", ["same-randomness-in-workers"], {"epochs": 1}),
    ("handles_before_fork", "diseased", ["handles-before-fork"], {"epochs": 1}),
    ("resume_skips", "diseased", ["resume-skips"], {"epochs": 1}),
    ("never_ends", "not proven", ["never-ends"], {"max_steps": 50, "epochs": 1}),
    ("dies", "diseased", ["process-died"], {}),
    ("own_workers", "diseased", ["duplicated-by-workers"], {"epochs": 1}),
    ("persistent_noise", "sound", [], {}),
]
WIDE: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("sound_stream", "sound", [], {"epochs": 2}),  # 22, 21 and 21 samples on 3 ranks: 6 steps each
    ("sharded_twice", "diseased", ["sharded-twice"], {"epochs": 1}),
    ("once", "diseased", ["yields-nothing"], {"epochs": 2}),
    ("chatters", "diseased", ["factory-raises"], {}),
    ("sound", "sound", [], {"start_methods": ("fork", "spawn")}),
    ("sound", "sound", [], {"start_methods": ("forkserver",), "epochs": 2}),
    ("ours", "sound", [], {"ranks": 3, "workers": 3}),
    ("sound", "sound", [], {"ranks": 1, "workers": 0}),
    ("ours", "sound", [], {"start_methods": ("fork", "spawn"), "resume_ranks": 3}),
    ("chosen_part", "sound", [], {}),
    ("weighted", "not proven", ["drawn-with-replacement"], {}),
    ("weighted", "sound", [], {"allow": ("replacement",)}),
    ("filled_up", "sound", [], {}),
    ("not_sharded", "diseased", ["not-sharded-by-rank"], {}),
    ("not_sharded", "sound", [], {"allow": ("shared",)}),
    ("uneven", "diseased", ["not-sharded-by-rank"], {}),
    ("padded", "sound", [], {}),
    ("forgotten_set_epoch", "sound", ["same-order-every-epoch"], {}),
    ("sound", "sound", ["same-order-every-epoch"], {"set_epoch": False}),
    ("hidden_noise", "diseased", ["same-randomness-in-workers"], {}),
    ("resumes", "sound", [], {}),
    ("resumes", "diseased", ["resume-repeats"], {"resume_ranks": 1}),
    ("resume_repeats", "diseased", ["resume-repeats"], {}),
    ("memory_grows", "diseased", ["uneven-steps", "memory-grows"], {}),
    ("memory_copied", "sound", ["memory-copied"], {"start_methods": ("spawn",)}),
    ("no_ids", "sound", [], {}),
    ("by_place", "sound", [], {}),
    ("raises", "diseased", ["factory-raises"], {}),
    ("raises_later", "diseased", ["factory-raises"], {}),
    ("unpicklable", "sound", ["factory-raises"], {"start_methods": ("fork", "spawn")}),
    ("yields_nothing", "diseased", ["yields-nothing"], {}),
    ("hangs_in_factory", "diseased", ["hangs"], {"timeout": 20}),
    ("exits", "diseased", ["process-died"], {}),
    ("differs", "diseased", ["differs-between-ranks"], {}),
    ("slow", "diseased", ["uneven-steps", "starved"], {"step_seconds": 0.01, "epochs": 1}),
]


#: Those that every run of the tests covers.
FEW = ("sound", "duplicated_by_workers", "resume_skips", "dies")


@pytest.mark.parametrize(
    ("name", "verdict", "codes", "options"),
    [pytest.param(*each, marks=() if each[0] in FEW else pytest.mark.slow, id=each[0]) for each in ORDINARY],
)
def test_each_disease_is_named(name: str, verdict: str, codes: list[str], options: dict[str, Any]) -> None:
    found = examined(name, **options)
    assert severe(found)[: len(codes) or 1] == codes, str(found)
    assert found.verdict == verdict, str(found)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "verdict", "codes", "options"), WIDE, ids=[each[0] for each in WIDE])
def test_each_disease_is_named_of_many(name: str, verdict: str, codes: list[str], options: dict[str, Any]) -> None:
    start = time.monotonic()
    found = examined(name, **options)
    print(f"{name}: {found.summary}, {time.monotonic() - start:.0f} s")
    assert severe(found)[: len(codes) or 1] == codes, str(found)
    assert found.verdict == verdict, str(found)


def test_a_pipeline_that_hangs_is_ended_and_says_where_it_stood() -> None:
    examined("dies")  # starts the servers
    before = left()
    found = examined("hangs", timeout=5)
    assert severe(found) == ["hangs"]
    assert any("pipelines.py" in line and "in hangs" in line for line in found.findings[0].evidence)
    while not {*left()} <= {*before}:  # killed, and perhaps not ended yet
        time.sleep(0.1)


def test_an_error_in_a_worker_shows_its_last_line_and_what_was_run() -> None:
    found = examined("raises_in_a_worker")
    assert severe(found) == ["factory-raises"]
    evidence = found.findings[0].evidence
    assert "Caught ValueError in DataLoader worker process 0" in evidence[0]
    assert evidence[0].endswith("ValueError: the reason")
    assert found.summary.startswith("diseased. Run: 2 ranks, 2 workers (fork)")
    assert "(" not in found.summary.replace("(fork)", "").replace("(the control)", "")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ArgumentError, match="names no function"):
        examine("nothing")
    with pytest.raises(ArgumentError, match="cannot be imported"):
        examine(f"{PIPELINES}:no_such_function", ranks=1)
    with pytest.raises(ArgumentError, match="cannot import this factory"):
        examine(list)
    for wrong in ({"ranks": 0}, {"workers": -1}, {"epochs": 1.5}, {"timeout": 0}, {"start_methods": ("thread",)}):
        with pytest.raises(ArgumentError):
            examine("a:b", **wrong)  # type: ignore[arg-type]


@pytest.mark.soak
def test_a_doctor_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    code = f"from rankfeed.diagnostics.doctor import examine; examine({str(PIPELINES) + ':hangs'!r})"
    doctor = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 600
    while len(psutil.Process(doctor.pid).children(recursive=True)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(doctor.pid).children(recursive=True)
    os.kill(doctor.pid, signal.SIGKILL)
    doctor.wait()
    gone, left = psutil.wait_procs(family, timeout=60)
    assert len(gone) >= 4
    assert left == []


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000"}, {}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, {}, 1),
        ({}, {"SLURM_CPUS_PER_TASK": "1"}, 1),
        ({"proc/self/cgroup": "nonsense"}, {"SLURM_CPUS_PER_TASK": "many"}, len(os.sched_getaffinity(0))),
        ({}, {}, len(os.sched_getaffinity(0))),
    ],
)  # fmt: skip
def test_cpus_are_those_that_are_given(
    files: dict[str, str], environ: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cpus(environ, tmp_path) == expected
