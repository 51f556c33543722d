"""Tar archives of a few members, written in one call."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_tar(
    path: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT
) -> Path:
    """Write an archive of these members, by name and content, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
