"""Detection of written datasets, and of Arrow IPC files and streams, without importing pyarrow."""

import os

from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, files_at, head
from rankfeed.storage.manifest import MANIFEST_NAME


def is_packed(paths: list[str]) -> bool:
    """Whether this is the folder of a completely written dataset."""
    return os.path.isfile(os.path.join(paths[0], MANIFEST_NAME))


def is_arrow(paths: list[str]) -> bool:
    """Whether these are Arrow IPC files, or folders of them."""
    try:
        files = arrow_files(paths)
    except SourceError:  # a folder without any
        return False
    # A folder of Hugging Face datasets lists its files itself.
    is_dataset = any(os.path.isfile(os.path.join(path, "state.json")) for path in paths)
    return not is_dataset and all(_is_arrow_file(path) for path in (files[0], files[-1]))


def arrow_files(where: Paths) -> list[str]:
    """The files of paths, patterns and folders; a SourceError if a folder has none."""
    return files_at(where, (".arrow", ".arrows", ".feather", ".ipc"))


def _is_arrow_file(path: str) -> bool:
    start = head(path, 16)
    if start.startswith(b"ARROW1"):
        return True
    # A stream: continuation marker, then the small length of the metadata.
    return len(start) == 16 and start[:4] == b"\xff" * 4 and 0 < int.from_bytes(start[4:8], "little") < 1 << 28
