"""`.npy` and `.npz` files whose rows along the first dimension are samples: one file, or a table of columns."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy.typing as npt

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.columns import Column, Columns, Dense, Field, Objects, RowTake
from rankfeed.errors import SourceError
from rankfeed.sources.npy.arrays import ARRAY, load_arrays, read_headers
from rankfeed.sources.npy.header import Array
from rankfeed.sources.source import BLOCK_BYTES, Int64, Source, check_columns, check_ids, even_blocks, reopen
from rankfeed.storage import DataFiles, check_not_truncated, digest_of


class NumpyFileSource(Source):
    """Rows of one `.npy` file (column "array"), or of the arrays in one `.npz` file.

    The file is memory-mapped; compressed members of a `.npz` are decompressed into memory. The checksum of a
    member is verified before its first row is read: that reads the whole member, once in each process.
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
        self._arrays: dict[str, Array] = {}
        self.files = DataFiles([self.path]) if files is None else files.reopened([self.path])
        headers = read_headers(path, allow_pickle=allow_pickle)
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
        with self._lock:
            names = [name for name in names if name not in self._arrays]  # loaded by another thread
            if names:
                loaded = load_arrays(self.path, names, mapped=True, allow_pickle=self.allow_pickle)
                self.files.opened(0)
                self._arrays.update(loaded)


class NumpyColumnsSource(Source):
    """Equally long `.npy` files as the columns of one table: row i of each file is sample i."""

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
    """The name of a file without its suffix: ``x_train`` for ``data/x_train.npy``."""
    return os.path.splitext(os.path.basename(path))[0]
