"""The header of a `.npy` file: type and shape of the elements after it. Headers are untrusted."""

import io
import lzma
import math
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Field
from rankfeed.errors import CorruptError, SourceError, UnsafeError

Array = npt.NDArray[Any]

#: Bytes read at once for a header.
HEAD = 4096
#: Rows without elements take no space, so a header could claim any number of them.
_MOST_ROWS = 1 << 48
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
_PARSE_ATTEMPTS = 20
_DECODER_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)
#: Errors of numpy and zipfile for a damaged file. RuntimeError: an encrypted member, or an unknown compression.
#: MemoryError: a header with too many elements.
DAMAGE = (*_DECODER_ERRORS, ValueError, KeyError, RuntimeError, MemoryError)


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

    def fits(self, field: Field) -> bool:
        """Whether the array is a row of a dense or ragged column."""
        shape = self.shape[1:] if field.kind == "ragged" else self.shape
        same_rank = field.kind != "ragged" or len(self.shape) == len(field.shape) + 1
        return self.dtype.name == field.dtype and shape == field.shape and same_rank


def read_header(
    file: IO[bytes],
    where: str,
    start: bytes | None = None,
    *,
    allow_pickle: bool = False,
    only_tensors: bool = True,
) -> Header:
    """Read the header of a file, whose first :data:`HEAD` bytes may be given as ``start``.

    ``only_tensors`` refuses dtypes that torch does not have (text, dates, records).
    """
    head = io.BytesIO(file.read(HEAD) if start is None else start)
    try:
        version = np.lib.format.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}")
        if int.from_bytes(head.getvalue()[8 : 10 if version[0] == 1 else 12], "little") > HEAD:
            head = io.BytesIO(head.getvalue() + file.read(1 << 20))
            head.seek(8)
        shape, fortran, dtype = _parse_header(head, version)
        _check_shape(shape, dtype.itemsize)
    except Exception as error:  # numpy's parser also raises errors of the tokenizer
        raise CorruptError("a .npy file has no proper header", found=str(error)[:200], where=where) from error
    if dtype.hasobject and not allow_pickle:
        raise _is_pickle(dtype, where)
    if only_tensors and (dtype.kind not in "biufcO" or dtype.char in "gG"):  # long doubles
        raise SourceError("an array of a type that has no tensor", found=f"dtype {dtype}", where=where)
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


def _check_shape(shape: tuple[Any, ...], item: int) -> None:
    """Raise a ValueError for a shape that no array of numpy can have."""
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions, of at most {_MOST_DIMENSIONS}")
    if not all(type(extent) is int and 0 <= extent <= _MOST_ROWS for extent in shape):
        raise ValueError(f"shape {shape}")
    if max(1, item) * math.prod(max(1, extent) for extent in shape) >= 1 << 63:  # as numpy, also for empty arrays
        raise ValueError(f"shape {shape}, of more bytes than can be addressed")


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
