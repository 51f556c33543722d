"""The `.npy` layout: a header that says type and shape, then the elements. Headers are untrusted input."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, RankfeedError, SourceError, UnsafeError

#: Read at once to get at a header.
_HEAD = 4096
#: Rows that a header may claim: those without elements take no space.
_MOST_ROWS = 1 << 48


@dataclass(frozen=True)
class Header:
    """What the head of a `.npy` file says.

    Args:
        dtype: of the elements.
        shape: of the array.
        fortran: whether the first dimension varies fastest.
        offset: bytes before the elements.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count


def read_header(file: IO[bytes], where: str, *, allow_pickle: bool = False) -> Header:
    """Read the header at the start of a file.

    Raises:
        CorruptError: it is no such header.
        UnsafeError: the elements are objects, and pickles are not allowed.
    """
    head = io.BytesIO(file.read(_HEAD))
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        if int.from_bytes(head.getvalue()[8 : 10 if version[0] == 1 else 12], "little") > _HEAD:
            head = io.BytesIO(head.getvalue() + file.read(1 << 20))
            head.seek(8)
        # numpy parses the header as a literal, bounded in length, and nothing of it is run.
        reader = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(head)
        if any(not 0 <= extent <= _MOST_ROWS for extent in shape):
            raise ValueError(f"shape {shape}")
    except Exception as error:  # numpy's parser of untrusted text raises what its tokenizer does, too
        raise CorruptError(
            "a .npy file has no proper header", found=str(error)[:200], where=where, remedy="write the file again"
        ) from error
    if dtype.hasobject and not allow_pickle:
        raise UnsafeError(
            "an array of objects is a pickle: reading it runs code that it contains",
            found=f"dtype {dtype}",
            where=where,
            remedy="store numbers; or pass allow_pickle=True if you trust whoever wrote it",
        )
    if dtype.kind not in "biufcO" or dtype.char in "gG":  # long doubles
        raise SourceError("an array of a type that has no tensor", found=f"dtype {dtype}", where=where)
    return Header(dtype, tuple(shape), bool(fortran), head.tell())


def file_header(path: str, *, allow_pickle: bool = False) -> Header:
    """Read the header of a file.

    Raises:
        SourceError: it cannot be read.
        CorruptError: it is not right, or the file is shorter than it says.
        UnsafeError: the elements are objects, and pickles are not allowed.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            header = read_header(file, path, allow_pickle=allow_pickle)
            check_size(header, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise SourceError("the file cannot be read", found=error, where=path) from error
    return header


def check_size(header: Header, size: int, where: str) -> None:
    """Compare the size of a file with its header.

    Raises:
        CorruptError: it is shorter.
    """
    if not header.dtype.hasobject and size < header.offset + header.nbytes:
        raise CorruptError(
            "a .npy file is truncated",
            expected=f"{header.offset + header.nbytes} bytes",
            found=f"{size} bytes",
            where=where,
            remedy="write the file again",
        )


def array_at(data: npt.NDArray[np.uint8], header: Header, start: int = 0) -> npt.NDArray[Any]:
    """The array that a header describes, as a view of the bytes of its file (which were checked to be enough)."""
    begin = start + header.offset
    flat = data[begin : begin + header.nbytes].view(header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def array_in(content: bytes, *, allow_pickle: bool = False) -> npt.NDArray[Any]:
    """The array of a member of an archive, which was read to its end: only then is its checksum compared.

    Args:
        content: of the member, all of it.
        allow_pickle: whether objects may be read.

    Raises:
        ValueError: it is no array, or not the whole of one, or objects that are not allowed; see :class:`reading`.
    """
    file = io.BytesIO(content)
    array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=allow_pickle)
    if file.tell() != len(content):
        raise ValueError(f"an array of {file.tell()} bytes in a member of {len(content)}")
    return array


class reading:
    """Turns what numpy and zipfile raise into errors that name the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, RankfeedError) or not isinstance(error, Exception):
            return
        if isinstance(error, OSError) and not isinstance(error, zipfile.BadZipFile):
            raise SourceError("the file cannot be read", found=error, where=self.path) from error
        if isinstance(error, ValueError) and "allow_pickle" in str(error):
            raise UnsafeError(
                "an array of objects is a pickle: reading it runs code that it contains",
                where=self.path,
                remedy="store numbers; or pass allow_pickle=True if you trust whoever wrote it",
            ) from error
        # RuntimeError: a member that is encrypted, or says so; or compressed in a way that is not implemented.
        # MemoryError: a header that claims more elements than there could be.
        damage = (zipfile.BadZipFile, ValueError, EOFError, KeyError, zlib.error, RuntimeError, MemoryError)
        if isinstance(error, damage):
            raise CorruptError(
                "the file is damaged", found=error, where=self.path, remedy="write it again"
            ) from error
