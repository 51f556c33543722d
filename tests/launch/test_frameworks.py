"""Launcher x framework x start method x workers: each sample once an epoch, in equal steps and a new order.

Also if a rank is killed in mid-epoch and the job resumes on more or fewer ranks.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs.progress import EPOCHS, RUNS, SAMPLES, VICTIM, WHOLE
from tests.launch.slurm import slurm
from tests.launch.test_topology_launchers import run
from tests.support import jobs
from tests.support.launchers import LAUNCHERS, TORCHRUN, need
from tests.support.marks import soak
from tests.support.network import need_network, network
from tests.support.over_hosts import end, launched
from tests.support.packages import need_package

for package in ("accelerate", "lightning", "torch_geometric", "torchdata", "transformers", "webdataset"):
    need_package(package)

SCRIPT = Path(__file__).parent / "jobs" / "frameworks.py"
FRAMEWORKS = [
    *("loader", "batch_sampler", "sampler", "stateful", "ddp", "fsdp", "lightning", "accelerate"),
    *("transformers", "pyg", "pyg_seeds", "webdataset"),
]
#: How workers are started, and how many there are.
WAYS = ["fork:0", "fork:2", "spawn:2", "forkserver:2"]
ALL = [f"{framework}:{way}" for framework in FRAMEWORKS for way in WAYS]
#: What can do without a process group: then its rank is found by what the launcher says.
NO_GROUP = ["loader", "batch_sampler", "sampler", "stateful", "pyg", "pyg_seeds", "webdataset"]
pytestmark = pytest.mark.timeout(3600)


def launch(launcher: str, ranks: int, out: Path, cells: Sequence[str], timeout: float, *more: str) -> None:
    """Run the script on this number of ranks."""
    if launcher != "ray":
        need(launcher)
    port = jobs.free_port()
    script = [str(SCRIPT), str(out), f"127.0.0.1:{port}", *cells, *more]
    if launcher == "torchrun":
        run([*TORCHRUN, f"--nproc-per-node={ranks}", f"--master-port={port}", *script], timeout=timeout)
    elif launcher == "ray":
        run([sys.executable, str(SCRIPT.with_name("under_ray.py")), str(ranks), *script], timeout=timeout)
    elif launcher == "srun":
        with slurm(nodes=ranks, cpus=4) as environ:  # a node for each rank, as Slurm sees it
            place = [f"--nodes={ranks}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
            run(["srun", *place, sys.executable, *script], environ, timeout)
    else:
        run([*LAUNCHERS[launcher], "-n", str(ranks), sys.executable, *script], timeout=timeout)


def shards(out: Path, cells: Sequence[str]) -> None:
    """The samples as tar shards, of which no two are of one size, if a cell wants them."""
    if not any(cell.startswith("webdataset") for cell in cells):
        return
    from webdataset import TarWriter

    (out / "shards").mkdir(parents=True)
    ids = iter(range(SAMPLES))
    for size in (3, 5, 7, 10, 25):
        with TarWriter(str(out / "shards" / f"{size:02d}.tar")) as writer:
            for each in islice(ids, size):
                writer.write({"__key__": f"{each:03d}", "cls": each})


Step = tuple[int, int, list[int]]


def ledgers(out: Path, cell: str, name: str, ranks: int) -> tuple[dict[str, Any], list[list[Step]]]:
    """What all ranks told alike, and the (step, epoch, ids) of each."""
    folder = out / cell.replace(":", "-") / name
    told: list[dict[str, Any]] = []
    given: list[list[Step]] = []
    for rank in range(ranks):
        lines = [json.loads(line) for line in (folder / f"{rank}-of-{ranks}.jsonl").read_text().splitlines()]
        told.append({name: value for line in lines if isinstance(line, dict) for name, value in line.items()})
        given.append([tuple(line) for line in lines if isinstance(line, list)])
    assert told == told[:1] * ranks, cell
    return told[0], given


def samples(steps: Iterable[Step]) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample_id) for _, epoch, ids in steps for sample_id in ids)


ONCE = Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))


def check(out: Path, cell: str, ranks: int, launcher: str) -> None:
    told, given = ledgers(out, cell, WHOLE, ranks)
    for steps in given:
        assert [step[:2] for step in steps] == [step[:2] for step in given[0]], cell
    assert samples(chain.from_iterable(given)) == ONCE, cell
    first, second = ([ids for _, epoch, ids in given[0] if epoch == index] for index in range(EPOCHS))
    assert first != second, f"{cell}: the same order twice"
    check_found(told, cell, launcher)


def check_found(told: dict[str, Any], cell: str, launcher: str) -> None:
    """Where there was no process group, the launcher's own variables said which rank it is."""
    if cell.endswith(":launcher"):
        assert told["launcher"] == {"srun": "slurm"}.get(launcher, launcher), cell


def check_killed(out: Path, cell: str, launcher: str) -> None:
    told, given = zip(*(ledgers(out, cell, name, ranks) for name, ranks, _ in RUNS), strict=True)
    for (_, _, kill), of_ranks in zip(RUNS, given, strict=True):
        assert kill in (0, of_ranks[VICTIM][-1][0]), f"{cell}: not killed where it should be"
    begins = [of_run["step"] for of_run in told]
    assert begins == [0, 4, 10], f"{cell}: the last checkpoint but one step before each kill"
    ends = [*begins[1:], max(steps[-1][0] for steps in given[-1])]
    counted: list[Step] = []
    # Each run counts from where it began to where the next one did; the last to its end.
    for begin, last, of_ranks in zip(begins, ends, given, strict=True):
        for steps in of_ranks:
            mine = [step for step in steps if step[0] <= last]
            assert [step for step, *_ in mine] == list(range(begin + 1, last + 1)), f"{cell}: steps are not equal"
            counted += mine
    assert samples(counted) == ONCE, cell
    for of_run in told:
        check_found(of_run, cell, launcher)


def check_all_killed(launcher: str, cells: Sequence[str], out: Path, timeout: float) -> None:
    shards(out, cells)
    ends = []
    for name, ranks, kill in RUNS:
        with pytest.raises(AssertionError) if kill else nullcontext() as said:
            launch(launcher, ranks, out, cells, timeout, "--name", name, "--kill", str(kill))
        ends.append(f"{name}: {said.value if said else 'well'}")
    for cell in cells:
        try:
            check_killed(out, cell, launcher)
        except (AssertionError, FileNotFoundError) as error:
            error.add_note("\n".join(ends))
            raise


def rotated(launcher: str, frameworks: Sequence[str]) -> list[str]:
    """Each framework in one way to start workers, in another under each launcher."""
    first = list(LAUNCHERS).index(launcher)
    return [f"{framework}:{WAYS[(first + number) % len(WAYS)]}" for number, framework in enumerate(frameworks)]


def by_launcher(launcher: str) -> list[str]:
    """Cells without a process group: before the others, which make one for the rest of a launch."""
    return [f"{cell}:launcher" for cell in rotated(launcher, NO_GROUP)]


def check_all(launcher: str, ranks: int, cells: Sequence[str], out: Path, timeout: float) -> None:
    shards(out, cells)
    launch(launcher, ranks, out, cells, timeout)
    for cell in cells:
        check(out, cell, ranks, launcher)


@pytest.mark.slow
def test_frameworks_under_slurm_deliver_each_sample_once_per_epoch(tmp_path: Path) -> None:
    """Of each framework, tests/integrations has a case under torchrun; the soak below has all launchers."""
    cells = rotated("srun", FRAMEWORKS)
    few = [cells[0], *cells[FRAMEWORKS.index("lightning") : FRAMEWORKS.index("pyg")]]
    check_all("srun", 2, few, tmp_path, 400)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", *map(soak, ("srun", "openmpi", "mpich"))])
def test_loaders_on_two_hosts_deliver_each_sample_once_per_epoch(launcher: str, tmp_path: Path) -> None:
    need_network()
    need(launcher)
    out, log, cells = tmp_path / "out", tmp_path / "log", ["loader:fork:2", "accelerate:fork:0"]
    with (
        network(2, tmp_path / "net") as net,
        slurm(net=net) if launcher == "srun" else nullcontext(dict(os.environ)) as environ,
    ):
        script = [str(SCRIPT), str(out), f"{net.hosts[0].address}:29511", *cells]
        with launched(launcher, net, environ, log, script) as started:
            end(started, log, 300)
    for cell in cells:
        check(out, cell, 4, launcher)


@pytest.mark.slow
def test_framework_loops_lose_and_repeat_no_sample_if_a_rank_is_killed_and_the_job_resumes(tmp_path: Path) -> None:
    """On 2 ranks, on 3, and on 2 again; the soak below has all frameworks and launchers."""
    cells = ["accelerate:fork:2", "pyg_seeds:fork:2", "lightning:fork:0", "transformers:fork:0"]
    check_all_killed("torchrun", cells, tmp_path, 400)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_framework_and_start_method_delivers_each_sample_once_under_each_launcher(
    launcher: str, ranks: int, tmp_path: Path
) -> None:
    cells = [*by_launcher(launcher), *ALL]
    check_all(launcher, ranks, cells, tmp_path, 3000)
    print(f"{launcher}, {ranks} ranks: {len(cells)} cells")


@pytest.mark.soak
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_framework_loses_and_repeats_no_sample_after_kills_under_each_launcher(
    launcher: str, tmp_path: Path
) -> None:
    # Another framework's rank is killed itself under each launcher, and a fork of it elsewhere.
    themselves = {"torchrun": "lightning", "openmpi": "accelerate", "mpich": "transformers", "srun": "fsdp"}
    cells = [*by_launcher(launcher), *rotated(launcher, FRAMEWORKS)]
    cells.sort(key=lambda cell: cell.startswith(themselves[launcher]))
    check_all_killed(launcher, cells, tmp_path, 3000)
    print(f"{launcher}: {len(cells)} cells killed on 2 ranks, killed on 3, ended on 2: nothing lost or repeated")


@pytest.mark.soak
@pytest.mark.parametrize("cell", ["loader:fork:2", "ddp:fork:0", "fsdp:fork:0", "stateful:fork:2"])
def test_ray_train_jobs_resumed_on_other_numbers_of_workers_after_kills_lose_and_repeat_no_sample(
    cell: str, tmp_path: Path
) -> None:
    need_package("ray")
    check_all_killed("ray", [cell], tmp_path, 300)
    print(f"Ray Train, {cell}: killed on 2 workers, killed on 3, ended on 2: nothing lost or repeated")
