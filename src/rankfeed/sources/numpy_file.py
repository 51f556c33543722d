"""A single `.npy` or `.npz` file: samples are rows along the first dimension."""

from __future__ import annotations

import os
import threading
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Dense, Field, Rows
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.npy import Header, array_at, check_size, file_header, read_header, reading
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import check_whole, digest_of, map_file, touched
from rankfeed.storage.forks import start_in_each_process

#: About what is read in one go.
_BLOCK_BYTES = 4 << 20
#: Bytes that go into a checksum at once.
_SUMMED = 16 << 20


class NumpyFileSource(Source):
    """Rows of one `.npy` file (column "array"), or of the arrays in one `.npz` file.

    The file is memory-mapped; members of a `.npz` that are compressed are decompressed into memory. A member's
    checksum is compared before its first row is given out: that reads the whole member, once in each process.

    Args:
        path: of the file.
        columns: names of those to offer; None for all.

    Raises:
        SourceError: it cannot be read, has no rows, or its arrays differ in their first dimension.
        CorruptError: it is damaged.
        UnsafeError: it holds objects.
    """

    def __init__(self, path: str, *, columns: Sequence[str] | None = None) -> None:
        self.path = os.path.abspath(path)
        self._wanted = None if columns is None else tuple(columns)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        try:
            self._size = os.stat(path).st_size
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=path) from error
        headers = npz_headers(path) if path.endswith(".npz") else {"array": file_header(path)}
        if any(not header.shape for header in headers.values()):
            raise SourceError("an array without dimensions has no rows", where=path)
        lengths = {name: header.shape[0] for name, header in headers.items()}
        if len(set(lengths.values())) != 1 or not min(lengths.values()):
            raise SourceError(
                "the arrays of the file have no rows in common",
                expected="arrays of one length, at least 1",
                found=", ".join(f"{name!r}: {length}" for name, length in lengths.items()) or "no arrays",
                where=path,
            )
        self._length = min(lengths.values())
        self._headers = {name: headers[name] for name in check_columns(self._wanted, self._all_fields(headers))}
        start_in_each_process(self)

    def start_anew(self) -> None:
        """In a forked child a thread of the parent may hold the lock, and never let go of it there."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._wanted, self.fingerprint)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"NumpyFileSource({self.path!r}, {len(self)} samples)"

    @staticmethod
    def _all_fields(headers: Mapping[str, Header]) -> dict[str, Field]:
        return {name: Field("dense", header.dtype.name, header.shape[1:]) for name, header in headers.items()}

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._all_fields(self._headers)

    @cached_property
    def blocks(self) -> Int64:
        """Runs of rows of about 4 MiB: int64."""
        row_bytes = sum(field.row_bytes() for field in self.fields.values())
        rows = max(1, min(self._length, _BLOCK_BYTES // row_bytes)) if row_bytes else self._length
        full, rest = divmod(self._length, rows)
        return np.array([rows] * full + [rest] * (rest > 0), np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Of name, size, types and shapes."""
        schema = ",".join(f"{name}:{header}" for name, header in self._headers.items())
        return digest_of(os.fsencode(os.path.basename(self.path)), str(self._size).encode(), schema.encode())

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into the mapped file; copied where they do not lie as in a batch.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or the file cannot be read.
            CorruptError: an array is damaged.
        """
        ids = check_ids(sample_ids, self._length)
        out = {}
        for name in check_columns(columns, self.fields):
            array = self._array(name)
            check_whole(array, self.path)
            if array.dtype.isnative and array.flags.c_contiguous and array.flags.aligned:
                out[name] = Dense([Rows(array, ids)])
            else:  # numpy's take would copy the whole array first
                out[name] = Dense.of(array[ids].astype(array.dtype.newbyteorder("="), order="C", copy=False))
        touched(lambda: sum(column.nbytes for column in out.values()), len(ids) * len(out))
        return Columns(out, len(ids))

    def _array(self, name: str) -> npt.NDArray[Any]:
        found = self._arrays.get(name)
        if found is None:
            with self._lock:
                found = self._arrays.get(name)
                if found is None:  # no other thread was quicker
                    found = self._arrays[name] = self._load(name)
        return found

    def _load(self, name: str) -> npt.NDArray[Any]:
        header = self._headers[name]
        if not self.path.endswith(".npz"):
            data = map_file(self.path)
            check_size(header, len(data), self.path)
            return array_at(data, header)
        with reading(self.path), zipfile.ZipFile(self.path) as archive:
            info = archive.getinfo(name + ".npy")
            if info.compress_type != zipfile.ZIP_STORED:
                content = archive.read(info)
                check_size(header, len(content), f"{self.path}, array {name!r}")
                return array_at(np.frombuffer(content, np.uint8), header)
        data = map_file(self.path)
        # A member that is not compressed lies as it is behind its local header: 30 bytes, name, extra field.
        local = data[info.header_offset : info.header_offset + 30].tobytes()
        start = (
            info.header_offset
            + 30
            + int.from_bytes(local[26:28], "little")
            + int.from_bytes(local[28:30], "little")
        )
        where = f"{self.path}, array {name!r}"
        if local[:4] != b"PK\x03\x04" or start + header.offset + header.nbytes > len(data):
            raise CorruptError("the file is damaged", found="a wrong local header", where=where)
        check_size(header, info.file_size, where)
        if (found := _checksum(data[start : start + info.file_size])) != info.CRC:
            raise CorruptError(
                "the file is damaged",
                expected=f"checksum {info.CRC:08x}",
                found=f"{found:08x}",
                where=where,
                remedy="fetch the file anew, or write it again",
            )
        return array_at(data, header, start)


def npz_headers(path: str, *, allow_pickle: bool = False) -> dict[str, Header]:
    """The headers of the arrays in a `.npz` file, by their names.

    Raises:
        SourceError: it cannot be read.
        CorruptError: it is damaged.
        UnsafeError: it holds objects, and pickles are not allowed.
    """
    headers = {}
    with reading(path), zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                where = f"{path}, member {member!r}"
                headers[member.removesuffix(".npy")] = read_header(file, where, allow_pickle=allow_pickle)
    return headers


def _checksum(content: npt.NDArray[np.uint8]) -> int:
    """The checksum that an archive keeps of a member, which may be larger than what may stay mapped."""
    found = 0
    for start in range(0, len(content), _SUMMED):
        piece = content[start : start + _SUMMED]
        touched(piece.__len__)
        found = zlib.crc32(piece.data, found)
    return found


def _reopen(path: str, columns: Any, fingerprint: str) -> NumpyFileSource:
    source = NumpyFileSource(path, columns=columns)
    if source.fingerprint != fingerprint:
        raise SourceError("the file changed while it was in use", where=path)
    return source
