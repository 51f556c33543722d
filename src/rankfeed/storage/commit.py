"""Atomic files: written under a temporary name, flushed, and renamed; records are such files with a struct."""

import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from rankfeed.storage.network_fs import SuppressGone

#: Prefix of temporary names.
TEMPORARY = ".tmp-"
_TEMPORARY_NAME = re.compile(rf"\{TEMPORARY}.+-\d+-[0-9a-f]{{8}}")
#: Attempts to create a directory that other processes remove.
_ATTEMPTS = 8
_Record = TypeVar("_Record", bound=msgspec.Struct)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other process on any host uses."""
    host = "".join(sign if sign.isalnum() else "-" for sign in socket.gethostname())[:32]
    return path.with_name(f"{TEMPORARY}{host}-{os.getpid()}-{secrets.token_hex(4)}")


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` made this name."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that appears under its name when the block succeeds, and else leaves nothing; raises OSError."""
    target = Path(path)
    temporary = temporary_name(target)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(target.parent)


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file atomically; raises OSError and leaves nothing behind if that fails."""
    with atomic_file(path) as file:
        file.write(content)


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write a struct as JSON, atomically; raises OSError."""
    write_atomic(path, msgspec.json.encode(record))


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """The struct in a file; None if the file does not exist, or contains something else. Raises OSError."""
    with SuppressGone(), suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files of dead processes, as far as possible; called where no other process writes."""
    for path in folder.iterdir():
        if is_temporary(path.name):
            with suppress(OSError):  # only its owner can remove it
                path.unlink()


def make_directory(path: Path) -> None:
    """Create a directory, unless it exists; raises OSError if it is a symbolic link: nothing is written there."""
    for remaining in reversed(range(_ATTEMPTS)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            break
        except (FileNotFoundError, FileExistsError):  # another process removes it, or its parent, at this moment
            if not remaining:
                raise
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, through which nothing is written", os.fspath(path))


def fsync_dir(folder: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def decodable(kind: type[_Record]) -> type[_Record]:
    """Class decorator that makes msgspec resolve the field types of a struct at its definition.

    msgspec otherwise resolves them when the struct is decoded first, and two threads that do so at the same time
    can crash the process (seen with msgspec 0.22). Structs that it contains must be defined before it.
    """
    msgspec.json.Decoder(kind)
    return kind
