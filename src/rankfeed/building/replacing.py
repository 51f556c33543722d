"""A build comes to its place by one rename, and what lay there before goes, but for what others put there."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from rankfeed.building.prepared import State, read_marker, refuse_strangers, strangers
from rankfeed.building.target import kept_folder, may_write
from rankfeed.errors import PrepareError, listed
from rankfeed.storage import fsync_dir

_log = logging.getLogger("rankfeed")
#: Names in the folder of the leases: what was moved aside and may hold others' files, and what holds none.
_OLD, _GARBAGE = "old-", "garbage-"
_TOKEN = 8
#: How a folder refuses to be moved. EACCES need not mean that: on SMB it may mean that the other one is not empty.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EPERM)


def _new(aside: Path, kind: str) -> Path:
    return aside / f"{kind}{secrets.token_hex(_TOKEN)}"


def _is(name: str, kind: str) -> bool:
    return re.fullmatch(f"{kind}[0-9a-f]{{{2 * _TOKEN}}}", name) is not None


def refuse_fixed(path: Path, state: State, aside: Path) -> None:
    """Nothing is built for a place where it could not be brought.

    Args:
        path: where the data belong.
        state: of what lies there.
        aside: the folder where it would be moved to, on the same file system.

    Raises:
        PrepareError: what lies there holds files of others, cannot be looked into, or cannot be moved.
        OSError: nothing can be written beside it.
    """
    refuse_strangers(path, state)
    if os.path.ismount(path):
        found = "a file system is mounted there"
    else:
        found = _why_fixed(path, aside) if state is not State.ABSENT else ""
    if found:
        raise PrepareError(
            "the folder cannot be replaced",
            found=found,
            where=path,
            remedy="prepare another one, inside it perhaps: a folder stays where it is if it is mounted, "
            "belongs to somebody else, is read-only or comes with a container's image",
        )


def _why_fixed(path: Path, aside: Path) -> str:
    """What a move of the folder would meet; empty where it could be moved.

    It is found by a move that is refused in any case: onto a folder that is not empty.
    """
    full = _new(aside, _GARBAGE)
    full.mkdir()
    file = full / ".rankfeed-trial"
    try:
        file.touch()
        os.rename(path, full)
    except OSError as error:
        fixed = error.errno in _FIXED or (error.errno == errno.EACCES and not may_write(path))
        return error.strerror or str(error) if fixed else ""
    else:  # there are file systems of many kinds
        file.unlink(missing_ok=True)
        os.rename(full, path)
        return ""
    finally:
        remove(full)


def commit(staging: Path, path: Path, aside: Path) -> None:
    """Bring a sealed build to its place; what was prepared there before is moved aside and removed.

    Files of it that a reader holds open stay readable. Between the two renames there is nothing.

    Raises:
        OSError: it cannot be moved; what was there is there again.
    """
    old = _new(aside, _OLD)
    moved = False
    if os.path.lexists(path) and read_marker(path) is not None:
        os.rename(path, old)
        moved = True
    try:
        os.rename(staging, path)  # an empty folder gives way
    except BaseException:
        if moved:
            with suppress(OSError):
                os.rename(old, path)
        raise
    fsync_dir(path.parent)
    if moved:
        _give_up(old, path)


def sweep(aside: Path, path: Path) -> None:
    """Remove what dead processes had moved aside."""
    for each in aside.iterdir():
        if _is(each.name, _OLD):
            _give_up(each, path)
        elif _is(each.name, _GARBAGE):
            remove(each)


def _give_up(old: Path, path: Path) -> None:
    """Remove what was moved aside, unless others put something into it while that was being decided.

    It is kept then, and not brought back: others may have found the new data already.
    """
    try:
        names = strangers(old)
    except OSError as error:
        names = [str(error)]
    if not names:
        discard(old)
        return
    kept = kept_folder(path)
    with suppress(OSError):  # somebody else did it
        os.rename(old, kept)
        _log.warning("%s was replaced while others wrote into it: %s lie in %s", path, listed(names), kept)


def discard(folder: Path) -> None:
    """Remove a folder; out of the way in one step: whoever still means to commit it finds nothing."""
    garbage = _new(folder.parent, _GARBAGE)
    with suppress(OSError):
        os.rename(folder, garbage)
        remove(garbage)


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it, as far as that can be done: folders that were made read-only too."""
    with suppress(OSError):
        os.chmod(folder, 0o700)
    for place, folders, _ in os.walk(folder):
        for inner in folders:
            if not os.path.islink(path := os.path.join(place, inner)):
                with suppress(OSError):
                    os.chmod(path, 0o700)  # before it is walked into
    shutil.rmtree(folder, ignore_errors=True)
