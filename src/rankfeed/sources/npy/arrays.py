"""Arrays of `.npy` files and `.npz` archives: their headers, which are untrusted, and loading them."""

import io
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns.field import Field, Kind
from rankfeed.errors import CorruptError, SourceError, UnsafeError
from rankfeed.storage.file_errors import file_errors
from rankfeed.storage.mapped import map_file
from rankfeed.storage.untrusted import check_data_name

Array = npt.NDArray[Any]

#: The column of a `.npy` file, which has no name of its own.
ARRAY = "array"
#: Bytes read at once for a header.
_HEAD = 4096
_PIECE = 1 << 20
#: Rows without elements take no space, so a header could claim any number of them.
_MOST_ROWS = 1 << 48
_PARSE_ATTEMPTS = 20
#: Remedies for dtypes that torch does not have, by kind.
_REMEDIES = {
    **dict.fromkeys("US", "write the text to a Parquet, CSV or JSON lines file, or store numbers for it"),
    **dict.fromkeys("Mm", 'convert it once: array.astype("int64")'),
    "f": 'convert it once: array.astype("float64")',
    "c": 'convert it once: array.astype("complex128")',
    "V": "save each field as an array of its own: np.savez(path, name=array[name], ...)",
}
#: Errors of numpy and zipfile for a damaged file. RuntimeError: an encrypted member, or an unknown compression.
#: MemoryError: a header with too many elements.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(ValueError, KeyError, RuntimeError, MemoryError),
)


@dataclass(frozen=True)
class Header:
    """The header of a `.npy` file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool  # whether the first dimension varies fastest
    offset: int  # bytes before the elements

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def field(self, kind: Kind, shape: tuple[int, ...]) -> Field:
        """The field of a column with this dtype; objects have neither dtype nor shape."""
        return Field("object") if self.dtype.hasobject else Field(kind, self.dtype.name, shape)

    def fits(self, field: Field) -> bool:
        """Whether the array is a row of a dense or ragged column."""
        return self.dtype.name == field.dtype and field.accepts(self.shape)


def read_header(
    file: IO[bytes],
    where: str,
    start: bytes | None = None,
    *,
    allow_pickle: bool = False,
    only_tensors: bool = True,
) -> Header:
    """Read a header that begins with ``start``; ``only_tensors`` refuses dtypes that torch does not have."""
    head = io.BytesIO(file.read(_HEAD) if start is None else start)
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        if int.from_bytes(head.getvalue()[8 : 10 if version[0] == 1 else 12], "little") > _HEAD:
            head = io.BytesIO(head.getvalue() + file.read(1 << 20))
            head.seek(8)
        shape, fortran, dtype = _parse_header(head, version)
        if not all(type(extent) is int and 0 <= extent <= _MOST_ROWS for extent in shape):
            raise ValueError(f"shape {shape}")
    except Exception as error:  # numpy's parser also raises errors of the tokenizer
        raise CorruptError("a .npy file has an invalid header", found=str(error)[:200], where=where) from error
    if dtype.hasobject and not allow_pickle:
        raise _is_pickle(dtype, where)
    if only_tensors and (dtype.kind not in "biufcO" or dtype.char in "gG"):  # long doubles
        raise SourceError(
            "an array of a type that has no tensor",
            expected="numbers of a dtype that torch has",
            found=f"dtype {dtype}",
            where=where,
            remedy=_REMEDIES[dtype.kind],
        )
    return Header(dtype, tuple(shape), bool(fortran), head.tell())


def _parse_header(head: IO[bytes], version: tuple[int, int]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype: numpy parses the header as a literal of bounded length, and runs no code."""
    reader = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
    start = head.tell()
    for _ in range(_PARSE_ATTEMPTS):
        try:
            return reader(head)
        except SystemError:  # raised by CPython 3.11 if two threads parse at the same time (gh-106905)
            head.seek(start)
    return reader(head)


def load_objects(file: str | IO[bytes], header: Header, where: str, *, allow_pickle: bool) -> Array:
    """Load an array of objects, if the caller allows it: it runs code that the file contains."""
    if not allow_pickle:
        raise _is_pickle(header.dtype, where)
    try:
        array: Array = np.load(file, allow_pickle=True)
        if array.shape != header.shape or not array.dtype.hasobject:
            raise ValueError(f"{array.dtype}{list(array.shape)}, not object{list(header.shape)}")
    except Exception as error:  # a pickle may raise anything
        raise CorruptError(
            "an array of objects cannot be read",
            found=f"{type(error).__name__}: {error}",
            where=where,
            remedy="install the packages of its objects, or write the file again",
        ) from error
    return array


def _is_pickle(dtype: object, where: str) -> UnsafeError:
    return UnsafeError(
        "an array of objects is a pickle: reading it runs code that it contains",
        found=f"dtype {dtype}",
        where=where,
        remedy="store numbers; or pass allow_pickle=True if you trust the author of the file",
    )


def check_size(header: Header, size: int, where: str) -> None:
    """Raise a CorruptError if a file is shorter than its header says."""
    if not header.dtype.hasobject and size < header.offset + header.nbytes:
        raise CorruptError(
            "a .npy file is truncated",
            expected=f"{header.offset + header.nbytes} bytes",
            found=f"{size} bytes",
            where=where,
        )


def array_at(data: npt.NDArray[np.uint8], header: Header, start: int = 0) -> Array:
    """The array of a header as a view of the bytes of its file, whose size was checked."""
    if not header.dtype.itemsize:  # text of length 0
        return np.empty(header.shape, header.dtype)
    begin = start + header.offset
    flat = data[begin : begin + header.nbytes].view(header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


@dataclass(frozen=True)
class NpzMember:
    """An array in an archive."""

    header: Header
    info: zipfile.ZipInfo
    where: str  # its name in error messages


def members_of(
    archive: zipfile.ZipFile, where: str, *, allow_pickle: bool = False, only_arrays: bool = True
) -> dict[str, NpzMember]:
    """The arrays of an archive by name; ``only_arrays`` refuses members that are not arrays of numbers."""
    members: dict[str, NpzMember] = {}
    for info in archive.infolist():
        check_data_name(info.filename, where)
        name = info.filename.removesuffix(".npy")
        place = f"{where}, member {info.filename!r}"
        if name in members:
            raise CorruptError("two members of a .npz file have one name", where=place)
        with archive.open(info) as file:
            start = file.read(_HEAD)
            if not only_arrays and not start.startswith(np.lib.format.MAGIC_PREFIX):
                continue
            header = read_header(file, place, start, allow_pickle=allow_pickle, only_tensors=only_arrays)
        size = header.offset + header.nbytes
        if info.file_size != size and not header.dtype.hasobject:
            raise CorruptError(
                "the size of a member contradicts its header",
                expected=f"{size} bytes",
                found=f"{info.file_size} bytes",
                where=place,
            )
        members[name] = NpzMember(header, info, place)
    return members


def read_member(archive: zipfile.ZipFile, member: NpzMember, *, allow_pickle: bool = False) -> Array:
    """An array, decompressed into memory, with its checksum verified."""
    with file_errors(member.where, *_DAMAGE):
        # Its pages take no memory before they are written, so a false size costs nothing.
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


def read_headers(path: str, *, allow_pickle: bool = False) -> dict[str, Header]:
    """The header of each array of a file, whose size is checked."""
    with file_errors(path, *_DAMAGE):
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
    names: Collection[str],
    *,
    mapped: bool,
    allow_pickle: bool = False,
    check: Callable[[str, Header], None] = lambda name, header: None,
) -> dict[str, Array]:
    """Arrays of a file: views of the mapped file where possible, or read; ``check`` precedes any allocation."""
    with file_errors(path, *_DAMAGE):
        if path.endswith(".npz"):
            with zipfile.ZipFile(path) as archive:
                members = members_of(archive, path, allow_pickle=allow_pickle)
                missing = [name for name in names if name not in members]
                if missing:
                    raise SourceError(
                        "a file lacks arrays that others have",
                        expected=", ".join(names),
                        found=f"no {', '.join(missing)}",
                        where=path,
                        remedy="write the file again with these arrays, or leave them out of columns=",
                    )
                for name in names:
                    check(name, members[name].header)
                data = map_file(path) if mapped else None
                return {name: _load_member(archive, members[name], data, allow_pickle) for name in names}
        with open(path, "rb") as file:
            header = read_header(file, path, allow_pickle=allow_pickle)
            check(ARRAY, header)
            if header.dtype.hasobject:
                return {ARRAY: load_objects(path, header, path, allow_pickle=allow_pickle)}
            check_size(header, os.fstat(file.fileno()).st_size, path)
            if mapped:
                return {ARRAY: array_at(map_file(path), header)}
            file.seek(header.offset)
            content = np.empty(header.nbytes, np.uint8)
            check_size(header, header.offset + file.readinto(content.data), path)
            return {ARRAY: array_at(content, header, -header.offset)}


def _load_member(
    archive: zipfile.ZipFile, member: NpzMember, data: npt.NDArray[np.uint8] | None, allow_pickle: bool
) -> Array:
    """An array as a view of the bytes of its archive, if they are given and it is stored there, or read."""
    info = member.info
    if data is None or info.compress_type != zipfile.ZIP_STORED or member.header.dtype.hasobject:
        array = read_member(archive, member, allow_pickle=allow_pickle)
        array.flags.writeable = data is None  # otherwise it is kept, like a mapped one
        return array
    # The local header: 30 bytes, the name, an extra field.
    local = data[info.header_offset : info.header_offset + 30].tobytes()
    name_size, extra_size = int.from_bytes(local[26:28], "little"), int.from_bytes(local[28:30], "little")
    start = info.header_offset + 30 + name_size + extra_size
    if local[:4] != b"PK\x03\x04" or start + info.file_size > len(data):
        raise CorruptError("the file is damaged", found="a wrong local header", where=member.where)
    checksum = zlib.crc32(data[start : start + info.file_size].data)
    if checksum != info.CRC:
        raise CorruptError(
            "the file is damaged", expected=f"checksum {info.CRC:08x}", found=f"{checksum:08x}", where=member.where
        )
    return array_at(data, member.header, start)
