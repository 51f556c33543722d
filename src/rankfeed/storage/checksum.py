"""The hash of all checksums and digests of rankfeed: XXH3 with 128 bits, about as fast as memory."""

import hashlib
from os import PathLike

import xxhash


def file_digest(path: str | PathLike[str]) -> str:
    """The checksum of a file: 32 hexadecimal digits; raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_of(*pieces: bytes | memoryview) -> str:
    """The checksum of a sequence of byte strings, including their boundaries."""
    state = xxhash.xxh3_128()
    for index, piece in enumerate(pieces):
        if index:
            state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.hexdigest()
