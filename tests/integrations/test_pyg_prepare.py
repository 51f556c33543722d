"""PyG data sets under MPI: downloaded and processed once, right on every rank, whoever was killed before."""

import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.test_prepared_once import command_of, launched
from tests.integrations.jobs.pyg_prepare import KINDS, RAW, InMemory, right
from tests.launch.test_topology_launchers import need
from tests.support.seeds import fresh_seed

from rankfeed.errors import ArgumentError, PrepareError
from rankfeed.integrations.pyg import prepare

SCRIPT = Path(__file__).parent / "jobs" / "pyg_prepare.py"
COUNT, RANKS = 40, 4
#: Seconds after which a launch is taken to hang: four ranks import PyG at once, on whatever machine.
HANG = 200


def raw_files(root: Path) -> None:
    (root / "raw").mkdir(parents=True)
    for number in range(RAW):
        (root / "raw" / f"{number}.txt").write_text("".join(f"{each}\n" for each in range(COUNT)))


def folder_of(root: Path) -> Path:
    (found,) = [path for path in root.iterdir() if "-" in path.name and not path.name.startswith(".")]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["cut", "gone", "half of upstream"])
def test_what_is_not_whole_is_built_again(kind: str, harm: str, tmp_path: Path) -> None:
    if harm == "half of upstream":
        raw_files(tmp_path)
        (tmp_path / "processed").mkdir()
        for name in ("data.pt", "sqlite.db"):
            (tmp_path / "processed" / name).write_bytes(b"half")
    else:
        assert right(prepare(KINDS[kind], tmp_path, COUNT), COUNT)
        made = folder_of(tmp_path) / "processed"
        file = next(path for path in made.iterdir() if path.suffix in (".pt", ".db"))
        if harm == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
    dataset = prepare(KINDS[kind], tmp_path, COUNT)
    assert right(dataset, COUNT)


def test_raw_files_of_the_user_are_used_left_alone_and_looked_at_for_changes(tmp_path: Path) -> None:
    raw_files(tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()}
    assert right(prepare(InMemory, tmp_path, COUNT), COUNT)
    assert not (folder_of(tmp_path) / "downloaded-by").exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()} == before
    (tmp_path / "raw" / "0.txt").write_text("changed")
    with pytest.raises(PrepareError, match="half a download"):
        prepare(InMemory, tmp_path, COUNT)


def test_a_download_that_completes_the_user_s_files_leaves_them_alone(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "0.txt").write_text("mine")
    assert right(prepare(InMemory, tmp_path, 3), 3)
    assert (tmp_path / "raw" / "0.txt").read_text() == "mine"
    assert os.listdir(tmp_path / "raw") == ["0.txt"]


def test_other_arguments_are_another_data_set_and_transforms_are_not(tmp_path: Path) -> None:
    for count in (3, 5, 3):
        assert right(prepare(InMemory, tmp_path, count), count)
        assert len(prepare(InMemory, tmp_path, count, transform=lambda data: data)) == count
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) == 2


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no PyG data set"):
        prepare("Cora", tmp_path)  # type: ignore[arg-type]


def rounds(kind: str, raw: bool, count: int, folder: Path, seed: int, launcher: str = "openmpi") -> Counter[str]:
    """Launches of four ranks on new folders. Of every other one a rank is killed; the next finds its remains."""
    need("mpirun.openmpi")
    chance = random.Random(f"{kind} {raw} {seed}")
    figures: Counter[str] = Counter()
    for number in range(count):
        root, out = folder / f"{kind}{raw}{number}", folder / f"{kind}{raw}{number}.out"
        root.mkdir()
        out.mkdir()
        if raw:
            raw_files(root)
        command = command_of(launcher, RANKS, [str(root), kind, str(COUNT), str(out)], SCRIPT)
        if number % 2 == 0:
            with launched(command, dict(os.environ), out / "log1") as job:
                deadline = time.monotonic() + HANG
                while len(started := list(out.glob("*.started"))) < RANKS and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.4))
                builders = list(root.glob(".*.prepare/build-*"))
                victim = int(builders[0].name.split("-")[-3]) if builders else int(chance.choice(started).stem)
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(victim).kill()
                    figures["killed"] += 1
                    figures["builders killed"] += bool(builders)
                job.wait(HANG)
            for path in out.glob("*.done"):
                path.unlink()
        with launched(command, dict(os.environ), out / "log2") as job:
            assert job.wait(HANG) == 0, (out / "log2").read_text(errors="replace")
        told = [json.loads(path.read_text()) for path in out.glob("*.done")]
        figures["ranks right"] += sum(told)
        figures["ranks"] += RANKS
        figures["downloads"] += (folder_of(root) / "downloaded-by").exists()
        assert told == [True] * RANKS, told
        assert not list(root.glob(".*")), "something is left over"
    return figures


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_four_mpi_ranks_get_right_data_whoever_was_killed(kind: str, tmp_path: Path) -> None:
    for raw in (False, True):
        figures = rounds(kind, raw, 2, tmp_path, fresh_seed())
        print(f"\n{kind}, raw files {'present' if raw else 'absent'}: {dict(figures)}")
        assert figures["downloads"] == (0 if raw else 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw", [False, True])
def test_fifty_rounds_of_four_mpi_ranks(kind: str, raw: bool, tmp_path: Path) -> None:
    figures = rounds(kind, raw, 50, tmp_path, 1)
    print(f"\n{kind}, raw files {'present' if raw else 'absent'}: {dict(figures)}")
    assert figures["ranks right"] == 50 * RANKS
