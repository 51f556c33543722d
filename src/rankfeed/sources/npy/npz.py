"""Members of `.npz` archives; their headers bound what is decompressed."""

import io
import zipfile
from dataclasses import dataclass

import numpy as np

from rankfeed.errors import CorruptError
from rankfeed.sources.npy.header import DAMAGE, HEAD, Array, Header, array_at, load_objects, read_header
from rankfeed.storage import check_data_name, file_errors

_PIECE = 1 << 20
#: Most bytes that deflate makes of one.
_DEFLATE_RATIO = 1032


@dataclass(frozen=True)
class NpzMember:
    """An array in an archive."""

    header: Header
    info: zipfile.ZipInfo
    where: str  # its name in error messages


def members_of(
    archive: zipfile.ZipFile, where: str, *, allow_pickle: bool = False, only_arrays: bool = True
) -> dict[str, NpzMember]:
    """The arrays of an archive by name; ``only_arrays`` refuses members that are no arrays of numbers."""
    members: dict[str, NpzMember] = {}
    for info in archive.infolist():
        check_data_name(info.filename, where)
        name = info.filename.removesuffix(".npy")
        place = f"{where}, member {info.filename!r}"
        if name in members:
            raise CorruptError("two members of a .npz file have one name", where=place)
        with archive.open(info) as file:
            start = file.read(HEAD)
            if not only_arrays and not start.startswith(np.lib.format.MAGIC_PREFIX):
                continue
            header = read_header(file, place, start, allow_pickle=allow_pickle, only_tensors=only_arrays)
        _check_size(header, info, place)
        members[name] = NpzMember(header, info, place)
    return members


def _check_size(header: Header, info: zipfile.ZipInfo, where: str) -> None:
    size, most = header.offset + header.nbytes, info.compress_size
    if info.compress_type == zipfile.ZIP_DEFLATED:
        most = most * _DEFLATE_RATIO + 1024
    elif info.compress_type != zipfile.ZIP_STORED:
        most = info.file_size  # not written by numpy
    if (info.file_size != size and not header.dtype.hasobject) or info.file_size > most:
        raise CorruptError(
            "the size of a member contradicts its header",
            expected=f"{size} bytes" if not header.dtype.hasobject else f"up to {most} bytes",
            found=f"{info.file_size} bytes, compressed to {info.compress_size}",
            where=where,
        )


def read_member(archive: zipfile.ZipFile, member: NpzMember, *, allow_pickle: bool = False) -> Array:
    """An array, decompressed into memory, with its checksum verified."""
    with file_errors(member.where, *DAMAGE):
        # At most the size in the directory, which was compared with the header.
        content = np.empty(member.info.file_size, np.uint8)
        done = 0
        with archive.open(member.info) as file:
            while piece := file.read(min(_PIECE, len(content) - done)):
                content[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
        if done < len(content):
            raise ValueError(f"{done} of {len(content)} bytes")
        if member.header.dtype.hasobject:
            return load_objects(io.BytesIO(content.data), member.header, member.where, allow_pickle=allow_pickle)
        return array_at(content, member.header)
