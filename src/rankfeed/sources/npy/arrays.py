"""The arrays of a `.npy` file, or of a `.npz` archive: their headers, and loading them."""

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.npy.header import DAMAGE, Array, Header, array_at, check_size, load_objects, read_header
from rankfeed.sources.npy.npz import NpzMember, members_of, read_member
from rankfeed.storage import file_errors, map_file

#: The column of a `.npy` file, which has no name of its own.
ARRAY = "array"


def read_headers(path: str, *, allow_pickle: bool = False) -> dict[str, Header]:
    """The header of each array of a file, whose size is checked."""
    with file_errors(path, *DAMAGE):
        if path.endswith(".npz"):
            with zipfile.ZipFile(path) as archive:
                members = members_of(archive, path, allow_pickle=allow_pickle)
                return {name: member.header for name, member in members.items()}
        with open(path, "rb", buffering=0) as file:
            header = read_header(file, path, allow_pickle=allow_pickle)
            check_size(header, os.fstat(file.fileno()).st_size, path)
            return {ARRAY: header}


def load_arrays(
    path: str,
    names: Iterable[str],
    *,
    mapped: bool,
    allow_pickle: bool = False,
    check: Callable[[str, Header], None] = lambda name, header: None,
) -> dict[str, Array]:
    """Arrays of a file: as views of the mapped file where that is possible, or read into memory.

    ``check`` is called with each name and header before memory is allocated for an array.
    """
    with file_errors(path, *DAMAGE):
        if path.endswith(".npz"):
            with zipfile.ZipFile(path) as archive:
                members = members_of(archive, path, allow_pickle=allow_pickle)
                missing = [name for name in names if name not in members]
                if missing:
                    raise SourceError("a file lacks arrays that others have", found=", ".join(missing), where=path)
                for name in names:
                    check(name, members[name].header)
                data = map_file(path) if mapped else None
                return {name: _load_member(archive, members[name], data, allow_pickle) for name in names}
        with open(path, "rb") as file:
            header = read_header(file, path, allow_pickle=allow_pickle)
            check(ARRAY, header)
            if header.dtype.hasobject:
                return {ARRAY: load_objects(path, header, path, allow_pickle=allow_pickle)}
            if mapped:
                content = map_file(path)
                check_size(header, len(content), path)
                return {ARRAY: array_at(content, header)}
            check_size(header, os.fstat(file.fileno()).st_size, path)
            file.seek(header.offset)
            content = np.empty(header.nbytes, np.uint8)
            check_size(header, header.offset + file.readinto(content.data), path)
            return {ARRAY: array_at(content, header, -header.offset)}


def _load_member(
    archive: zipfile.ZipFile, member: NpzMember, data: npt.NDArray[np.uint8] | None, allow_pickle: bool
) -> Array:
    is_stored = member.info.compress_type == zipfile.ZIP_STORED
    if data is not None and is_stored and not member.header.dtype.hasobject:
        return _map_member(data, member)
    array = read_member(archive, member, allow_pickle=allow_pickle)
    array.flags.writeable = data is None  # otherwise it is kept, like a mapped one
    return array


def _map_member(data: npt.NDArray[np.uint8], member: NpzMember) -> Array:
    """An array as a view of the bytes of its archive."""
    info = member.info
    # The local header: 30 bytes, the name, an extra field.
    local = data[info.header_offset : info.header_offset + 30].tobytes()
    name_size, extra_size = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
    start = info.header_offset + 30 + name_size + extra_size
    if local[:4] != b"PK\x03\x04" or start + info.file_size > len(data):
        raise CorruptError("the file is damaged", found="a wrong local header", where=member.where)
    checksum = _checksum(data[start : start + info.file_size])
    if checksum != info.CRC:
        raise CorruptError(
            "the file is damaged", expected=f"checksum {info.CRC:08x}", found=f"{checksum:08x}", where=member.where
        )
    return array_at(data, member.header, start)


def _checksum(content: npt.NDArray[np.uint8]) -> int:
    return zlib.crc32(content.data)
