"""A small build, one that counts, and its leases."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankfeed.storage.lease import HeldLease, Lease, LeaseOwner


def build(staging: Path) -> None:
    (staging / "sub").mkdir()
    (staging / "a.txt").write_text("a")
    (staging / "sub" / "b.txt").write_text("bb")


class CountedBuild:
    """A build that takes a while and counts how often it ran."""

    def __init__(self, build: Callable[[Path], Any] = build, seconds: float = 0) -> None:
        self.build, self.seconds, self.times = build, seconds, 0

    def __call__(self, staging: Path) -> None:
        self.times += 1
        time.sleep(self.seconds)
        self.build(staging)


def control(path: Path) -> Path:
    return path.with_name(f".{path.name}.prepare")


def acquire(lease: Lease, after: LeaseOwner | None = None, *arguments: Any) -> HeldLease:
    held = lease.acquire(after, *arguments)
    assert held is not None
    return held


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
