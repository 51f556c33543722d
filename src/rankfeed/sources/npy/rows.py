"""`.npy` and `.npz` files whose rows along the first dimension are samples: one file, or columns of one table."""

import os
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed.columns.columns import Column, Dense, Objects
from rankfeed.columns.pointers import file_of
from rankfeed.errors import SourceError, listed
from rankfeed.sources.npy.arrays import Array, Header, load_arrays, read_headers
from rankfeed.sources.paths import label
from rankfeed.sources.source import BLOCK_BYTES, Int64, Source, check_columns, even_blocks
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles
from rankfeed.storage.mapped import check_not_truncated


class NumpyRowsSource(Source):
    """Rows of the arrays of a `.npy` file (column "array") or `.npz` file, or of several `.npy` files.

    ``named_by_file`` names columns after their files. Files are memory-mapped; compressed members of a `.npz` are
    decompressed into memory. The checksum of a member is verified before its first row is read: that reads the
    whole member, once in each process.
    """

    files: DataFiles

    def __init__(
        self,
        paths: Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        named_by_file: bool = False,
    ) -> None:
        self._paths = [os.path.abspath(path) for path in paths]
        self._allow_pickle = allow_pickle
        self.files = DataFiles(self._paths)
        headers: dict[str, Header] = {}
        #: Column -> number of its file, and name of the array in it.
        self._places: dict[str, tuple[int, str]] = {}
        for file, path in enumerate(self._paths):
            for array, header in read_headers(path, allow_pickle=allow_pickle).items():
                name = Path(path).stem if named_by_file else array
                if name in headers:
                    raise SourceError(
                        "two columns have one name",
                        expected="files of different names",
                        found=f"{self._path(name)} and {path}",
                        remedy="rename one of them, or leave it out",
                    )
                headers[name], self._places[name] = header, (file, array)
        length = self._common_length(headers)
        headers = {name: headers[name] for name in check_columns(columns, headers)}
        self._arrays: dict[str, Array] = {}
        fields = {name: header.field("dense", header.shape[1:]) for name, header in headers.items()}
        self.reads_in_place = all(
            header.dtype.isnative and not header.dtype.hasobject and not header.fortran
            for header in headers.values()
        )
        row_bytes = sum(field.row_bytes() for field in fields.values())
        schema = ",".join(f"{name}:{header!r}" for name, header in headers.items())
        self._init_samples(
            label(self._paths),
            fields,
            even_blocks(length, BLOCK_BYTES // row_bytes if row_bytes else length),
            digest_of(schema.encode(), self.files.fingerprint.encode()),
        )
        init_in_each_process(self._init_process)

    def _common_length(self, headers: Mapping[str, Header]) -> int:
        lengths = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
        first = next(iter(lengths.values()), 0)
        if len({*lengths.values()}) != 1 or not first:
            other_name = next((name for name, length in lengths.items() if length != first), None)
            raise SourceError(
                "the arrays have no rows in common",
                expected="arrays of one length, at least 1",
                found=listed([f"{length} rows of {name!r}" for name, length in lengths.items()], 20)
                or "no arrays",
                where=self._paths[0] if other_name is None else self._path(other_name),
                remedy='leave out what does not belong; or pass layout="samples" if each file is a sample',
            )
        return first

    def _path(self, name: str) -> str:
        return self._paths[self._places[name][0]]

    def _init_process(self) -> None:
        """Create the lock: in a forked child, one of the parent could stay locked."""
        self._lock = threading.RLock()  # a signal handler may read samples while this thread loads them

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        init_in_each_process(self._init_process)

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        if not self._arrays.keys() >= set(names):
            self._load(names)
        out: dict[str, Column] = {}
        for name in names:
            array = self._arrays[name]
            check_not_truncated(file_of(array), self._path(name))
            if array.dtype.hasobject:
                out[name] = Objects([deepcopy(value) for value in array[ids]])  # the array is kept
            elif array.dtype.isnative and array.flags.c_contiguous:  # of any alignment
                out[name] = Dense.of(array, ids)
            else:  # numpy's take would copy the whole array first
                out[name] = Dense.of(array[ids])
                check_not_truncated(file_of(array), self._path(name))
        return out

    def _load(self, names: Sequence[str]) -> None:
        with self._lock:
            names = [name for name in names if name not in self._arrays]  # others were loaded by another thread
            for file in sorted({self._places[name][0] for name in names}):
                members = {self._places[name][1]: name for name in names if self._places[name][0] == file}
                loaded = load_arrays(self._paths[file], members, mapped=True, allow_pickle=self._allow_pickle)
                self.files.opened(file)
                self._arrays.update((members[array], values) for array, values in loaded.items())
