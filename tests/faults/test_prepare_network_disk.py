"""A folder on a real network file system that each host mounts for itself, with caches of its own."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.host_job import STALE
from tests.support.juicefs import USUAL, Shared, juicefs, long_caches, shared
from tests.support.network import Host, Network, need_network, network, process_of
from tests.support.seeds import fresh_seed

SCRIPT = Path(__file__).parent / "host_job.py"
ROOT = Path(__file__).parents[2]
#: Seconds within which a round has to end: far more than it takes.
HANG = 90
ROUNDS = 30
#: How long a host believes what it has seen: a second, half a minute, longer than a lost host may be silent.
CACHES = {"one second": USUAL, "half a minute": long_caches(30), "two minutes": long_caches(120)}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


class Cluster:
    """Two hosts or more that mount one file system."""

    def __init__(self, net: Network, disk: Shared, out: Path, options: tuple[str, ...]) -> None:
        self.net, self.disk, self.options = net, disk, options
        self.path = disk.path / "some" / "data"
        self._outs = out
        self.out = out
        self._hosts: list[Host] = []
        for _ in range(2):
            self.add()

    def add(self) -> Host:
        host = self.net.add()
        self.disk.mount(host, self.options)
        self._hosts.append(host)
        return host

    @property
    def hosts(self) -> list[Host]:
        return list(self._hosts)

    def lose(self, host: Host) -> None:
        host.lose()
        self._hosts.remove(host)

    def round(self, name: str) -> None:
        """A new folder for what processes tell."""
        self.out = self._outs / name
        self.out.mkdir(parents=True)

    def start(self, host: Host, *arguments: object) -> subprocess.Popen[bytes]:
        log = self.out / f"{host.name}-{len(list(self.out.glob('*.log')))}.log"
        environ = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        return host.start([sys.executable, str(SCRIPT), *map(str, arguments)], log, environ)

    def prepare(self, host: Host, key: str, seconds: float = 0) -> subprocess.Popen[bytes]:
        return self.start(host, "prepare", self.path, key, self.out, seconds)

    def names(self, kind: str) -> list[str]:
        return sorted(path.name for path in self.out.glob(f"*.{kind}"))

    def until(self, kind: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + HANG
        while len(found := self.names(kind)) < count:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)
        return found

    def end(self, *jobs: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + HANG
        for job in jobs:
            try:
                assert job.wait(max(0.1, deadline - time.monotonic())) == 0, self.said()
            except subprocess.TimeoutExpired:
                raise AssertionError(f"hangs\n{self.said()}") from None

    def said(self) -> str:
        logs = (f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(self.out.glob("*.log")))
        return "\n".join(logs)

    def builder(self) -> psutil.Process:
        """The process that builds."""
        (name,) = self.until("building")[:1]
        return process_of(self.net, name)

    def left(self, host: Host) -> list[str]:
        """What lies beside the folder, as a host sees it."""
        return [name for name in host.run("ls", "-A", str(self.path.parent)).split() if name != self.path.name]


@pytest.fixture(params=CACHES)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    need_network()
    juicefs()
    with network(0, tmp_path / "net") as net, shared(net, tmp_path / "store", tmp_path / "shared") as disk:
        yield Cluster(net, disk, tmp_path / "out", CACHES[request.param])


def test_hosts_build_once_while_they_watch_the_build_grow(cluster: Cluster) -> None:
    cluster.round("first")
    cluster.end(*(cluster.prepare(host, "key", 2 * STALE) for host in cluster.hosts for _ in range(3)))
    assert len(cluster.names("building")) == 1
    assert len(cluster.names("done")) == 6
    assert cluster.left(cluster.hosts[0]) == []


def test_another_key_is_built_once_though_hosts_believe_in_the_old_folder(cluster: Cluster) -> None:
    for number in range(3):
        cluster.round(f"round{number}")
        cluster.end(*(cluster.prepare(host, f"key{number}", 0.2) for host in cluster.hosts for _ in range(2)))
        assert len(cluster.names("building")) == 1, cluster.said()
        assert len(cluster.names("done")) == 4


def test_hosts_that_come_one_after_the_other_find_what_the_first_one_built(cluster: Cluster) -> None:
    for number in range(4):
        cluster.round(f"round{number}")
        first, *others = cluster.hosts if number % 2 else reversed(cluster.hosts)
        cluster.end(cluster.prepare(first, f"key{number}"))
        for host in others:
            cluster.end(cluster.prepare(host, f"key{number}"))
        assert len(cluster.names("building")) == 1, cluster.said()
        assert len(cluster.names("done")) == 2


def test_a_builder_that_is_killed_is_replaced(cluster: Cluster) -> None:
    cluster.round("first")
    first = cluster.prepare(cluster.hosts[0], "key", 60)
    builder = cluster.builder()
    others = [cluster.prepare(host, "key") for host in cluster.hosts for _ in range(2)]
    cluster.until("started", 5)
    builder.kill()
    first.wait(20)
    cluster.end(*others)
    assert len(cluster.names("building")) == 2
    assert len(cluster.names("done")) == 4


def test_a_host_that_is_lost_with_its_mount_is_replaced(cluster: Cluster) -> None:
    cluster.round("first")
    lost, kept = cluster.hosts
    first = cluster.prepare(lost, "key", 60)
    cluster.until("building")
    others = [cluster.prepare(kept, "key") for _ in range(2)]
    cluster.until("started", 3)
    cluster.lose(lost)
    first.wait(20)
    new = cluster.add()
    cluster.end(*others, cluster.prepare(new, "key"))
    assert len(cluster.names("building")) == 2
    assert len(cluster.names("done")) == 3


def test_a_builder_that_raises_fails_those_who_wait_on_all_hosts(cluster: Cluster) -> None:
    cluster.round("first")
    jobs = [cluster.prepare(host, "key", -4) for host in cluster.hosts for _ in range(2)]
    cluster.until("started", 4)
    cluster.end(*jobs)
    assert len(cluster.names("building")) == 1
    said = Counter((cluster.out / name).read_text() for name in cluster.names("failed"))
    assert list(said.values()) == [4], said
    assert "ValueError: no such data" in next(iter(said))


def test_readers_of_other_hosts_see_whole_folders_while_keys_change(cluster: Cluster) -> None:
    cluster.round("reads")
    reads = cluster.out
    readers = [cluster.start(host, "read", cluster.path, reads) for host in cluster.hosts for _ in range(2)]
    for number in range(10):
        cluster.round(f"round{number}")
        cluster.end(*(cluster.prepare(host, f"key{number}") for host in cluster.hosts))
        assert len(cluster.names("building")) == 1, cluster.said()
    (reads / "stop").touch()
    for reader in readers:
        assert reader.wait(HANG) == 0
    looks = _looks(reads)
    print(f"\n{dict(looks)}")
    assert looks["right"] > 0
    assert looks["wrong"] == 0


@pytest.mark.parametrize("cluster", ["one second", "half a minute"], indirect=True)
def test_whatever_is_killed_every_round_ends_with_one_folder_for_all_hosts(cluster: Cluster) -> None:
    seed = fresh_seed()
    chance, figures = random.Random(seed), Counter[str]()
    cluster.round("reads")
    reads = cluster.out
    readers = {host.name: cluster.start(host, "read", cluster.path, reads) for host in cluster.hosts}
    for number in range(ROUNDS):
        cluster.round(f"round{number}")
        jobs = {}
        for host in cluster.hosts:
            for _ in range(chance.randint(1, 3)):
                jobs[cluster.prepare(host, f"key{number}", chance.uniform(0, 0.5))] = host
        ended = chance.choices(["nothing", "a process", "a host"], [2, 6, 1])[0]
        cluster.until("started")
        time.sleep(chance.uniform(0, 0.7))
        gone = [job for job in jobs if job.poll() is not None]
        figures[ended] += 1
        if ended == "a process":
            name = chance.choice(cluster.names("started"))
            with suppress(AssertionError, psutil.NoSuchProcess):  # it was done already
                process_of(cluster.net, name).kill()
        elif ended == "a host":
            host = chance.choice(cluster.hosts)
            gone += [job for job in jobs if jobs[job] is host]
            readers.pop(host.name)
            cluster.lose(host)
            new = cluster.add()
            jobs[cluster.prepare(new, f"key{number}")] = new
            readers[new.name] = cluster.start(new, "read", cluster.path, reads)
        failed = 0
        for job in jobs:
            try:
                failed += job.wait(HANG) != 0 and job not in gone
            except subprocess.TimeoutExpired:
                raise AssertionError(f"seed {seed}, round {number} hangs\n{cluster.said()}") from None
        assert failed <= (ended == "a process"), f"seed {seed}, round {number}\n{cluster.said()}"
        # One build a round, and another one for a builder that was killed.
        builds = len(cluster.names("building"))
        assert 1 <= builds <= 1 + (ended != "nothing"), f"seed {seed}, round {number}\n{cluster.said()}"
        figures["builds"] += builds
        cluster.end(*(cluster.prepare(host, f"key{number}") for host in cluster.hosts))
        assert len(cluster.names("building")) == builds, f"seed {seed}, round {number}\n{cluster.said()}"
    (reads / "stop").touch()
    for reader in readers.values():
        assert reader.wait(HANG) == 0
    looks = _looks(reads)
    print(f"\n{ROUNDS} rounds: {dict(figures)}; looks: {dict(looks)}")
    assert looks["right"] > 0
    assert looks["wrong"] == 0


def _looks(folder: Path) -> Counter[str]:
    looks: Counter[str] = Counter()
    for path in folder.glob("*.looks"):
        for line in path.read_text().splitlines():
            name, count = line.split()
            looks[name] += int(count)
    return looks
