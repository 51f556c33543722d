"""Publishes a build by one rename; what was prepared there before is moved aside first and removed afterwards.

Beside the prepared directory are hidden ones for the lease, builds and kept files.
"""

import errno
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from rankfeed.errors import PrepareError, listed
from rankfeed.prepare.marker import DirState, foreign_files, read_marker, refuse_foreign_files
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import fsync_dir

_MAX_NAME_BYTES = 255
#: Prefix of the directories inside `control_dir` that builds are written to.
BUILD_PREFIX = "build-"


def control_dir(path: Path) -> Path:
    """Directory of the lease, the failures and the unfinished builds of a path."""
    return _beside(path, "prepare")


def _beside(path: Path, suffix: str) -> Path:
    name = f".{path.name}.{suffix}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = f".{digest_of(os.fsencode(path.name))}.{suffix}"
    return path.with_name(name)


def may_write(directory: Path) -> bool:
    """Whether this process may change what is in a directory; False if there is none."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


_log = logging.getLogger("rankfeed")
#: Prefixes of directories in the control directory: moved aside and to be looked at, and to be removed.
_OLD, _GARBAGE = "old-", "garbage-"
_TOKEN_BYTES = 8
_LEFTOVER = re.compile(f"({_OLD}|{_GARBAGE})[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
#: Errors of a directory that cannot be moved. EACCES need not be one: on SMB the target may be non-empty.
_IMMOVABLE = (errno.EBUSY, errno.EXDEV, errno.EPERM)


def _new(control: Path, prefix: str) -> Path:
    return control / f"{prefix}{secrets.token_hex(_TOKEN_BYTES)}"


def refuse_irreplaceable(path: Path, state: DirState, control: Path) -> None:
    """Check, before a long build, that its result can replace the directory, which moves to ``control``."""
    refuse_foreign_files(path, state)
    if os.path.ismount(path):
        reason = "a file system is mounted there"
    else:
        reason = "" if state is DirState.ABSENT else _why_immovable(path, control)
    if reason:
        raise PrepareError(
            "cannot replace the directory",
            found=reason,
            where=path,
            remedy="prepare a directory inside it, or another one; a directory cannot be moved if it is mounted, "
            "belongs to another user, is read-only or comes with a container image",
        )


def _why_immovable(path: Path, control: Path) -> str:
    """Why a directory cannot be moved, by trying a move that always fails: onto a directory that is not empty."""
    full = _new(control, _GARBAGE)
    full.mkdir()
    try:
        (full / "trial").touch()
        os.rename(path, full)
    except OSError as error:
        immovable = error.errno in _IMMOVABLE or (error.errno == errno.EACCES and not may_write(path))
        return error.strerror or str(error) if immovable else ""
    finally:
        remove(full)
    return ""


def swap_dir(staging: Path, path: Path, control: Path) -> None:
    """Publish a build whose marker is written; between the two renames, nothing is there."""
    old = _new(control, _OLD)
    moved = os.path.lexists(path) and read_marker(path) is not None
    if moved:
        os.rename(path, old)
    try:
        os.rename(staging, path)  # an empty directory is replaced
    except BaseException:
        if moved:
            with suppress(OSError):
                os.rename(old, path)
        raise
    fsync_dir(path.parent)
    if moved:
        _remove_old(old, path)


def remove_leftovers(control: Path, path: Path) -> None:
    """Remove what processes that were killed had moved aside."""
    for directory in control.iterdir():
        match = _LEFTOVER.fullmatch(directory.name)
        if match and match[1] == _OLD:
            _remove_old(directory, path)
        elif match:
            remove(directory)


def _remove_old(old: Path, path: Path) -> None:
    """Remove a replaced directory; if others wrote into it meanwhile, keep it, since the new one is in use."""
    try:
        names = foreign_files(old)
    except OSError as error:
        names = [str(error)]
    if not names:
        discard(old)
        return
    kept = _beside(path, f"kept-{secrets.token_hex(4)}")
    with suppress(OSError):  # another process did the same
        os.rename(old, kept)
        _log.warning("files were written into %s while it was replaced: kept %s in %s", path, listed(names), kept)


def discard(directory: Path) -> None:
    """Remove a directory, renamed first, so that no process can commit half of it."""
    garbage = _new(directory.parent, _GARBAGE)
    with suppress(OSError):
        os.rename(directory, garbage)
        remove(garbage)


def remove(directory: Path) -> None:
    """Remove a directory tree as far as possible, including directories that were made read-only."""
    with suppress(OSError):
        os.chmod(directory, 0o700)
    for place, folders, _ in os.walk(directory):
        for inner in folders:
            if not os.path.islink(path := os.path.join(place, inner)):
                with suppress(OSError):
                    os.chmod(path, 0o700)  # before it is walked into
    shutil.rmtree(directory, ignore_errors=True)
