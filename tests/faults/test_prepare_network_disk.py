"""A folder on a real network file system that each host mounts for itself, with caches of its own."""

import json
import os
import random
import signal
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
ENVIRON = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
#: Seconds within which a round has to end: far more than it takes.
HANG = 90
ROUNDS = 60
#: How long a host believes what it has seen: a second, half a minute, longer than a lost host may be silent.
CACHES = {"one second": USUAL, "half a minute": long_caches(30), "two minutes": long_caches(120)}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def job(*arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


class Cluster:
    """Two hosts or more that mount one file system."""

    def __init__(self, net: Network, disk: Shared, out: Path, options: tuple[str, ...]) -> None:
        self.net, self.disk, self.options = net, disk, options
        self.path = disk.path / "some" / "data"
        self._outs = self.out = out
        self.hosts: list[Host] = []
        for _ in range(2):
            self.add()

    def add(self) -> Host:
        host = self.net.add()
        self.disk.mount(host, self.options)
        self.hosts.append(host)
        return host

    def lose(self, host: Host) -> None:
        host.lose()
        self.hosts.remove(host)

    def round(self, name: str) -> None:
        """A new folder for what processes tell."""
        self.out = self._outs / name
        self.out.mkdir(parents=True)

    def start(self, host: Host, *arguments: object) -> subprocess.Popen[bytes]:
        log = self.out / f"{host.name}-{len(list(self.out.glob('*.log')))}.log"
        return host.start(job(*arguments), log, ENVIRON)

    def prepare(self, host: Host, key: str, seconds: float = 0) -> subprocess.Popen[bytes]:
        return self.start(host, "prepare", self.path, key, self.out, seconds)

    def names(self, kind: str) -> list[str]:
        return sorted(path.name for path in self.out.glob(f"*.{kind}"))

    def until(self, kind: str, count: int = 1) -> list[str]:
        deadline = time.monotonic() + HANG
        while len(result := self.names(kind)) < count:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)
        return result

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


def test_processes_on_two_hosts_wait_for_one_long_build(cluster: Cluster) -> None:
    cluster.round("first")
    cluster.end(*(cluster.prepare(host, "key", 2 * STALE) for host in cluster.hosts for _ in range(3)))
    assert len(cluster.names("building")) == 1
    assert len(cluster.names("done")) == 6
    assert cluster.left(cluster.hosts[0]) == []


def test_another_key_is_built_once_though_hosts_cache_the_old_directory(cluster: Cluster) -> None:
    for index in range(3):
        cluster.round(f"round{index}")
        cluster.end(*(cluster.prepare(host, f"key{index}", 0.2) for host in cluster.hosts for _ in range(2)))
        assert len(cluster.names("building")) == 1, cluster.said()
        assert len(cluster.names("done")) == 4


def test_a_host_that_starts_later_uses_the_build_of_the_first_host(cluster: Cluster) -> None:
    for index in range(4):
        cluster.round(f"round{index}")
        first, *others = cluster.hosts if index % 2 else reversed(cluster.hosts)
        cluster.end(cluster.prepare(first, f"key{index}"))
        for host in others:
            cluster.end(cluster.prepare(host, f"key{index}"))
        assert len(cluster.names("building")) == 1, cluster.said()
        assert len(cluster.names("done")) == 2


def test_another_process_builds_when_the_builder_is_killed(cluster: Cluster) -> None:
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


def test_another_host_builds_when_the_building_host_is_lost(cluster: Cluster) -> None:
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
    assert cluster.left(new) == []  # though the file system still keeps the locks of the lost one


def test_a_build_that_raises_fails_the_waiting_processes_on_all_hosts(cluster: Cluster) -> None:
    cluster.round("first")
    jobs = [cluster.prepare(host, "key", -4) for host in cluster.hosts for _ in range(2)]
    cluster.until("started", 4)
    cluster.end(*jobs)
    assert len(cluster.names("building")) == 1
    said = Counter((cluster.out / name).read_text() for name in cluster.names("failed"))
    assert list(said.values()) == [4], said
    assert "ValueError: no such data" in next(iter(said))


class Campaign:
    """Round after round with another key; hosts come and go."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.chance = cluster, random.Random(seed)
        self.figures = Counter[str]()
        cluster.round("reads")
        self.reads = cluster.out
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.readers: dict[str, subprocess.Popen[bytes]] = {}
        for host in cluster.hosts:
            self.serve(host)

    def serve(self, host: Host) -> None:
        """Have a reader on a host, and what starts processes quickly."""
        self.readers[host.name] = self.cluster.start(host, "read", self.cluster.path, self.reads)
        log = self.reads / f"serve-{host.name}.log"
        self.servers[host.name] = host.start(job("serve", self.cluster.path), log, ENVIRON, stdin=subprocess.PIPE)

    def prepare(self, host: Host, key: str, seconds: float) -> None:
        pipe, count = self.servers[host.name].stdin, len(self.cluster.names("forked"))
        assert pipe is not None
        pipe.write(f"{key} {self.cluster.out} {seconds}\n".encode())
        pipe.flush()
        self.cluster.until("forked", count + 1)

    def lose(self) -> str:
        host = self.chance.choice(self.cluster.hosts)
        self.servers.pop(host.name)
        self.readers.pop(host.name)
        self.cluster.lose(host)
        return host.name

    def ended(self, lost: str) -> Counter[int]:
        """How the processes of all hosts but the lost one ended."""
        deadline = time.monotonic() + HANG
        names = [name.removesuffix(".forked") for name in self.cluster.names("forked")]
        names = [name for name in names if name.partition("-")[0] != lost]
        while True:
            files = [self.cluster.out / f"{name}.ended" for name in names]
            texts = [file.read_text() for file in files if file.exists()]
            if len(texts) == len(names) and all(texts):
                return Counter(int(text) for text in texts)
            assert time.monotonic() < deadline, "hangs"
            time.sleep(0.01)

    def round(self, index: int) -> None:
        cluster, chance, key, lost, killed = self.cluster, self.chance, f"key{index}", "", 0
        cluster.round(f"round{index}")
        for host in cluster.hosts:
            for _ in range(chance.randint(1, 3)):
                self.prepare(host, key, chance.uniform(0, 0.5))
        subject = chance.choices(["nothing", "process", "host"], [4, 15, 1])[0]
        time.sleep(chance.uniform(0, 0.7))
        if subject == "process":
            with suppress(AssertionError, psutil.NoSuchProcess):  # it was done already
                process_of(cluster.net, chance.choice(cluster.names("forked"))).kill()
        elif subject == "host":
            lost = self.lose()
            self.serve(host := cluster.add())
            self.prepare(host, key, 0)
        ended = self.ended(lost)
        killed = ended[-signal.SIGKILL]
        assert ended[0] + killed == ended.total(), ended
        assert killed <= (subject == "process")
        builds = len(cluster.names("building"))
        # One build a round, and another one for a builder that was killed.
        assert 1 <= builds <= 1 + killed + bool(lost), builds
        for host in cluster.hosts:  # who comes later finds it, and tidies up
            self.prepare(host, key, 0)
        self.ended(lost)
        assert len(cluster.names("building")) == builds, "built again"
        self.figures.update(rounds=1, builds=builds, **{"processes killed": killed, "hosts lost": bool(lost)})


@pytest.mark.parametrize("cluster", ["one second", "half a minute"], indirect=True)
def test_hosts_and_processes_killed_at_random_leave_one_committed_build(cluster: Cluster) -> None:
    seed = fresh_seed()
    campaign = Campaign(cluster, seed)
    for index in range(ROUNDS):
        try:
            campaign.round(index)
        except AssertionError as error:
            said = "\n".join(log.read_text(errors="replace")[-6000:] for log in campaign.reads.glob("serve-*.log"))
            raise AssertionError(f"seed {seed}, round {index}: {error}\n{said}") from error
    (campaign.reads / "stop").touch()
    for reader in campaign.readers.values():
        assert reader.wait(HANG) == 0
    looks = Counter[str]()
    for path in campaign.reads.glob("*.looks"):
        looks.update(json.loads(path.read_text()))
    print(f"\n{dict(campaign.figures)}; looks: {dict(looks)}")
    assert looks["right"] > 0
    assert looks["wrong"] == 0
    assert campaign.figures["processes killed"] > ROUNDS / 10
