"""The `.npy` layout: a header that says type and shape, then the elements. Headers are untrusted input."""

from __future__ import annotations

import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, RankfeedError, SourceError, UnsafeError

#: Read at once to get at a header.
HEAD = 4096
#: Rows that a header may claim: those without elements take no space.
_MOST_ROWS = 1 << 48
#: Dimensions of an array of numpy's.
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


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


def read_header(
    file: IO[bytes],
    where: str,
    start: bytes | None = None,
    *,
    allow_pickle: bool = False,
    only_tensors: bool = True,
) -> Header:
    """Read the header at the start of a file.

    Args:
        file: open for reading.
        where: what it is called in errors.
        start: its first :data:`HEAD` bytes, where these have been read.
        allow_pickle: whether arrays of objects are allowed.
        only_tensors: whether types that torch has no tensors of (text, dates, records) are errors.

    Raises:
        CorruptError: it is no such header.
        UnsafeError: the elements are objects, and pickles are not allowed.
    """
    head = io.BytesIO(file.read(HEAD) if start is None else start)
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        if int.from_bytes(head.getvalue()[8 : 10 if version[0] == 1 else 12], "little") > HEAD:
            head = io.BytesIO(head.getvalue() + file.read(1 << 20))
            head.seek(8)
        # numpy parses the header as a literal, bounded in length, and nothing of it is run.
        reader = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = _parsed(reader, head)
        _check_shape(shape, dtype.itemsize)
    except Exception as error:  # numpy's parser of untrusted text raises what its tokenizer does, too
        raise CorruptError(
            "a .npy file has no proper header", found=str(error)[:200], where=where, remedy="write the file again"
        ) from error
    if dtype.hasobject and not allow_pickle:
        raise _is_pickle(dtype, where)
    if only_tensors and (dtype.kind not in "biufcO" or dtype.char in "gG"):  # long doubles
        raise SourceError("an array of a type that has no tensor", found=f"dtype {dtype}", where=where)
    return Header(dtype, tuple(shape), bool(fortran), head.tell())


def _parsed(reader: Callable[[IO[bytes]], Any], head: IO[bytes]) -> Any:
    """What a reader of numpy's finds, asked again where Python's parser failed for a reason of its own.

    CPython 3.11 parses one literal at a time: where a finalizer or another thread parses one meanwhile, it raises
    SystemError (python/cpython#106905).
    """
    start = head.tell()
    for _ in range(9):
        try:
            return reader(head)
        except SystemError:
            head.seek(start)
    return reader(head)


def _check_shape(shape: tuple[Any, ...], item: int) -> None:
    """Refuse a shape that numpy has no array of; sizes without elements are multiplied too, as numpy does."""
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions, of at most {_MOST_DIMENSIONS}")
    size = max(1, item)
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= _MOST_ROWS:
            raise ValueError(f"shape {shape}")
        size *= max(1, extent)
    if size >= 1 << 63:
        raise ValueError(f"shape {shape}, of more bytes than can be addressed")


def load_objects(file: str | IO[bytes], header: Header, where: str, *, allow_pickle: bool) -> npt.NDArray[Any]:
    """An array of objects; reading it runs code that it contains.

    Raises:
        UnsafeError: that is not allowed.
        CorruptError: it cannot be unpickled, or is not what its header says.
    """
    if not allow_pickle:
        raise _is_pickle(header.dtype, where)
    try:
        array: npt.NDArray[Any] = np.load(file, allow_pickle=True)
        if array.shape != header.shape or not array.dtype.hasobject:
            raise ValueError(f"{array.dtype}{list(array.shape)}, and not object{list(header.shape)}")
    except Exception as error:  # a pickle raises what it likes
        raise CorruptError(
            "an array of objects cannot be read",
            found=f"{type(error).__name__}: {error}",
            where=where,
            remedy="install what its objects are of, or write the file again",
        ) from error
    return array


def _is_pickle(dtype: object, where: str) -> UnsafeError:
    return UnsafeError(
        "an array of objects is a pickle: reading it runs code that it contains",
        found=f"dtype {dtype}",
        where=where,
        remedy="store numbers; or pass allow_pickle=True if you trust the author of the file",
    )


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
    if not header.dtype.itemsize:  # texts without a character
        return np.empty(header.shape, header.dtype)
    begin = start + header.offset
    flat = data[begin : begin + header.nbytes].view(header.dtype)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


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
        # RuntimeError: a member that is encrypted, or says so; or compressed in a way that is not implemented.
        # MemoryError: a header that claims more elements than there could be.
        damage = (
            zipfile.BadZipFile,
            ValueError,
            EOFError,
            KeyError,
            zlib.error,
            lzma.LZMAError,
            RuntimeError,
            MemoryError,
        )
        if isinstance(error, damage):
            raise CorruptError(
                "the file is damaged", found=error, where=self.path, remedy="write it again"
            ) from error
