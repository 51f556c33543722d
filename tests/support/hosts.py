"""Hosts on one machine: processes with host name, process numbers and network of their own, and a local disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def need_hosts() -> None:
    """Namespaces need root; where all has to be there, their want is a failure."""
    if os.geteuid() == 0 and shutil.which("unshare"):
        return
    message = "hosts of their own need root and unshare (util-linux)"
    if os.environ.get("CI") == "true" or os.environ.get("RANKFEED_REQUIRE_LAUNCHERS") == "1":
        pytest.fail(message)
    pytest.skip(message)


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
