"""Detection of written datasets, and of Arrow IPC files and streams, without importing pyarrow."""

import os

from rankfeed.errors import ArgumentError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, expand, files_in, head
from rankfeed.storage import MANIFEST_NAME

SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")


def is_arrow(path: str) -> bool:
    """Whether a file begins like an Arrow IPC file or stream."""
    start = head(path, 16)
    if start.startswith(b"ARROW1"):
        return True
    # A stream: continuation marker, then the small length of the metadata.
    return len(start) == 16 and start[:4] == b"\xff" * 4 and 0 < int.from_bytes(start[4:8], "little") < 1 << 28


def fits(where: Paths) -> bool:
    """Whether these are Arrow IPC files, or folders of them."""
    try:
        found = arrow_files(where)
    except (SourceError, ArgumentError):
        return False
    # A folder of Hugging Face datasets lists its files itself.
    is_dataset = any(os.path.isfile(os.path.join(path, "state.json")) for path in expand(where))
    return bool(found) and not is_dataset and all(is_arrow(path) for path in {found[0], found[-1]})


def arrow_files(where: Paths) -> list[str]:
    """The files of paths, patterns and folders; a SourceError if a folder has none."""
    found: list[str] = []
    for path in expand(where):
        inside = files_in(path, SUFFIXES) if os.path.isdir(path) else [path]
        if not inside:
            raise SourceError("no Arrow files in the folder", expected=" or ".join(SUFFIXES), where=path)
        found += inside
    return found


def is_packed(where: Paths) -> bool:
    """Whether this is the folder of a completely written dataset."""
    return isinstance(where, (str, os.PathLike)) and os.path.isfile(os.path.join(where, MANIFEST_NAME))


FORMAT = Format(
    "arrow", "Arrow IPC files or streams (.arrow, .feather)", fits, "rankfeed.sources.arrow.source:ArrowSource"
)
PACKED_FORMAT = Format(
    "packed", "a folder that rankfeed.write wrote", is_packed, "rankfeed.sources.packed:open_packed"
)
