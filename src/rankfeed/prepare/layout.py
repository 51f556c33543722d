"""Paths: the prepared directory, and hidden directories beside it for the lease, builds and kept files."""

import os
import secrets
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_path, invalid
from rankfeed.storage import digest_of

_MAX_NAME_BYTES = 255
#: Prefix of the directories inside `control_dir` that builds are written to.
BUILD_PREFIX = "build-"


def check_target(path: Any) -> Path:
    """The absolute path of the directory to prepare, links resolved; raises ArgumentError if it cannot be one."""
    text = check_path("path", path)
    target = Path(os.path.realpath(text))
    if "://" in text or not target.name:
        raise invalid("path", "a directory of a mounted file system", path)
    return target


def control_dir(path: Path) -> Path:
    """Directory of the lease, the failures and the unfinished builds of a path."""
    return _beside(path, "prepare")


def new_kept_dir(path: Path) -> Path:
    """A new place for files that others wrote into the directory while it was replaced."""
    return _beside(path, f"kept-{secrets.token_hex(4)}")


def _beside(path: Path, suffix: str) -> Path:
    name = f".{path.name}.{suffix}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = f".{digest_of(os.fsencode(path.name))}.{suffix}"
    return path.with_name(name)


def may_write(directory: Path) -> bool:
    """Whether this process may change what is in a directory; False if there is none."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
