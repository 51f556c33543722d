"""One launch over two hosts: once on the disk of each, once on what they share, though the builder is killed."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.faults.prepare_job import committed
from tests.launch.slurm import slurm
from tests.support.jobs import until
from tests.support.launchers import LAUNCHERS, need
from tests.support.marks import slow, soak
from tests.support.network import Network, need_network, network, process_of
from tests.support.over_hosts import end, launched

SCRIPT = Path(__file__).parent / "host_job.py"
#: Seconds within which a launch has to end: far more than it takes.
HANG = 60


def hosts_of(out: Path, kind: str) -> Counter[str]:
    """On which hosts something was done."""
    return Counter(path.name.partition("-")[0] for path in out.glob(f"*.{kind}"))


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    need_network()
    (tmp_path / "local").mkdir()
    with network(2, tmp_path / "net", tmp_path / "local") as result:
        yield result


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        ("openmpi", 1),
        *(slow(launcher, 1) for launcher in ("torchrun", "srun")),
        *(soak(launcher, 15) for launcher in LAUNCHERS),
    ],
)
def test_two_hosts_build_once_per_local_disk_and_replace_a_killed_shared_builder(
    launcher: str, count: int, net: Network, tmp_path: Path
) -> None:
    need(launcher)
    with slurm(net=net) if launcher == "srun" else nullcontext(dict(os.environ)) as environ:
        figures = rounds(launcher, count, net, tmp_path, environ)
    print(f"\n{launcher}: {dict(figures)}")


def rounds(launcher: str, count: int, net: Network, folder: Path, environ: dict[str, str]) -> Counter[str]:
    figures: Counter[str] = Counter()
    shared, local = folder / "data", folder / "local" / "data"
    for index in range(count):
        out = folder / f"out{index}"
        (out / "node").mkdir(parents=True)
        figures.update(one_round(launcher, net, environ, out, [str(shared), f"key{index}", str(out)], str(local)))
        assert committed(shared, f"key{index}")
        assert not (folder / ".data.prepare").exists()
    assert not local.exists()  # this host has another disk
    return figures


def one_round(
    launcher: str, net: Network, environ: dict[str, str], out: Path, place: list[str], local: str
) -> dict[str, int]:
    """A launch whose builder is killed; the others finish, or are started again if the launcher ends them."""
    log, goes_on = out / "log", launcher == "srun"
    script = [str(SCRIPT), "prepare", *place]
    with launched(launcher, net, environ, log, [*script, "60", *([local] if goes_on else [])]) as jobs:
        until(lambda: list(out.glob("*.building")), log=log, timeout=HANG)
        process_of(net, next(out.glob("*.building")).name).kill()
        if goes_on:
            assert jobs[0].wait(HANG) != 0
    if not goes_on:
        with launched(launcher, net, environ, log := out / "log2", [*script, "0", local]) as jobs:
            end(jobs, log)
    said, finished = log.read_text(errors="replace"), 3 if goes_on else 4
    built, on_nodes = hosts_of(out, "building").total(), hosts_of(out / "node", "building")
    # mpirun ends the processes of a killed one; until it has, another one may have taken over.
    assert built in ((2,) if goes_on else (2, 3)), said
    assert hosts_of(out, "done").total() >= finished, said
    assert on_nodes == {"h1": 1, "h2": 1}, said
    assert hosts_of(out / "node", "done").total() == finished, said
    return {"rounds": 1, "killed": 1, "shared builds": built, "builds on nodes": on_nodes.total()}
