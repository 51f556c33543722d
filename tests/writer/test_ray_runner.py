"""Writing on Ray: the bytes of a local write, though workers, nodes and drivers die."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tests.support.jobs import ENVIRON, run_python, started, until
from tests.support.marks import soak
from tests.support.values import contents

import rankfeed as rf
from rankfeed.errors import MissingExtraError, WriteError
from rankfeed.writer.runners import ray as ray_runner

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A node of two cores."""
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    context = ray.init(num_cpus=2, object_store_memory=80_000_000, **quiet)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> rf.Source:
    rows = ({"id": i, "x": np.full(i % 7, i), "text": f"row {i}"} for i in range(2000))
    return rf.write(rows, tmp_path_factory.mktemp("ray") / "source", shard_bytes=20_000, progress=False)


def twice(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


@pytest.mark.parametrize(
    "arguments", [{"order": "shuffled", "seed": 2}, soak({}), soak({"map": twice}), soak({"workers": 1})]
)
def test_a_write_on_ray_has_the_bytes_of_a_local_write_and_can_be_repeated(
    arguments: dict[str, Any], cluster: str, source: rf.Source, tmp_path: Path
) -> None:
    on_ray = rf.write(source, tmp_path / "ray", runner="ray", shard_bytes=9000, progress=False, **arguments)
    rf.write(source, tmp_path / "local", shard_bytes=9000, progress=False, **{**arguments, "workers": 0})
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    if "map" not in arguments:
        assert Counter(int(sample["id"]) for sample in on_ray) == Counter(range(2000))
    assert rf.write(source, tmp_path / "ray", runner="ray", shard_bytes=9000, progress=False, **arguments)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_an_append_on_ray_has_the_bytes_of_a_local_append(cluster: str, source: rf.Source, tmp_path: Path) -> None:
    for runner in ("local", "ray"):
        rf.write(source, tmp_path / runner, shard_bytes=9000, workers=0, progress=False)
        more = source.select(range(500, 900))
        arguments: dict[str, Any] = {"runner": runner, "append": True, "shard_bytes": 2000, "progress": False}
        packed = rf.write(more, tmp_path / runner, **arguments)
        assert Counter(int(sample["id"]) for sample in packed) == Counter([*range(2000), *range(500, 900)])
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def deadly(marker: Path | None = None) -> Any:
    """A function that kills its worker: once if there is a marker for it, which says so, else always."""

    def kills(sample: dict[str, Any]) -> dict[str, Any]:
        is_due = sample["id"] == 1100 and not (marker and marker.exists())
        if is_due and "ray::" in " ".join(psutil.Process().cmdline()):
            if marker:
                marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": sample["id"]}

    return kills


def test_a_write_on_ray_replaces_a_worker_that_is_killed(cluster: str, source: rf.Source, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    options: dict[str, Any] = {"map": deadly(marker), "shard_bytes": 900, "progress": False}
    written = rf.write(source, tmp_path / "ray", runner="ray", **options)
    assert marker.exists()
    assert [int(sample["id"]) for sample in written] == list(range(2000))
    rf.write(source, tmp_path / "local", workers=0, **options)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


@pytest.mark.soak
def test_a_write_on_ray_whose_workers_always_crash_raises_and_a_local_write_resumes(
    cluster: str, source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runner, "_RETRIES", 1)
    options: dict[str, Any] = {"map": deadly(), "shard_bytes": 900, "progress": False}
    with pytest.raises(WriteError, match=r"(?s)failed repeatedly: its workers crashed.*task \d+.*fewer workers"):
        rf.write(source, tmp_path / "p", runner="ray", **options)
    assert len(rf.write(source, tmp_path / "p", workers=0, **options)) == 2000


@pytest.mark.soak
def test_a_map_that_fails_or_cannot_be_pickled_on_ray_raises(
    cluster: str, source: rf.Source, tmp_path: Path
) -> None:
    def wrong(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == 1234:
            raise ValueError("the user's own")
        return sample

    with pytest.raises(WriteError, match=r"(?s)map raised.*the user's own.*sample 1234") as caught:
        rf.write(source, tmp_path / "p", runner="ray", map=wrong, shard_bytes=900, progress=False)
    assert type(caught.value) is WriteError
    handle = (tmp_path / "open").open("w")
    with handle, pytest.raises(WriteError, match="cannot pickle"):
        rf.write(source, tmp_path / "q", runner="ray", map=lambda s: {"x": handle.fileno()}, progress=False)


def test_a_ray_node_that_does_not_see_the_destination_is_an_error(
    cluster: str, source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a node without the file system finds: nothing.
    real = ray_runner._run_on_worker
    monkeypatch.setattr(ray_runner, "_run_on_worker", lambda job, path, task: real(job, f"{path}-elsewhere", task))
    with pytest.raises(WriteError, match=r"(?s)does not see the destination.*share"):
        rf.write(source, tmp_path / "p", runner="ray", shard_bytes=900, progress=False)
    assert not (tmp_path / "p").exists()


def test_a_write_on_ray_without_ray_names_the_extra_to_install(
    source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"rankfeed\[ray\]"):
        rf.write(source, tmp_path / "p", runner="ray", progress=False)
    assert not (tmp_path / "p").exists()


DRIVER = """
import sys, time, pathlib, ray, rankfeed as rf
ray.init(address=sys.argv[4], log_to_driver=False, logging_level="error")
calls = pathlib.Path(sys.argv[3])
def slow(sample):
    with calls.open("a") as file:
        file.write(f"{sample['id']}\\n")
    time.sleep(0.002)
    return {"id": sample["id"]}
rf.write(rf.open(sys.argv[1]), sys.argv[2], runner="ray", map=slow, key="slow", shard_bytes=300, progress=False)
"""


@pytest.mark.slow
def test_a_write_on_ray_whose_driver_was_killed_resumes(cluster: str, source: rf.Source, tmp_path: Path) -> None:
    path, dest = str(source.path), tmp_path / "p"  # type: ignore[attr-defined]
    first = [sys.executable, "-c", DRIVER, path, str(dest), str(tmp_path / "first"), cluster]
    with started(first, tmp_path / "log", {**ENVIRON, **os.environ}) as job:  # Ray's token is in the environment
        until(lambda: len(list(dest.glob(".rankfeed-write/task-*.json"))) >= 8, job, tmp_path / "log")
        assert job.poll() is None
    assert not (dest / "rankfeed.json").exists()
    run_python(DRIVER, path, dest, tmp_path / "second", cluster)
    # Samples that are looked at to find the size of a row are called for in either.
    assert len((tmp_path / "second").read_text().split()) < 2000
    options: dict[str, Any] = {"key": "slow", "shard_bytes": 300, "workers": 0, "progress": False}
    rf.write(source, tmp_path / "local", map=lambda sample: {"id": sample["id"]}, **options)
    assert contents(dest) == contents(tmp_path / "local")


WAITING = """
import sys, warnings, ray, rankfeed as rf
source, dest, cores = sys.argv[1:]
ray.init(
    num_cpus=int(cores), object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False,
    logging_level="error",
)

@ray.remote(num_cpus=1)
class Holder:
    def hold(self):
        return 1

holder = Holder.remote()
if cores == "1":
    ray.get(holder.hold.remote())

def told(message, *_):
    print(message, flush=True)
    if cores == "1":
        ray.kill(holder)

warnings.showwarning = told
warnings.simplefilter("always")
try:
    print(len(rf.write(rf.open(source), dest, runner="ray", stall_timeout=2, progress=False)))
except rf.errors.WriteError as error:
    print(error)
"""


@pytest.mark.soak
@pytest.mark.parametrize("cores", [0, 1])
def test_a_write_on_ray_without_free_cores_warns_and_fails_if_none_get_free(
    cores: int, source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    output = run_python(WAITING, source.path, tmp_path / "p", cores)  # type: ignore[attr-defined]
    assert f"of whose {cores} cores 0 are free" in output
    assert ("has had no cores" in output) == (cores == 0)
    assert (output.splitlines()[-1] == "2000") == (cores == 1)
