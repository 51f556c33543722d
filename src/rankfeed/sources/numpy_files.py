"""Folders, patterns and lists of `.npy` and `.npz` files: each file is a sample. Single files: `numpy_file`."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field, Objects, Ragged, Rows, Runs
from rankfeed.columns import Dense as DenseColumn
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.npy import Header, array_in, check_size, file_header, read_header, reading
from rankfeed.sources.numpy_file import NumpyFileSource, npz_headers
from rankfeed.sources.paths import Paths, common_root, expand, files_in, matched
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of

SUFFIXES = (".npy", ".npz")
#: The column of a `.npy` file, which has no name of its own.
ARRAY = "array"
#: Files in a block: they are read one by one, so this only keeps the list of blocks short.
_BLOCK = 256


def is_numpy(where: Paths) -> bool:
    """Whether these are `.npy` or `.npz` files."""
    if isinstance(where, (str, os.PathLike)) and Path(where).is_dir():
        with os.scandir(where) as entries:
            return any(entry.name.endswith(SUFFIXES) for entry in entries)
    paths = matched(where)
    return bool(paths) and all(path.endswith(SUFFIXES) for path in paths)


def open_numpy(where: Paths, *, columns: Sequence[str] | None = None, allow_pickle: bool = False) -> Source:
    """Open a file by its rows, or several with a sample each.

    Raises:
        SourceError, CorruptError, UnsafeError: see `rankfeed.open`.
    """
    if isinstance(where, (str, os.PathLike)) and Path(where).is_file():
        return NumpyFileSource(os.fspath(where), columns=columns)
    if isinstance(where, os.PathLike):
        where = os.fspath(where)
    return NumpyFilesSource(where, columns=columns, allow_pickle=allow_pickle)


class NumpyFilesSource(Source):
    """Files with a sample each, in natural order of their names (2 before 10).

    A `.npy` file is a sample with one column, "array"; a `.npz` file one with a column for each of its arrays.
    Arrays agree in type and in all dimensions but the first.

    Args:
        where: a folder, a glob pattern, or a list of paths (which is what is pickled).
        columns: names of those to offer; None for all.
        allow_pickle: whether object arrays may be read.

    Raises:
        SourceError: no files, or `.npy` and `.npz` mixed.
    """

    def __init__(
        self,
        where: str | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self.where = where
        self.allow_pickle = allow_pickle
        self._wanted = None if columns is None else tuple(columns)
        self._root, paths = _listing(where)
        if not paths:
            raise SourceError("no .npy or .npz files", where=where)
        self._suffix = paths[0][-4:]
        if not all(path.endswith(self._suffix) for path in paths):
            raise SourceError("a data set is either .npy or .npz files", found="both", where=where)
        # One array of names instead of a list: a tenth of the memory where there are millions.
        self._names = np.array([os.fsencode(os.path.relpath(path, self._root)) for path in paths])
        check_columns(self._wanted, self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.where, self._wanted, self.allow_pickle, self.fingerprint)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"NumpyFilesSource({self.where!r}, {len(self)} samples)"

    @property
    def blocks(self) -> Int64:
        """Runs of files: int64."""
        full, rest = divmod(len(self), _BLOCK)
        return np.array([_BLOCK] * full + [rest] * (rest > 0), np.int64)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds: for `.npy` by one header and the sizes of all, for `.npz` by all headers."""
        found = self._npy_fields() if self._suffix == ".npy" else self._npz_fields()
        return (
            found if self._wanted is None else {name: found[name] for name in check_columns(self._wanted, found)}
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of relative names, sizes and types."""
        names = b"\0".join(self._names.tolist())
        schema = ",".join(f"{name}:{field}" for name, field in self.fields.items())
        return digest_of(names, self._sizes.tobytes(), schema.encode())

    @cached_property
    def _sizes(self) -> Int64:
        try:
            return np.array([os.stat(self._path(each)).st_size for each in range(len(self))], np.int64)
        except OSError as error:
            raise SourceError("a file cannot be read", found=error, where=self.where) from error

    def _path(self, sample_id: int) -> str:
        return os.path.join(self._root, os.fsdecode(bytes(self._names[sample_id])))

    def _npy_fields(self) -> dict[str, Field]:
        header = file_header(self._path(0), allow_pickle=self.allow_pickle)
        if header.dtype.hasobject:
            return {ARRAY: Field("object")}
        # Same type and same inner shape (checked as files are read): sizes tell whether the lengths differ.
        ragged = len(header.shape) > 0 and bool((self._sizes != self._sizes[0]).any())
        return {ARRAY: _field(header, ragged)}

    def _npz_fields(self) -> dict[str, Field]:
        first = self._npz_headers(0)
        ragged: set[str] = set()
        with ThreadPoolExecutor(4) as pool:
            for headers in pool.map(self._npz_headers, range(len(self))):
                for name in headers.keys() & first.keys():
                    if headers[name].shape != first[name].shape:
                        ragged.add(name)
        return {
            name: Field("object")
            if header.dtype.hasobject
            else _field(header, name in ragged and bool(header.shape))
            for name, header in first.items()
        }

    def _npz_headers(self, sample_id: int) -> dict[str, Header]:
        return npz_headers(self._path(sample_id), allow_pickle=self.allow_pickle)

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """Read the files of some samples.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a file is gone or unlike the others.
            CorruptError: a file is damaged.
        """
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        if self._suffix == ".npy":
            rows = {ARRAY: [self._read_npy(each) for each in ids.tolist()]} if names else {}
        else:
            samples = [self._read_npz(each, names) for each in ids.tolist()]
            rows = {name: [sample[name] for sample in samples] for name in names}
        return Columns({name: _column(self.fields[name], rows[name]) for name in names}, len(ids))

    def _read_npy(self, sample_id: int) -> npt.NDArray[Any]:
        path = self._path(sample_id)
        if self.fields[ARRAY].kind == "object":
            with reading(path):
                return np.asarray(np.load(path, allow_pickle=self.allow_pickle))
        try:
            with open(path, "rb", buffering=0) as file:
                header = read_header(file, path)
                check_size(header, os.fstat(file.fileno()).st_size, path)
                _check_alike(header, self.fields[ARRAY], path)
                out = np.empty(header.nbytes, np.uint8)
                file.seek(header.offset)
                view, done = out.data, 0
                while done < len(out):
                    size = file.readinto(view[done:])
                    if not size:
                        raise CorruptError("a .npy file became shorter while it was read", where=path)
                    done += size
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=path) from error
        return out.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")

    def _read_npz(self, sample_id: int, names: list[str]) -> dict[str, npt.NDArray[Any]]:
        path = self._path(sample_id)
        with reading(path), zipfile.ZipFile(path) as archive:
            members = {member.removesuffix(".npy"): member for member in archive.namelist()}
            missing = [name for name in names if name not in members]
            if missing:
                raise SourceError("a file lacks arrays that others have", found=", ".join(missing), where=path)
            sample = {
                name: array_in(archive.read(members[name]), allow_pickle=self.allow_pickle) for name in names
            }
        for name, array in sample.items():
            if self.fields[name].kind != "object":
                _check_alike(
                    Header(array.dtype, array.shape, False, 0), self.fields[name], f"{path}, array {name!r}"
                )
        return sample


def _reopen(where: Any, columns: Any, allow_pickle: bool, fingerprint: str) -> NumpyFilesSource:
    source = NumpyFilesSource(where, columns=columns, allow_pickle=allow_pickle)
    if source.fingerprint != fingerprint:
        raise SourceError("files were added, removed or changed while they were in use", where=where)
    return source


def _listing(where: Paths) -> tuple[str, list[str]]:
    """The folder that names are relative to, and the files in natural order."""
    if isinstance(where, (str, os.PathLike)) and os.path.isdir(where):
        return os.fspath(where), files_in(where, SUFFIXES, skip=(".",))
    paths = expand(where)
    return common_root(paths), paths


def _field(header: Header, ragged: bool) -> Field:
    shape = header.shape[1:] if ragged else header.shape
    return Field("ragged" if ragged else "dense", header.dtype.name, shape)


def _check_alike(header: Header, field: Field, where: str) -> None:
    shape = header.shape[1:] if field.kind == "ragged" else header.shape
    same_rank = field.kind != "ragged" or len(header.shape) == len(field.shape) + 1
    if header.dtype.name != field.dtype or shape != field.shape or not same_rank:
        raise SourceError(
            "an array is unlike the others of its column",
            expected=field,
            found=f"{header.dtype.name}{list(header.shape)}",
            where=where,
            remedy="make the arrays agree in type and in all dimensions but the first",
        )


def _column(field: Field, rows: list[npt.NDArray[Any]]) -> Any:
    if field.kind == "object":
        return Objects(rows)
    dtype = np.dtype(field.dtype)
    if field.kind == "dense":
        if not rows:
            return DenseColumn([Rows(np.empty((0, *field.shape), dtype), np.empty(0, np.int64))])
        return DenseColumn.of(np.stack(rows, dtype=dtype))
    if not rows:
        return Ragged([Runs(np.empty((0, *field.shape), dtype), *np.empty((2, 0), np.int64))])
    return Ragged.of([row.astype(dtype, copy=False) for row in rows])


FORMAT = Format("numpy", ".npy or .npz files", is_numpy, open_numpy)
