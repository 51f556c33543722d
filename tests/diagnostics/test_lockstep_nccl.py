"""Under NCCL, where calls return at once and ranks wait in CUDA, all ranks end and name the rank at fault.

Needs one GPU; the ranks share it.
"""

from pathlib import Path

import pytest
import torch
from tests.diagnostics.test_lockstep import check, played, quiet

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]
#: Seconds after the limit until all ranks have ended.
LATEST = 5.0


@pytest.fixture(autouse=True)
def under_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BACKEND", "nccl")


def test_under_nccl_lockstep_names_the_failed_rank_on_all_other_ranks_in_time(tmp_path: Path) -> None:
    rounds = [
        "raise,1,6,2,4,with",
        "loader,1,6,2,4,with",
        "short,1,6,2,4,with",
        "sleep,1,6,2,4,with",
        "sleep,0,6,3,4,with",
        "slow,1,6,2,4,with",
        "evaluation,1,6,2,4,evaluation",
        "kill,1,10,3,4,with",
        "kill,0,10,2,4,with",
        "stop,1,10,2,4,with",
        "os._exit,1,10,2,4,with",
        "sys.exit,1,10,2,4,with",
        "never,1,6,2,4,with",
        "sleep,1,6,2,4,bare",
    ]
    played(tmp_path, 60, *rounds, at_once=4)
    late = {spec: seconds for spec in rounds if (seconds := check(tmp_path, spec)) > LATEST}
    assert not late


def test_under_nccl_lockstep_is_silent_in_healthy_jobs(tmp_path: Path) -> None:
    rounds = [
        "healthy,0,8,2,3,common pauses",
        "healthy,1,8,3,3,long evaluation",
        "healthy,2,8,2,3,checkpoints",
        "healthy,3,8,2,3,accumulation",
        "healthy,4,8,3,3,groups",
        "healthy,5,8,2,3,background",
        "healthy,6,8,2,3,native pauses",
        "healthy,7,8,2,3,early end",
    ]
    played(tmp_path, 120, *rounds, at_once=4)
    for spec in rounds:
        quiet(tmp_path, spec)
