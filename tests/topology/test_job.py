"""Identifiers of launches and jobs, from the variables of each launcher."""

import os
from collections.abc import Callable
from functools import partial

import pytest

from rankfeed.topology import job

AGENT = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "0"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "5000"}


def in_environ(function: Callable[[], str], environ: dict[str, str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", environ)
        return function()


job_id = partial(in_environ, job.job_id)
launch_id = partial(in_environ, job.launch_id)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (STEP, "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_RESTART_COUNT="),
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"OMPI_MCA_ess_base_jobid": "9", "RANK": "0"}, "OMPI_MCA_ess_base_jobid=9"),
        ({"LOCAL_RANK": "1", **ADDRESS}, "MASTER_ADDR=node1 MASTER_PORT=5000 "),  # Lightning's own
        ({**AGENT, "WORLD_SIZE": "16", **ADDRESS}, "MASTER_ADDR=node1 MASTER_PORT=5000 0"),
        ({**AGENT, "TORCHELASTIC_RUN_ID": "r1"}, "TORCHELASTIC_RUN_ID=r1 0"),
        ({**STEP, **AGENT, "TORCHELASTIC_RUN_ID": "r1"}, "TORCHELASTIC_RUN_ID=r1 0"),
        ({"RANK": "1", "WORLD_SIZE": "8", **ADDRESS}, "MASTER_ADDR=node1 MASTER_PORT=5000 "),
        ({"HOME": "/root"}, ""),
    ],
)
def test_launch_id_is_built_from_the_variables_of_the_launcher(environ: dict[str, str], expected: str) -> None:
    assert launch_id(environ) == expected


@pytest.mark.parametrize("environ", [{"PMI_RANK": "0"}, {**AGENT, "WORLD_SIZE": "8"}])
def test_launch_id_is_the_parent_process_if_the_launcher_sets_no_identifier(environ: dict[str, str]) -> None:
    assert launch_id(environ).startswith("parent ")
    assert job_id(environ).startswith("on ")


def test_job_id_is_the_launch_id_or_the_master_address_and_port() -> None:
    assert job_id(STEP) == launch_id(STEP)
    assert job_id({"PMI_RANK": "0", **ADDRESS}) == "node1:5000"
    assert job_id({}) == ""


def test_is_same_job_is_none_for_parent_processes_on_different_hosts() -> None:
    assert [job.is_same_job("a:1", other) for other in ("a:1", "a:2", "")] == [True, False, None]
    assert job.is_same_job("on host1 parent 5", "on host2 parent 5") is None
    assert job.is_same_job("on host1 parent 5", "on host1 parent 6") is False
