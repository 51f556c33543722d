"""Ranks without a launcher's name of their launch agree on one, so that ledgers of launches are told apart."""

from pathlib import Path

import pytest
from tests.support import jobs

from rankfeed.diagnostics import verify_run

SCRIPT = Path(__file__).parent / "jobs" / "grouped.py"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ranks_of_a_process_group_agree_on_a_name_for_their_launch(tmp_path: Path) -> None:
    """Two torchrun jobs with the same --rdzv-id are recorded in the ledgers as two launches."""
    for index in range(2):
        command = jobs.torchrun(2, SCRIPT, tmp_path / "ledger")
        command[3:3] = ["--rdzv-id", "same"]
        jobs.run(command, tmp_path / f"log{index}", 250)
    (told,) = verify_run(tmp_path / "ledger").loaders
    assert [(launch["ranks"], launch["ledgers"]) for launch in told.launches] == [(2, 2), (2, 2)]
    assert len({launch["name"] for launch in told.launches}) == 2
    assert (told.again, told.missing) == (100, 0)
