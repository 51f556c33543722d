"""Checksums of files and of what is said about them: XXH3, 128 bits, as fast as memory."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

import xxhash

_CHUNK = 1 << 20


def file_digest(path: str | PathLike[str], progress: Callable[[int], None] | None = None) -> str:
    """The checksum of a file's bytes: 32 hexadecimal digits.

    Args:
        path: of the file; it is read in pieces, and other threads run meanwhile.
        progress: called with the number of bytes of each piece.

    Raises:
        OSError: it cannot be read.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp(), "empty")
        >>> path.write_bytes(b"")
        0
        >>> file_digest(path) == digest_of(b"")
        True
    """
    state = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(view[:size])
            if progress is not None:
                progress(size)
    return state.hexdigest()


def digest_of(*pieces: bytes | memoryview) -> str:
    """The checksum of pieces of bytes, which counts where one ends: ("ab", "c") is not ("a", "bc").

    Examples:
        >>> digest_of(b"ab", b"c") == digest_of(b"a", b"bc")
        False
    """
    state = xxhash.xxh3_128()
    for number, piece in enumerate(pieces):
        if number:
            state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.hexdigest()
