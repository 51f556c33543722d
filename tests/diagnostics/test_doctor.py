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
from tests.support.marks import slow, soak

from rankfeed.diagnostics.doctor import Examination, examine
from rankfeed.diagnostics.doctor.resources import cpus
from rankfeed.errors import ArgumentError

PIPELINES = Path(__file__).parent / "jobs" / "pipelines.py"

# Whatever hangs is ended by the doctor; a busy machine is slow.
pytestmark = pytest.mark.timeout(1200)


def examined(name: str, **options: Any) -> Examination:
    usual: dict[str, Any] = {"start_methods": ("fork",), "timeout": 120}
    return examine(f"tests.zoo.{name}" if ":" in name else f"{PIPELINES}:{name}", **(usual | options))


def severe(examination: Examination) -> list[str]:
    """Codes of errors and of what is unproven, and of warnings; the number of CPUs is not the loader's doing."""
    return [
        finding.code
        for finding in examination.findings
        if finding.severity != "note" and finding.code != "too-many-workers"
    ]


def left() -> list[psutil.Process]:
    """Processes of any examination: all descendants of this process that have not ended."""
    running = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                running.append(child)
    return running


#: Pipeline of this folder or of the zoo, verdict, the first finding, options. The zoo has a row for each disease.
PIPELINES_AND_VERDICTS: list[Any] = [
    ("of_torch:distributed_sampler", "sound", [], {}),
    ("resume_skips", "diseased", ["resume-skips"], {"epochs": 1}),
    slow("own_workers", "diseased", ["duplicated-by-workers"], {"epochs": 1}),
    slow("persistent_noise", "sound", [], {}),
    soak("of_torch:distributed_sampler", "sound", [], {"start_methods": ("fork", "spawn")}),
    soak("of_torch:distributed_sampler", "sound", [], {"start_methods": ("forkserver",), "epochs": 2}),
    soak("of_torch:distributed_sampler", "sound", [], {"ranks": 1, "workers": 0}),
    soak("of_torch:distributed_sampler", "sound", ["same-order-every-epoch"], {"set_epoch": False}),
    soak("of_torch:no_sampler", "sound", [], {"allow": ("shared",)}),
    soak("of_rankfeed:threads", "sound", [], {"ranks": 3, "workers": 3}),
    soak("of_rankfeed:threads", "sound", [], {"start_methods": ("fork", "spawn"), "resume_ranks": 3}),
    soak("bad:unpicklable", "sound", ["factory-raises"], {"start_methods": ("fork", "spawn")}),
    soak("weighted", "not proven", ["drawn-with-replacement"], {}),
    soak("weighted", "sound", [], {"allow": ("replacement",)}),
    soak("hidden_noise", "diseased", ["same-randomness-in-workers"], {}),
    soak("resumes", "sound", [], {}),
    soak("resumes", "diseased", ["resume-repeats"], {"resume_ranks": 1}),
    soak("no_ids", "sound", [], {}),
]


@pytest.mark.parametrize(("name", "verdict", "codes", "options"), PIPELINES_AND_VERDICTS)
def test_examine_gives_each_example_pipeline_its_expected_verdict_and_findings(
    name: str, verdict: str, codes: list[str], options: dict[str, Any]
) -> None:
    examination = examined(name, **options)
    assert severe(examination)[: len(codes) or 1] == codes, str(examination)
    assert examination.verdict == verdict, str(examination)


def test_the_doctor_ends_a_hanging_pipeline_and_reports_the_file_and_function_where_it_hangs() -> None:
    examined("raises_in_a_worker")  # starts the servers
    before = left()
    examination = examined("hangs", timeout=5)
    assert severe(examination) == ["hangs"]
    assert any("pipelines.py" in line and "in hangs" in line for line in examination.findings[0].evidence)
    while not {*left()} <= {*before}:  # killed, and perhaps not ended yet
        time.sleep(0.1)


def test_an_error_in_a_worker_is_reported_with_its_message_and_the_run_it_occurred_in() -> None:
    examination = examined("raises_in_a_worker")
    assert severe(examination) == ["factory-raises"]
    evidence = examination.findings[0].evidence
    assert "Caught ValueError in DataLoader worker process 0" in evidence[0]
    assert evidence[0].endswith("ValueError: the reason")
    assert examination.summary.startswith("diseased. Run: 2 ranks, 2 workers (fork)")
    assert "(" not in examination.summary.replace("(fork)", "").replace("(the control)", "")


def test_examine_raises_argument_error_for_an_unusable_factory_or_option() -> None:
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
def test_processes_of_the_doctor_end_when_the_doctor_is_killed(tmp_path: Path) -> None:
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
def test_the_number_of_cpus_is_limited_by_the_cgroup_quota_and_slurm_cpus_per_task(
    files: dict[str, str], environ: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cpus(environ, tmp_path) == expected
