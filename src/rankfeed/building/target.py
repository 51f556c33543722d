"""Which folder is to be prepared, and the hidden one beside it where its leases lie and its builds begin."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from rankfeed._util.validate import check_path, invalid
from rankfeed.errors import ArgumentError
from rankfeed.storage import digest_of

#: Bytes that a name may have.
_LONGEST_NAME = 255


def local_path(path: Any) -> str | None:
    """A path of this machine's file systems as text; None for what is none.

    Examples:
        >>> local_path(Path("data")), local_path("s3://bucket/data"), local_path("")
        ('data', None, None)
    """
    try:
        text = check_path("path", path)
    except ArgumentError:
        text = None
    fits = isinstance(text, str) and text and "\0" not in text and "://" not in text
    return text if fits else None


def folder_meant(path: Any) -> Path:
    """The folder that is meant, absolute; links to it are followed."""
    text = local_path(path)
    if text is not None:
        target = Path(os.path.realpath(text))
        if target.name:
            return target
    raise invalid("path", "a folder to prepare, on a file system", path)


def may_write(folder: Path) -> bool:
    """Whether this process may change what is in a folder, being who it is now; False where there is none."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def control_folder(path: Path) -> Path:
    """Where the leases of a folder lie, and what is built of it."""
    return _beside(path, "prepare")


def kept_folder(path: Path) -> Path:
    """A new place beside a folder for files that others put into it, hidden so that nobody reads it as data."""
    return _beside(path, f"kept-{secrets.token_hex(4)}")


def _beside(path: Path, ending: str) -> Path:
    name = f".{path.name}.{ending}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{digest_of(os.fsencode(path.name))}.{ending}"
    return path.with_name(name)
