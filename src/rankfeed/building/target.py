"""Which folder is to be prepared, and the hidden one beside it where its leases lie and its builds begin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    fits = isinstance(text, str) and text and "\0" not in text and "://" not in text
    return text if fits else None


def folder_meant(path: Any) -> Path:
    """The folder that is meant, absolute; links to it are followed."""
    text = local_path(path)
    if text is not None:
        target = Path(os.path.realpath(text))
        if target.name:
            return target
    raise ArgumentError("this is no folder to prepare", expected="a path", found=repr(path))


def control_folder(path: Path) -> Path:
    """Where the leases of a folder lie, and what is built of it."""
    name = f".{path.name}.prepare"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{digest_of(os.fsencode(path.name))}.prepare"
    return path.with_name(name)
