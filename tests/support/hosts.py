"""Hosts on one machine: processes with host name, process numbers and network of their own, and a local disk."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.machine import need_root


def need_hosts() -> None:
    """Each host is made of namespaces."""
    need_root("hosts on one machine")


def on_host(name: str, command: Sequence[str], disk: Path | None = None) -> list[str]:
    """The command that runs another one on a host.

    Args:
        name: of the host.
        command: to be run there.
        disk: where the host has a local disk, under a path that all hosts share; None for none.
    """
    mount = ["mount -t tmpfs tmpfs " + str(disk)] if disk is not None else []
    script = " && ".join([f"hostname {name}", *mount, 'exec "$@"'])
    spaces = ["--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *spaces, "sh", "-c", script, "sh", *command]


def started_on(name: str, command: Sequence[str], log: Path, disk: Path | None = None) -> subprocess.Popen[bytes]:
    """A process under way on a host."""
    with log.open("wb") as out:
        return subprocess.Popen(
            on_host(name, command, disk), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
