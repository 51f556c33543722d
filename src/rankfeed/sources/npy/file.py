"""A single `.npy` or `.npz` file: samples are rows along the first dimension."""

from __future__ import annotations

import os
import threading
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.columns import Column, Columns, Dense, Field, Objects, RowTake
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.npy.header import Header, array_at, check_size, file_header, load_objects, reading
from rankfeed.sources.npy.npz import Member, read_member, read_members
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import DataFiles, check_not_truncated, digest_of, map_file

#: The column of a `.npy` file, which has no name of its own.
_ARRAY = "array"
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
        allow_pickle: whether arrays of objects may be read, which runs code that they contain.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError: it cannot be read, has no rows, or its arrays differ in their first dimension.
        CorruptError: it is damaged.
        UnsafeError: it holds objects, and these are not allowed.
    """

    files: DataFiles

    def __init__(
        self,
        path: str,
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        files: DataFiles | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self.allow_pickle = allow_pickle
        self._wanted = None if columns is None else tuple(columns)
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self.files = DataFiles([self.path]) if files is None else files.reopened([self.path])
        self._members: dict[str, Member] | None = None
        if path.endswith(".npz"):
            self._members = read_members(path, path, allow_pickle=allow_pickle)
            headers = {name: member.header for name, member in self._members.items()}
        else:
            headers = {_ARRAY: file_header(path, allow_pickle=allow_pickle)}
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
        init_in_each_process(self.start_anew)

    def start_anew(self) -> None:
        """In a forked child a thread of the parent may hold the lock, and never let go of it there."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._wanted, self.allow_pickle, self.fingerprint, self.files)

    def _num_samples(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"NumpyFileSource({self.path!r}, {len(self)} samples)"

    @staticmethod
    def _all_fields(headers: Mapping[str, Header]) -> dict[str, Field]:
        return {
            name: Field("object")
            if header.dtype.hasobject
            else Field("dense", header.dtype.name, header.shape[1:])
            for name, header in headers.items()
        }

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
        """Of name, size, types, shapes, and content samples."""
        schema = ",".join(f"{name}:{header}" for name, header in self._headers.items())
        return digest_of(schema.encode(), self.files.fingerprint.encode())

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
        names = check_columns(columns, self.fields)
        self.files.check_open(at_intervals=True)
        if not self._arrays.keys() >= set(names):
            self._load(names)
        out: dict[str, Column] = {}
        for name in names:
            array = self._arrays[name]
            check_not_truncated(array, self.path)
            if array.dtype.hasobject:
                out[name] = Objects([deepcopy(each) for each in array[ids]])  # the array is kept
            elif array.dtype.isnative and array.flags.c_contiguous and array.flags.aligned:
                out[name] = Dense([RowTake(array, ids)])
            else:  # numpy's take would copy the whole array first
                out[name] = Dense.of(array[ids].astype(array.dtype.newbyteorder("="), order="C", copy=False))
        return Columns(out, len(ids))

    def _load(self, names: Sequence[str]) -> None:
        """Map those arrays that are not compressed, read the others, and compare their checksums."""
        with self._lock:
            names = [name for name in names if name not in self._arrays]  # another thread may have been quicker
            loaded: dict[str, npt.NDArray[Any]] = {}
            if names and self._members is None:
                loaded[_ARRAY] = self._load_npy(self._headers[_ARRAY])
            elif self._members is not None:
                loaded = self._load_members([(name, self._members[name]) for name in names])
            self.files.opened(0)
            self._arrays.update(loaded)

    def _load_npy(self, header: Header) -> npt.NDArray[Any]:
        if header.dtype.hasobject:
            return load_objects(self.path, header, self.path, allow_pickle=self.allow_pickle)
        data = map_file(self.path)
        check_size(header, len(data), self.path)
        return array_at(data, header)

    def _load_members(self, members: Sequence[tuple[str, Member]]) -> dict[str, npt.NDArray[Any]]:
        """The archive is opened and mapped once for all of them: it may have thousands."""
        loaded: dict[str, npt.NDArray[Any]] = {}
        stored = [(name, member) for name, member in members if member.is_stored]
        packed = [(name, member) for name, member in members if not member.is_stored]
        if stored:
            data = map_file(self.path)
            for name, member in stored:
                loaded[name] = _map_member(data, member)
        if packed:
            with reading(self.path), zipfile.ZipFile(self.path) as archive:
                for name, member in packed:
                    array = read_member(archive, member, allow_pickle=self.allow_pickle)
                    array.flags.writeable = False  # it is kept, as a mapped one
                    loaded[name] = array
        return loaded


def _map_member(data: npt.NDArray[np.uint8], member: Member) -> npt.NDArray[Any]:
    """An array as a view of the bytes of its archive."""
    info = member.info
    # A member that is not compressed lies as it is behind its local header: 30 bytes, name, extra field.
    local = data[info.header_offset : info.header_offset + 30].tobytes()
    start = (
        info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    )
    if local[:4] != b"PK\x03\x04" or start + info.file_size > len(data):
        raise CorruptError("the file is damaged", found="a wrong local header", where=member.where)
    if (found := _checksum(data[start : start + info.file_size])) != info.CRC:
        raise CorruptError(
            "the file is damaged",
            expected=f"checksum {info.CRC:08x}",
            found=f"{found:08x}",
            where=member.where,
            remedy="fetch the file again, or write it again",
        )
    return array_at(data, member.header, start)


def _checksum(content: npt.NDArray[np.uint8]) -> int:
    """The checksum that an archive keeps of a member, which may be larger than what may stay mapped."""
    found = 0
    for start in range(0, len(content), _SUMMED):
        piece = content[start : start + _SUMMED]
        found = zlib.crc32(piece.data, found)
    return found


def _reopen(path: str, columns: Any, allow_pickle: bool, fingerprint: str, files: DataFiles) -> NumpyFileSource:
    source = NumpyFileSource(path, columns=columns, allow_pickle=allow_pickle, files=files)
    if source.fingerprint != fingerprint:
        raise SourceError("the file changed while it was in use", where=path)
    return source
