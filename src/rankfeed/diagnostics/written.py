"""Writes a report to the path that the user names: complete or not at all."""

import errno
import os
from pathlib import Path

from rankfeed._util.validate import check_path
from rankfeed.errors import ArgumentError
from rankfeed.storage.commit import write_atomic


def written(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a small file, whole or not at all; returns where. A link is replaced."""
    target = Path(check_path("path", path))
    try:
        if target.exists() and not target.is_file():  # a device, as /dev/null, is not replaced by a file
            raise OSError(errno.EINVAL, "it is no file")
        write_atomic(target, content)
    except OSError as error:
        raise ArgumentError(
            "the report cannot be written there",
            found=error.strerror or error,
            where=target,
            remedy="name a file in a folder that is there and may be written to",
        ) from error
    return target
