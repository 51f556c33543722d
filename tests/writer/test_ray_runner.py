"""Writing on Ray: the bytes of a local write, though workers, nodes and drivers die."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tests.support.jobs import ENVIRON, end, family, until
from tests.support.values import contents

import rankfeed as rf
from rankfeed.errors import ArgumentError, MissingExtraError, WriteError
from rankfeed.writer.runners import ray as ray_runner

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A node of two cores."""
    context = ray.init(
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> rf.Source:
    rows = ({"id": i, "x": np.full(i % 7, i), "text": f"row {i}"} for i in range(2000))
    return rf.write(rows, tmp_path_factory.mktemp("ray") / "source", shard_bytes=20_000, progress=False)


def twice(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [{"id": sample["id"], "noise": rng.random()}] * int(rng.integers(3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"order": "shuffled", "seed": 2},
        *(pytest.param(more, marks=pytest.mark.soak) for more in ({}, {"map": twice}, {"workers": 1})),
    ],
)
def test_the_bytes_are_those_of_a_local_write(
    arguments: dict[str, Any], cluster: str, source: rf.Source, tmp_path: Path
) -> None:
    on_ray = rf.write(source, tmp_path / "ray", runner="ray", shard_bytes=9000, progress=False, **arguments)
    rf.write(source, tmp_path / "local", shard_bytes=9000, progress=False, **{**arguments, "workers": 0})
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    if "map" not in arguments:
        assert Counter(int(sample["id"]) for sample in on_ray) == Counter(range(2000))
    assert rf.write(source, tmp_path / "ray", runner="ray", shard_bytes=9000, progress=False, **arguments)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_rows_are_appended_on_ray(cluster: str, source: rf.Source, tmp_path: Path) -> None:
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


def test_a_worker_that_is_killed_is_replaced(cluster: str, source: rf.Source, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    options: dict[str, Any] = {"map": deadly(marker), "shard_bytes": 900, "progress": False}
    written = rf.write(source, tmp_path / "ray", runner="ray", **options)
    assert marker.exists()
    assert [int(sample["id"]) for sample in written] == list(range(2000))
    rf.write(source, tmp_path / "local", workers=0, **options)
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


@pytest.mark.soak
def test_a_worker_that_always_dies_is_an_error_that_says_so(
    cluster: str, source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_runner, "_RETRIES", 1)
    options: dict[str, Any] = {"map": deadly(), "shard_bytes": 900, "progress": False}
    with pytest.raises(WriteError, match=r"(?s)failed repeatedly: its workers crashed.*task \d+.*fewer workers"):
        rf.write(source, tmp_path / "p", runner="ray", **options)
    assert len(rf.write(source, tmp_path / "p", workers=0, **options)) == 2000


@pytest.mark.soak
def test_errors_of_a_task_arrive_as_they_are(cluster: str, source: rf.Source, tmp_path: Path) -> None:
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
    with pytest.raises(ArgumentError, match="iterable"):
        rf.write([{"x": 1}], tmp_path / "r", runner="ray", progress=False)


def test_a_node_that_does_not_see_the_folder_is_named(
    cluster: str, source: rf.Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a node without the file system finds: nothing.
    real = ray_runner._run_on_worker
    monkeypatch.setattr(ray_runner, "_run_on_worker", lambda job, path, task: real(job, f"{path}-elsewhere", task))
    with pytest.raises(WriteError, match=r"(?s)does not see the destination.*share"):
        rf.write(source, tmp_path / "p", runner="ray", shard_bytes=900, progress=False)
    assert not (tmp_path / "p").exists()


def test_without_ray_the_extra_is_named(
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
def test_a_write_whose_driver_was_killed_goes_on(cluster: str, source: rf.Source, tmp_path: Path) -> None:
    path, dest = str(source.path), tmp_path / "p"  # type: ignore[attr-defined]

    def driver(calls: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DRIVER, path, str(dest), str(tmp_path / calls), cluster]
        return subprocess.Popen(command, env={**ENVIRON, **os.environ})

    first = driver("first")
    try:
        until(lambda: len(list(dest.glob(".rankfeed-write/task-*.json"))) >= 8, first)
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        end(family(first.pid))
        first.wait(10)
    assert not (dest / "rankfeed.json").exists()
    second = driver("second")
    try:
        assert second.wait(120) == 0
    finally:
        end(family(second.pid))
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
def test_who_waits_for_cores_says_so(cores: int, source: rf.Source, tmp_path: Path) -> None:
    path = str(source.path)  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-c", WAITING, path, str(tmp_path / "p"), str(cores)],
        env={**ENVIRON, **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"of whose {cores} cores 0 are free" in done.stdout
    assert ("has had no cores" in done.stdout) == (cores == 0)
    assert (done.stdout.splitlines()[-1] == "2000") == (cores == 1)
