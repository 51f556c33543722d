"""The doctor on small pipelines, sound and broken, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankfeed.diagnostics.doctor import Examination, examine
from rankfeed.diagnostics.doctor.cpus import cpus
from rankfeed.diagnostics.doctor.probes import Probes
from rankfeed.errors import ArgumentError

PIPELINES = Path(__file__).parent / "jobs" / "pipelines.py"

# Whatever hangs is ended by the doctor; a busy machine is slow.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def probes() -> Iterator[Probes]:
    """One for all tests: torch is imported once."""
    with Probes() as running:
        yield running


def examined(name: str, probes: Probes, **options: Any) -> Examination:
    usual: dict[str, Any] = {"start_methods": ("fork",), "timeout": 120}
    return examine(f"{PIPELINES}:{name}", probes=probes, **(usual | options))


def grave(found: Examination) -> list[str]:
    """Codes of errors and warnings; how many CPUs there are is not the pipeline's doing."""
    return [each.code for each in found.findings if each.severity != "note" and each.code != "too-many-workers"]


def started_by(probes: Probes) -> list[psutil.Process]:
    mark = probes._mark.encode()
    left = []
    for process in psutil.process_iter():
        try:
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                left.append(process)
        except OSError:
            continue
    return [each for each in left if each.pid != probes._nursery.pid and each.status() != psutil.STATUS_ZOMBIE]


#: Pipeline, what is wrong with it, options.
ORDINARY: list[tuple[str, list[str], dict[str, Any]]] = [
    ("sound", [], {}),
    ("sound_stream", [], {"epochs": 2}),
    ("duplicated_by_workers", ["duplicated-by-workers"], {"epochs": 1}),
    ("sharded_twice", ["sharded-twice"], {"epochs": 1}),
    ("same_noise", ["same-randomness-in-workers"], {"epochs": 1}),
    ("handles_before_fork", ["handles-before-fork"], {"epochs": 1}),
    ("resume_skips", ["resume-skips"], {"epochs": 1}),
    ("once", ["yields-nothing"], {"epochs": 2}),
    ("never_ends", ["never-ends"], {"max_steps": 50, "epochs": 1}),
    ("chatters", ["factory-raises"], {}),
    ("dies", ["process-died"], {}),
]
WIDE: list[tuple[str, list[str], dict[str, Any]]] = [
    ("sound", [], {"start_methods": ("fork", "spawn")}),
    ("sound", [], {"start_methods": ("forkserver",), "epochs": 2}),
    ("sound_stream", [], {"ranks": 3, "workers": 3}),
    ("sound_stream", ["uneven-steps"], {"ranks": 5, "workers": 0}),
    ("ours", [], {"ranks": 3, "workers": 3}),
    ("sound", [], {"ranks": 1, "workers": 0}),
    ("ours", [], {"start_methods": ("fork", "spawn"), "resume_ranks": 3}),
    ("chosen_part", [], {}),
    ("weighted", [], {}),
    ("filled_up", [], {}),
    ("not_sharded", ["not-sharded-by-rank"], {}),
    ("uneven", ["uneven-steps"], {}),
    ("padded", ["padded-with-repeats"], {}),
    ("forgotten_set_epoch", ["same-order-every-epoch"], {}),
    ("sound", ["same-order-every-epoch"], {"set_epoch": False}),
    ("hidden_noise", ["same-randomness-in-workers"], {}),
    ("resumes", [], {}),
    ("resumes", ["resume-repeats"], {"resume_ranks": 1}),
    ("resume_repeats", ["resume-repeats"], {}),
    ("memory_grows", ["memory-grows"], {}),
    ("memory_copied", ["memory-copied"], {"start_methods": ("spawn",)}),
    ("no_ids", [], {}),
    ("by_place", [], {}),
    ("raises", ["factory-raises"], {}),
    ("raises_later", ["factory-raises"], {}),
    ("unpicklable", ["factory-raises"], {"start_methods": ("fork", "spawn")}),
    ("yields_nothing", ["yields-nothing"], {}),
    ("hangs_in_factory", ["hangs"], {"timeout": 20}),
    ("exits", ["process-died"], {}),
    ("differs", ["differs-between-ranks"], {}),
    ("slow", ["starved"], {"step_seconds": 0.01}),
]


#: Those that every run of the tests covers.
FEW = ("sound", "duplicated_by_workers", "resume_skips", "dies")


@pytest.mark.parametrize(
    ("name", "expected", "options"),
    [pytest.param(*each, marks=() if each[0] in FEW else pytest.mark.slow, id=each[0]) for each in ORDINARY],
)
def test_each_disease_is_named(name: str, expected: list[str], options: dict[str, Any], probes: Probes) -> None:
    found = examined(name, probes, **options)
    assert grave(found)[:1] == expected, str(found)
    assert found.ok == all(each.severity != "error" for each in found.findings)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "expected", "options"), WIDE, ids=[each[0] for each in WIDE])
def test_each_disease_is_named_of_many(
    name: str, expected: list[str], options: dict[str, Any], probes: Probes
) -> None:
    start = time.monotonic()
    found = examined(name, probes, **options)
    print(f"{name}: {', '.join(grave(found)) or 'sound'}, {time.monotonic() - start:.0f} s")
    assert grave(found)[:1] == expected, str(found)


def test_a_pipeline_that_hangs_is_ended_and_says_where_it_stood(probes: Probes) -> None:
    found = examined("hangs", probes, timeout=5)
    assert grave(found) == ["hangs"]
    assert any("pipelines.py" in line and "in hangs" in line for line in found.findings[0].evidence)
    assert started_by(probes) == []


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ArgumentError, match="names no function"):
        examine("nothing")
    with pytest.raises(ArgumentError, match="cannot import this factory"):
        examine(list)
    for wrong in ({"ranks": 0}, {"workers": -1}, {"epochs": 1.5}, {"timeout": 0}, {"start_methods": ("thread",)}):
        with pytest.raises(ArgumentError):
            examine("a:b", **wrong)  # type: ignore[arg-type]


@pytest.mark.soak
def test_a_doctor_that_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    code = f"from rankfeed.diagnostics.doctor import examine; examine({str(PIPELINES) + ':hangs'!r})"
    doctor = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 600
    while len(psutil.Process(doctor.pid).children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(doctor.pid).children(recursive=True)
    os.kill(doctor.pid, signal.SIGKILL)
    doctor.wait()
    gone, left = psutil.wait_procs(family, timeout=60)
    assert len(gone) >= 3
    assert left == []
    assert [*tmp_path.glob("rankfeed-doctor-*")] == []


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000"}, {}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, {}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/j\n0::/\n", "sys/fs/cgroup/cpu/j/cpu.cfs_quota_us": "100000",
          "sys/fs/cgroup/cpu/j/cpu.cfs_period_us": "100000"}, {}, 1),
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
