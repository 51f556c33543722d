"""A single `.npy` or `.npz` file whose rows along the first dimension are samples, and tables of such files."""

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
from rankfeed.sources.npy.npz import NpzMember, read_member, read_members
from rankfeed.sources.source import (
    BLOCK_BYTES,
    Int64,
    Source,
    check_columns,
    check_ids,
    even_blocks,
    reopen,
)
from rankfeed.storage import DataFiles, check_not_truncated, digest_of, map_file

#: The column of a `.npy` file, which has no name of its own.
ARRAY = "array"


class NumpyFileSource(Source):
    """Rows of one `.npy` file (column "array"), or of the arrays in one `.npz` file.

    The file is memory-mapped; compressed members of a `.npz` are decompressed into memory. The checksum of a
    member
    is verified before its first row is read: that reads the whole member, once in each process.

    Args:
        path: of the file.
        columns: names of the columns to offer; None for all.
        allow_pickle: whether arrays of objects may be read, which runs code that they contain.
        files: what another process of the job saw first; None for the process that opens.

    Raises:
        SourceError: the file cannot be read, has no rows, or its arrays differ in their first dimension.
        CorruptError: it is damaged.
        UnsafeError: it has objects, and these are not allowed.
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
        self._members: dict[str, NpzMember] | None = None
        if path.endswith(".npz"):
            self._members = read_members(path, path, allow_pickle=allow_pickle)
            headers = {name: member.header for name, member in self._members.items()}
        else:
            headers = {ARRAY: file_header(path, allow_pickle=allow_pickle)}
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
        self._headers = {name: headers[name] for name in check_columns(self._wanted, headers)}
        init_in_each_process(self._init_process)

    def _init_process(self) -> None:
        """Create the lock: in a forked child, one of the parent could stay locked."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"columns": self._wanted, "allow_pickle": self.allow_pickle, "files": self.files}
        return reopen, (NumpyFileSource, self.path, options, self.fingerprint)

    def _num_samples(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"NumpyFileSource({self.path!r}, {len(self)} samples)"

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        return {
            name: Field("object")
            if header.dtype.hasobject
            else Field("dense", header.dtype.name, header.shape[1:])
            for name, header in self._headers.items()
        }

    @cached_property
    def blocks(self) -> Int64:
        """Rows of about 4 MiB: int64."""
        row_bytes = sum(field.row_bytes() for field in self.fields.values())
        return even_blocks(self._length, BLOCK_BYTES // row_bytes if row_bytes else self._length)

    @cached_property
    def fingerprint(self) -> str:
        schema = ",".join(f"{name}:{header!r}" for name, header in self._headers.items())
        return digest_of(schema.encode(), self.files.fingerprint.encode())

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
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
        """Map the arrays that are not compressed, and read the others."""
        with self._lock:
            names = [name for name in names if name not in self._arrays]  # loaded by another thread
            loaded: dict[str, npt.NDArray[Any]] = {}
            if names and self._members is None:
                loaded[ARRAY] = self._load_npy(self._headers[ARRAY])
            elif self._members is not None:
                loaded = self._load_members({name: self._members[name] for name in names})
            self.files.opened(0)
            self._arrays.update(loaded)

    def _load_npy(self, header: Header) -> npt.NDArray[Any]:
        if header.dtype.hasobject:
            return load_objects(self.path, header, self.path, allow_pickle=self.allow_pickle)
        data = map_file(self.path)
        check_size(header, len(data), self.path)
        return array_at(data, header)

    def _load_members(self, members: Mapping[str, NpzMember]) -> dict[str, npt.NDArray[Any]]:
        """Load members, of which an archive may have thousands: it is opened and mapped once."""
        loaded: dict[str, npt.NDArray[Any]] = {}
        data: npt.NDArray[np.uint8] | None = None
        with reading(self.path), zipfile.ZipFile(self.path) as archive:
            for name, member in members.items():
                if member.is_mappable:
                    data = map_file(self.path) if data is None else data
                    loaded[name] = _map_member(data, member)
                else:
                    loaded[name] = read_member(archive, member, allow_pickle=self.allow_pickle)
                    loaded[name].flags.writeable = False  # it is kept, like a mapped one
        return loaded


def _map_member(data: npt.NDArray[np.uint8], member: NpzMember) -> npt.NDArray[Any]:
    """An array as a view of the bytes of its archive."""
    info = member.info
    # The local header: 30 bytes, the name, an extra field.
    local = data[info.header_offset : info.header_offset + 30].tobytes()
    start = (
        info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    )
    if local[:4] != b"PK\x03\x04" or start + info.file_size > len(data):
        raise CorruptError("the file is damaged", found="a wrong local header", where=member.where)
    checksum = _checksum(data[start : start + info.file_size])
    if checksum != info.CRC:
        raise CorruptError(
            "the file is damaged",
            expected=f"checksum {info.CRC:08x}",
            found=f"{checksum:08x}",
            where=member.where,
            remedy="fetch the file again, or write it again",
        )
    return array_at(data, member.header, start)


def _checksum(content: npt.NDArray[np.uint8]) -> int:
    return zlib.crc32(content.data)


class NumpyColumnsSource(Source):
    """Equally long `.npy` files as the columns of one table: row i of each file is sample i.

    Args:
        paths: of the files; a column has the name of its file, without the suffix.
        columns: names of the columns to offer; None for all.
        allow_pickle: whether arrays of objects may be read.

    Raises:
        SourceError: two files have the same name, or arrays differ in their first dimension; names both.
        CorruptError, UnsafeError: see `NumpyFileSource`.
    """

    def __init__(
        self, paths: Sequence[str], *, columns: Sequence[str] | None = None, allow_pickle: bool = False
    ) -> None:
        self._files: dict[str, NumpyFileSource] = {}
        for path in paths:
            name = column_name(path)
            if name in self._files:
                raise SourceError(
                    "two columns have one name",
                    expected="files of different names",
                    found=f"{self._files[name].path} and {path}",
                    remedy="rename one of them, or leave it out",
                )
            self._files[name] = NumpyFileSource(path, allow_pickle=allow_pickle)
        first = next(iter(self._files.values()))
        for each in self._files.values():
            if len(each) != len(first):
                raise SourceError(
                    "columns differ in their number of rows",
                    expected=f"{len(first)} rows, as in {first.path}",
                    found=f"{len(each)} rows",
                    where=each.path,
                    remedy='leave the file out; or pass layout="samples" if each file is a sample',
                )
        self._names = check_columns(columns, self._files)

    def _num_samples(self) -> int:
        return len(next(iter(self._files.values())))

    def __repr__(self) -> str:
        return f"NumpyColumnsSource({', '.join(self._names)}: {len(self)} samples)"

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        return {name: self._files[name].fields[ARRAY] for name in self._names}

    @cached_property
    def blocks(self) -> Int64:
        """The blocks of the file with the largest rows: int64."""
        return max((self._files[name].blocks for name in self._names), key=len)

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(*(self._files[name].fingerprint.encode() for name in self._names))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        return Columns({name: self._files[name].fetch(ids)[ARRAY] for name in names}, len(ids))

    def check_unchanged(self) -> None:
        for each in self._files.values():
            each.check_unchanged()


def column_name(path: str) -> str:
    """The name of a file without its suffix.

    Examples:
        >>> column_name("data/x_train.npy")
        'x_train'
    """
    return os.path.splitext(os.path.basename(path))[0]
