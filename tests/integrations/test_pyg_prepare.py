"""PyG data sets under MPI: downloaded and processed once, right on every rank, whoever was killed before."""

import json
import os
import random
import time
from collections import Counter
from contextlib import suppress
from itertools import product
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
ENVIRON = dict(os.environ)
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


def killed(kind: str, root: Path, out: Path, chance: random.Random) -> Counter[str]:
    """A launch of four ranks that loses one of them, the one that writes if there is one by then."""
    with launched(
        command_of("openmpi", RANKS, [str(out), str(COUNT), kind, str(root)], SCRIPT), ENVIRON, out / "log"
    ) as job:
        deadline = time.monotonic() + HANG
        while len(started := list(out.glob("*.started"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.4))
        builders = list(root.glob(".*.prepare/build-*"))
        victim = int(builders[0].name.split("-")[-3]) if builders else int(chance.choice(started).stem)
        with suppress(psutil.NoSuchProcess):
            psutil.Process(victim).kill()
        job.wait(HANG)
    return Counter(killed=1, builders=bool(builders))


def rounds(count: int, folder: Path, seed: int) -> dict[str, Counter[str]]:
    """Rounds of each kind of data set, with its raw files there and not.

    In every other one a rank of a launch is killed. In the end four ranks want all these data sets, one after the
    other, and find what was left.
    """
    need("mpirun.openmpi")
    figures: dict[str, Counter[str]] = {}
    cases: list[tuple[str, str, Path]] = []
    for kind, raw in product(KINDS, (False, True)):
        name = f"{kind}, raw files {'present' if raw else 'absent'}"
        figures[name] = Counter()
        chance = random.Random(f"{name} {seed}")
        for number in range(count):
            root, out = folder / f"{kind}{raw}{number}", folder / f"{kind}{raw}{number}.out"
            root.mkdir()
            out.mkdir()
            if raw:
                raw_files(root)
            if number % 2 == 0:
                figures[name] += killed(kind, root, out, chance)
            cases.append((name, kind, root))
    out = folder / "out"
    out.mkdir()
    wanted = [text for _, kind, root in cases for text in (kind, str(root))]
    with launched(
        command_of("openmpi", RANKS, [str(out), str(COUNT), *wanted], SCRIPT), ENVIRON, out / "log"
    ) as job:
        assert job.wait(HANG + 5 * len(cases)) == 0, (out / "log").read_text(errors="replace")
    told = [json.loads(path.read_text()) for path in out.glob("*.done")]
    assert len(told) == RANKS
    for number, (name, _, root) in enumerate(cases):
        figures[name]["ranks right"] += sum(each[number] for each in told)
        figures[name]["downloads"] += (folder_of(root) / "downloaded-by").exists()
        assert not list(root.glob(".*")), "something is left over"
    return figures


def check(figures: dict[str, Counter[str]], count: int) -> None:
    for name, each in figures.items():
        print(f"\n{name}: {dict(each)}")
        assert each["ranks right"] == count * RANKS
        assert each["downloads"] == (0 if "present" in name else count)


@pytest.mark.timeout(900)
def test_four_mpi_ranks_get_right_data_whoever_was_killed(tmp_path: Path) -> None:
    check(rounds(2, tmp_path, fresh_seed()), 2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_fifty_rounds_of_four_mpi_ranks(tmp_path: Path) -> None:
    check(rounds(50, tmp_path, 1), 50)
