"""Directories, patterns and lists of `.npy` and `.npz` files with one sample per file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Columns, Dense, Field, Objects, Ragged
from rankfeed.errors import ArgumentError, CorruptError, SourceError, printable
from rankfeed.sources.npy.detect import list_files
from rankfeed.sources.npy.file import ARRAY
from rankfeed.sources.npy.header import Header, check_size, file_header, load_objects, read_header, reading
from rankfeed.sources.npy.npz import members_of, read_member, read_members
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Int64, Source, check_columns, check_ids, empty_column, even_blocks, reopen
from rankfeed.storage import DataFiles, digest_of

#: The column of class numbers.
LABEL = "label"
#: Files are read one by one, so blocks only keep the list of blocks short.
_BLOCK = 256
#: A batch has one more dimension than a sample.
_MOST_DIMENSIONS = 31 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 63

Labels = Literal["folder"] | Sequence[str] | None


class NumpyFilesSource(Source):
    """Files with a sample each, in natural order of their names (2 before 10).

    A `.npy` file is a sample with one column, "array"; a `.npz` file has a column for each of its arrays. Arrays
    of a column agree in dtype and in all dimensions but the first.

    Args:
        where: a directory, a glob pattern, or a list of paths.
        columns: names of the columns to offer; None for all.
        allow_pickle: whether arrays of objects may be read.
        labels: "folder" adds the column "label", int64: the number of the subdirectory of ``where`` that contains
            the file, in sorted order of their names. A list of their names defines their order.
        name_column: name of a column to add, str: the path of the file, relative to the common directory.
        files: what another process of the job saw first; None for the process that opens.

    Attributes:
        classes: names of the subdirectories in the order of their labels; empty without ``labels``.

    Raises:
        SourceError: there are no files, `.npy` and `.npz` are mixed, or a file is in no labelled subdirectory.
        ArgumentError: ``labels`` without a directory, or a column name that exists already.
    """

    files: DataFiles

    def __init__(
        self,
        where: str | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        labels: Labels = None,
        name_column: str | None = None,
        files: DataFiles | None = None,
    ) -> None:
        self.where = where
        self.labels = labels
        self.name_column = name_column
        self.allow_pickle = allow_pickle
        self._wanted = None if columns is None else tuple(columns)
        self._root, paths = list_files(where, recursive=labels is not None)
        self._suffix = paths[0][-4:]
        self.files = DataFiles(paths) if files is None else files.reopened(paths)
        # An array of names takes a tenth of the memory of a list.
        self._names = np.array([os.fsencode(os.path.relpath(path, self._root)) for path in paths])
        self.classes: list[str] = [] if labels is None else self._find_classes(labels, where)
        check_columns(self._wanted, self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "columns": self._wanted,
            "allow_pickle": self.allow_pickle,
            "labels": self.labels,
            "name_column": self.name_column,
            "files": self.files,
        }
        return reopen, (NumpyFilesSource, self.where, options, self.fingerprint)

    def _num_samples(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"NumpyFilesSource({self.where!r}, {len(self)} samples)"

    @property
    def blocks(self) -> Int64:
        return even_blocks(len(self), _BLOCK)

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """From one header and the sizes of all files for `.npy`, from all headers for `.npz`."""
        found = self._npy_fields() if self._suffix == ".npy" else self._npz_fields()
        added = {LABEL: Field("dense", "int64")} if self.labels is not None else {}
        if self.name_column is not None:
            added[self.name_column] = Field("str")
        if taken := found.keys() & added.keys():
            raise ArgumentError(
                "the name of an added column exists already",
                expected="other names than " + ", ".join(map(repr, found)),
                found=repr(min(taken)),
                remedy="pass another name_column=; or rename the array in the files",
            )
        found |= added
        return {name: found[name] for name in check_columns(self._wanted, found)}

    @cached_property
    def fingerprint(self) -> str:
        schema = ",".join([*(f"{name}:{field}" for name, field in self.fields.items()), *map(ascii, self.classes)])
        return digest_of(self.files.fingerprint.encode(), schema.encode())

    def _name(self, sample_id: int) -> str:
        return os.fsdecode(bytes(self._names[sample_id]))

    def _path(self, sample_id: int) -> str:
        return os.path.join(self._root, self._name(sample_id))

    def _find_classes(self, labels: Labels, where: Paths) -> list[str]:
        """Names of the classes in the order of their labels."""
        found = {_class_of(self._name(each)) for each in range(len(self))}
        classes = sorted(found) if labels is None or labels == "folder" else list(labels)
        unknown = sorted(found - {*classes} | (found & {""}))
        if unknown:
            raise SourceError(
                "a file is in no subdirectory that has a label",
                expected="files in the subdirectories " + ", ".join(map(repr, classes[:8])),
                found=f"files in {unknown[0]!r}" if unknown[0] else "files outside the subdirectories",
                where=where,
            )
        return classes

    def _npy_fields(self) -> dict[str, Field]:
        header = file_header(self._path(0), allow_pickle=self.allow_pickle)
        # Dtype and inner shape are checked when files are read, so sizes tell whether the lengths differ.
        varies = bool((self.files.sizes != self.files.sizes[0]).any())
        return {ARRAY: _field(header, varies)}

    def _npz_fields(self) -> dict[str, Field]:
        first = self._npz_headers(0)
        varying: set[str] = set()
        with ThreadPoolExecutor(4) as pool:
            for headers in pool.map(self._npz_headers, range(len(self))):
                for name in headers.keys() & first.keys():
                    if headers[name].shape != first[name].shape:
                        varying.add(name)
        return {name: _field(header, name in varying) for name, header in first.items()}

    def _npz_headers(self, sample_id: int) -> dict[str, Header]:
        path = self._path(sample_id)
        members = read_members(path, path, allow_pickle=self.allow_pickle)
        return {name: member.header for name, member in members.items()}

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        found = self._added_columns(ids)
        stored = [name for name in names if name not in found]
        if stored:
            read = self._read_npy if self._suffix == ".npy" else self._read_npz
            samples = [read(each, stored) for each in ids.tolist()]
            for each in ids.tolist():  # completely read by now
                self.files.check(each)
            for name in stored:
                found[name] = _column(self.fields[name], [sample[name] for sample in samples])
        return Columns({name: found[name] for name in names}, len(ids))

    def _added_columns(self, ids: Int64) -> dict[str, Column]:
        """The columns of labels and names."""
        names = [self._name(each) for each in ids.tolist()] if self.labels or self.name_column else []
        added: dict[str, Column] = {}
        if self.labels is not None:
            numbers = {name: number for number, name in enumerate(self.classes)}
            added[LABEL] = Dense.of(np.array([numbers[_class_of(name)] for name in names], np.int64))
        if self.name_column is not None:
            encoded = [printable(name).encode() for name in names]
            added[self.name_column] = Bytes(Bytes.of(encoded).parts, text=True)
        return added

    def _read_npy(self, sample_id: int, _names: list[str]) -> dict[str, npt.NDArray[Any]]:
        path = self._path(sample_id)
        if self.fields[ARRAY].kind == "object":
            header = file_header(path, allow_pickle=True)
            return {ARRAY: load_objects(path, header, path, allow_pickle=self.allow_pickle)}
        try:
            with open(path, "rb", buffering=0) as file:
                header = read_header(file, path)
                check_size(header, os.fstat(file.fileno()).st_size, path)
                _check_alike(header, self.fields[ARRAY], path)
                out = np.empty(header.nbytes, np.uint8)
                file.seek(header.offset)
                done = 0
                while done < len(out):
                    size = file.readinto(out.data[done:])
                    if not size:
                        raise CorruptError("a .npy file became shorter while it was read", where=path)
                    done += size
        except OSError as error:
            raise SourceError("the file cannot be read", found=error, where=path) from error
        return {ARRAY: out.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")}

    def _read_npz(self, sample_id: int, names: list[str]) -> dict[str, npt.NDArray[Any]]:
        path = self._path(sample_id)
        with reading(path), zipfile.ZipFile(path) as archive:
            members = members_of(archive, path, allow_pickle=self.allow_pickle)
            missing = [name for name in names if name not in members]
            if missing:
                raise SourceError("a file lacks arrays that others have", found=", ".join(missing), where=path)
            for name in names:
                if self.fields[name].kind != "object":
                    _check_alike(members[name].header, self.fields[name], f"{path}, array {name!r}")
            return {name: read_member(archive, members[name], allow_pickle=self.allow_pickle) for name in names}


def _class_of(name: str) -> str:
    """The first directory of a relative path; "" for a file that is in none."""
    return os.path.dirname(name).partition(os.sep)[0]


def _field(header: Header, varies: bool) -> Field:
    if header.dtype.hasobject:
        return Field("object")
    if len(header.shape) > _MOST_DIMENSIONS:
        raise SourceError(
            "an array has too many dimensions for a batch of them",
            expected=f"up to {_MOST_DIMENSIONS}",
            found=len(header.shape),
        )
    is_ragged = varies and len(header.shape) > 0
    shape = header.shape[1:] if is_ragged else header.shape
    return Field("ragged" if is_ragged else "dense", header.dtype.name, shape)


def _check_alike(header: Header, field: Field, where: str) -> None:
    if not header.fits(field):
        raise SourceError(
            "an array is unlike the others of its column",
            expected=field,
            found=header,
            where=where,
            remedy="make the arrays agree in dtype and in all dimensions but the first; equally long arrays that "
            'are columns of one table are read with layout="columns"',
        )


def _column(field: Field, rows: list[npt.NDArray[Any]]) -> Column:
    if field.kind == "object":
        return Objects(rows)
    if not rows:
        return empty_column(field)
    if field.kind == "dense":
        return Dense.of(np.stack(rows, dtype=np.dtype(field.dtype)))
    return Ragged.of([row.astype(field.dtype, copy=False) for row in rows])
