"""The processes of a launch exchange reports through files: all of them get the same list."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rankfeed.diagnostics.roster import RosterRecord, exchange_reports, roster_directory
from rankfeed.errors import TopologyError
from rankfeed.storage.commit import write_record
from rankfeed.topology import Topology
from rankfeed.topology.agreement import ProcessReport


def report(rank: int, world_size: int, pid: int = 0) -> ProcessReport:
    return ProcessReport("host", pid or 100 + rank, Topology(rank=rank, world_size=world_size))


def exchange(directory: Path, reports: list[ProcessReport], timeout: float = 20) -> list[list[ProcessReport]]:
    with ThreadPoolExecutor(len(reports)) as threads:
        return list(threads.map(lambda own: exchange_reports(directory, own, timeout), reports))


def test_exchange_reports_gives_all_ranks_all_reports_in_rank_order_and_leaves_no_file(tmp_path: Path) -> None:
    reports = [report(rank, 4) for rank in range(4)]
    assert exchange(tmp_path / "roster", reports[::-1]) == [reports] * 4
    assert list(tmp_path.iterdir()) == []


def test_exchange_reports_ignores_files_of_an_earlier_launch_and_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "roster").mkdir()
    old = [report(rank, 3, pid=7) for rank in range(3)]
    write_record(tmp_path / "roster" / "old.json", RosterRecord(["old"], [old[0]]))
    write_record(tmp_path / "roster" / "gone.reply", RosterRecord(["old", "gone"], old))
    (tmp_path / "roster" / "damaged.json").write_text("{")
    reports = [report(rank, 2) for rank in range(2)]
    assert exchange(tmp_path / "roster", reports) == [reports] * 2


def test_two_processes_of_rank_0_both_get_the_list_with_both_reports(tmp_path: Path) -> None:
    reports = [report(0, 2, pid=1), report(0, 2, pid=2)]
    assert exchange(tmp_path / "roster", reports) == [reports] * 2


def test_if_a_rank_does_not_report_the_others_get_the_list_without_it(tmp_path: Path) -> None:
    reports = [report(0, 3), report(1, 3)]
    assert exchange(tmp_path / "roster", reports, timeout=3) == [reports] * 2


def test_if_rank_0_does_not_report_the_others_raise_topology_error_with_the_absent_ranks(tmp_path: Path) -> None:
    failed: list[str] = []

    def run(rank: int) -> None:
        with pytest.raises(TopologyError) as caught:
            exchange_reports(tmp_path / "roster", report(rank, 4), 1.5)
        failed.append(str(caught.value))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 2
    assert all("rank 0 did not report within 2 s" in text for text in failed)
    assert all("without ranks 0, 3" in text for text in failed)


def test_the_roster_directory_of_a_launch_has_the_same_name_in_all_versions() -> None:
    assert roster_directory("SLURM_JOB_ID=7 SLURM_STEP_ID=0") == ".rankfeed-topology-f87acd14"
