"""Hosts that reach each other: a process of its own keeps each host's namespaces, and takes the host with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.support.hosts import need_hosts
from tests.support.machine import missing

#: Process 1 of a host: it takes in orphans, as that of a machine does.
_INIT = "while :; do sleep 1000 & wait; done"
#: What is begun so lasts as long as the test process at most: should that be killed, its hosts go too.
_TIED = ["setpriv", "--pdeathsig", "KILL"]
_HUB = "10.77.0.254"


@dataclass
class Host:
    """A machine, as far as its processes can tell: own name, address, process numbers, mounts and local disk.

    Args:
        name: of the host.
        address: on the network that it shares with the others.
        pid: of the process that keeps its namespaces, as seen by the test.
        spaces: which namespaces those are.
    """

    name: str
    address: str
    pid: int
    keeper: subprocess.Popen[bytes]
    spaces: tuple[str, ...] = ("--mount", "--uts", "--net", "--pid")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one here."""
        return ["nsenter", "--target", str(self.pid), *self.spaces, "--", *command]

    def run(self, *command: str, timeout: float = 60) -> str:
        """What a command prints that has to succeed."""
        done = subprocess.run(self.command(command), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{command} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(
        self,
        command: Sequence[str],
        log: Path,
        environ: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """A command under way here; it ends with the host at the latest."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [*_TIED, *self.command(command)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
                stdin=stdin,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All processes here except the first one."""
        space = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        processes = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if process.pid != self.pid and os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space:
                    processes.append(process)
        return processes

    def process(self, pid: int) -> psutil.Process:
        """The process that has this number here."""
        for process in self.processes():
            with suppress(OSError):
                numbers = Path(f"/proc/{process.pid}/status").read_text().partition("NSpid:")[2].splitlines()[0]
                if int(numbers.split()[-1]) == pid:
                    return process
        raise AssertionError(f"no process {pid} on {self.name}")

    def lose(self) -> None:
        """Pull the plug: every process of the host, its mounts and its cable are gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            self.keeper.kill()
        self.keeper.wait(20)


@dataclass
class Network:
    """Hosts h1, h2, ... around a hub, which has a name and an address too, but the test's own process numbers."""

    hub: Host
    hosts: list[Host]
    folder: Path
    disk: Path | None
    _stack: ExitStack = field(default_factory=ExitStack)

    def host(self, name: str) -> Host:
        """A host by its name."""
        return next(host for host in self.hosts if host.name == name)

    def shell(self) -> Path:
        """A program that runs a command on a host, called as launchers call ssh."""
        path = self.folder / "shell"
        places = "\n".join(f"{host.name}|{host.address}) to={host.pid};;" for host in self.hosts)
        path.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case "$1" in\n{places}\n*) echo "no host $1" >&2; exit 255;;\nesac\n'
            # Open MPI names its folder there by a process id, and two hosts that share a disk may have the same.
            f'export TMPDIR="{self.folder}/tmp-$1"\nmkdir -p "$TMPDIR"\nshift\n'
            'exec nsenter --target "$to" --mount --uts --net --pid -- sh -c "$*"\n'
        )
        path.chmod(0o755)
        return path

    def add(self) -> Host:
        """Another host, or a lost one again."""
        host_id = len(self.hosts) + 1
        host = self._stack.enter_context(_host(f"h{host_id}", f"10.77.0.{host_id}", self.folder, self.disk))
        cable = f"p{host_id}"
        self.hub.run(
            *("ip", "link", "add", cable, "type", "veth"), *("peer", "name", "eth0", "netns", str(host.pid))
        )
        self.hub.run("ip", "link", "set", cable, "master", "bridge", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        self.hosts.append(host)
        return host


def process_of(net: Network, name: str) -> psutil.Process:
    """The process that left a file named HOST-NUMBER.ANYTHING."""
    host, _, pid = name.partition(".")[0].partition("-")
    return net.host(host).process(int(pid))


def need_network() -> None:
    """What hosts with a network need: where all has to be there, its want is a failure."""
    need_hosts()
    if not all(shutil.which(program) for program in ("ip", "nsenter", "setpriv")):
        missing("ip (iproute2), nsenter and setpriv (util-linux) for hosts with a network")


@contextmanager
def network(count: int, folder: Path, disk: Path | None = None) -> Iterator[Network]:
    """Hosts with a network of their own, gone at the end with all that runs on them.

    Args:
        count: of hosts.
        folder: where their list of names is kept.
        disk: where each has a local disk of its own, under the same path; None for none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"10.77.0.{host_id} h{host_id}" for host_id in range(1, 60)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{_HUB} hub", *names, ""]))
    (folder / "nsswitch.conf").write_text("hosts: files\n")  # there is no name server here
    with ExitStack() as stack:
        hub = stack.enter_context(_host("hub", _HUB, folder, None, pids=False))
        hub.run("ip", "link", "add", "bridge", "type", "bridge")
        hub.run("ip", "addr", "add", f"{_HUB}/24", "dev", "bridge")
        hub.run("ip", "link", "set", "bridge", "up")
        net = Network(hub, [], folder, disk, stack)
        for _ in range(count):
            net.add()
        yield net


@contextmanager
def _host(name: str, address: str, folder: Path, disk: Path | None, *, pids: bool = True) -> Iterator[Host]:
    ready = folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    names = [f"mount --bind {folder}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
    mounts = [*names, *([f"mount -t tmpfs tmpfs {disk}"] if disk else [])]
    script = " && ".join([f"hostname {name}", *mounts, "ip link set lo up", f"touch {ready}"]) + f" && {_INIT}"
    own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if pids else []
    keeper = subprocess.Popen(
        [*_TIED, "unshare", "--mount", "--uts", "--net", *own, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert keeper.poll() is None, f"{name} does not start"
            assert time.monotonic() < deadline, f"{name} does not start"
            time.sleep(0.01)
        if pids:
            host = Host(name, address, psutil.Process(keeper.pid).children()[0].pid, keeper)
        else:
            host = Host(name, address, keeper.pid, keeper, ("--mount", "--uts", "--net"))
        try:
            yield host
        finally:
            host.lose()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait(20)
