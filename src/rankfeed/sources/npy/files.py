"""Directories, patterns and lists of `.npy` and `.npz` files with a sample in each file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Bytes, Column, Columns, Field, Objects, Ragged, RowSlices, RowTake
from rankfeed.columns import Dense as DenseColumn
from rankfeed.errors import ArgumentError, CorruptError, SourceError, printable
from rankfeed.sources.npy.header import Header, check_size, file_header, load_objects, read_header, reading
from rankfeed.sources.npy.npz import members_of, read_member, read_members
from rankfeed.sources.paths import Paths, common_root, expand, files_in
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import DataFiles, digest_of

SUFFIXES = (".npy", ".npz")
#: The column of a `.npy` file, which has no name of its own.
ARRAY = "array"
#: The column of class numbers.
LABEL = "label"
#: Files in a block: they are read one by one, so this only keeps the list of blocks short.
_BLOCK = 256
#: Dimensions of a sample: a batch has one more, and numpy has up to 64.
_MOST_DIMENSIONS = 31 if np.lib.NumpyVersion(np.__version__) < "2.0.0" else 63

Labels = Literal["folder"] | Sequence[str] | None


class NumpyFilesSource(Source):
    """Files with a sample each, in natural order of their names (2 before 10).

    A `.npy` file is a sample with one column, "array"; a `.npz` file one with a column for each of its arrays.
    Arrays agree in dtype and in all dimensions but the first.

    Args:
        where: a directory, a glob pattern, or a list of paths (which is what is pickled).
        columns: names of those to offer; None for all.
        allow_pickle: whether arrays of objects may be read.
        labels: "folder" adds the column "label", int64: the number of the subdirectory of ``where`` that the file
            is in, in sorted order of their names. A list of their names is their order.
        name_column: name of a column to add, str: the path of the file, relative to the common directory.
        files: what another process of the job saw first; None for the process that opens.

    Attributes:
        classes: names of the subdirectories in the order of their labels; empty without ``labels``.

    Raises:
        SourceError: no files, `.npy` and `.npz` mixed, or a file in no subdirectory that has a label.
        ArgumentError: ``labels`` without a directory, or a column name that is taken.
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
        self._root, paths = listing(where, recursive=labels is not None)
        self._suffix = paths[0][-4:]
        self.files = DataFiles(paths) if files is None else files.reopened(paths)
        # One array of names instead of a list: a tenth of the memory where there are millions.
        self._names = np.array([os.fsencode(os.path.relpath(path, self._root)) for path in paths])
        self.classes: list[str] = [] if labels is None else _classes(self._class_names(), labels, where)
        check_columns(self._wanted, self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "columns": self._wanted,
            "allow_pickle": self.allow_pickle,
            "labels": self.labels,
            "name_column": self.name_column,
            "files": self.files,
        }
        return _reopen, (self.where, options, self.fingerprint)

    def _num_samples(self) -> int:
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
        added = {LABEL: Field("dense", "int64")} if self.labels is not None else {}
        if self.name_column is not None:
            added[self.name_column] = Field("str")
        if taken := found.keys() & added.keys():
            raise ArgumentError(
                "the name of an added column is taken",
                expected="other names than " + ", ".join(map(repr, found)),
                found=repr(min(taken)),
                remedy="pass another name_column=; or rename the array in the files",
            )
        found |= added
        return (
            found if self._wanted is None else {name: found[name] for name in check_columns(self._wanted, found)}
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of relative names, sizes, types, classes, and content samples."""
        schema = ",".join([*(f"{name}:{field}" for name, field in self.fields.items()), *map(ascii, self.classes)])
        return digest_of(self.files.fingerprint.encode(), schema.encode())

    def _path(self, sample_id: int) -> str:
        return os.path.join(self._root, self._name(sample_id))

    def _name(self, sample_id: int) -> str:
        return os.fsdecode(bytes(self._names[sample_id]))

    def _class_names(self) -> list[str]:
        """The subdirectory of each file; "" for one that is in none."""
        return [os.path.dirname(self._name(each)).partition(os.sep)[0] for each in range(len(self))]

    def _npy_fields(self) -> dict[str, Field]:
        header = file_header(self._path(0), allow_pickle=self.allow_pickle)
        if header.dtype.hasobject:
            return {ARRAY: Field("object")}
        # Same type and same inner shape (checked as files are read): sizes tell whether the lengths differ.
        ragged = len(header.shape) > 0 and bool((self.files.sizes != self.files.sizes[0]).any())
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
        path = self._path(sample_id)
        members = read_members(path, path, allow_pickle=self.allow_pickle)
        return {name: member.header for name, member in members.items()}

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
        added = self._added(ids)
        stored = [name for name in names if name not in added]
        if self._suffix == ".npy":
            rows = {ARRAY: [self._read_npy(each) for each in ids.tolist()]} if stored else {}
        else:
            samples = [self._read_npz(each, stored) for each in ids.tolist()] if stored else []
            rows = {name: [sample[name] for sample in samples] for name in stored}
        for each in ids.tolist() if stored else ():  # read whole by now
            self.files.check(each)
        found = {name: _column(self.fields[name], values) for name, values in rows.items()} | added
        return Columns({name: found[name] for name in names}, len(ids))

    def _added(self, ids: Int64) -> dict[str, Column]:
        """The columns of labels and names."""
        names = [self._name(each) for each in ids.tolist()] if self.labels or self.name_column else []
        added: dict[str, Column] = {}
        if self.labels is not None:
            numbers = {name: number for number, name in enumerate(self.classes)}
            added[LABEL] = DenseColumn.of(
                np.array([numbers[name.partition(os.sep)[0]] for name in names], np.int64)
            )
        if self.name_column is not None:
            encoded = [printable(name).encode() for name in names]
            added[self.name_column] = Bytes(Bytes.of(encoded).parts, text=True)
        return added

    def _read_npy(self, sample_id: int) -> npt.NDArray[Any]:
        path = self._path(sample_id)
        if self.fields[ARRAY].kind == "object":
            return load_objects(path, file_header(path, allow_pickle=True), path, allow_pickle=self.allow_pickle)
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
            members = members_of(archive, path, allow_pickle=self.allow_pickle)
            missing = [name for name in names if name not in members]
            if missing:
                raise SourceError("a file lacks arrays that others have", found=", ".join(missing), where=path)
            for name in names:
                if self.fields[name].kind != "object":
                    _check_alike(members[name].header, self.fields[name], f"{path}, array {name!r}")
            return {name: read_member(archive, members[name], allow_pickle=self.allow_pickle) for name in names}


def _reopen(where: Any, options: dict[str, Any], fingerprint: str) -> NumpyFilesSource:
    source = NumpyFilesSource(where, **options)
    if source.fingerprint != fingerprint:
        raise SourceError("files were added, removed or changed while they were in use", where=where)
    return source


def listing(where: Paths, *, recursive: bool = False) -> tuple[str, list[str]]:
    """The directory that names are relative to, and the files in natural order.

    Args:
        where: a directory, a pattern or a list.
        recursive: whether files in subdirectories of a directory are taken; else they are an error.

    Raises:
        SourceError: there are no files, of two kinds, or in subdirectories.
        ArgumentError: ``recursive`` without a directory.
    """
    if isinstance(where, (str, os.PathLike)) and os.path.isdir(where):
        root = os.fspath(where)
        paths = files_in(where, SUFFIXES, recursive, skip=(".",))
        if not recursive and (nested := nested_directory(root)) is not None:
            raise _in_subdirectories(root, paths, nested)
    elif recursive:
        raise ArgumentError(
            'labels="folder" needs a directory',
            expected="a directory with a subdirectory for each class",
            found=where,
        )
    else:
        paths = expand(where)
        root = common_root(paths)
    if not paths:
        raise SourceError("no .npy or .npz files", where=where)
    if len({path[-4:] for path in paths}) > 1:
        raise SourceError("a data set is either .npy or .npz files", found="both", where=where)
    return root, paths


def _in_subdirectories(root: str, paths: Sequence[str], nested: str) -> SourceError:
    suffix = next(name[-4:] for name in sorted(os.listdir(nested)) if name.endswith(SUFFIXES))
    alone = f", {os.path.join(root, '*' + suffix)!r} for those outside subdirectories" if paths else ""
    return SourceError(
        f"the directory has {suffix} files in subdirectories",
        expected="files in one directory, unless it is said how subdirectories are read",
        found=(f"{len(paths)} files, and more" if paths else "files") + f" in {os.path.relpath(nested, root)!r}",
        where=root,
        remedy=f'pass labels="folder" to number the samples by their subdirectory; or a pattern: '
        f"{os.path.join(root, '**', '*' + suffix)!r} for all files{alone}",
    )


def nested_directory(root: str, most: int = 1000) -> str | None:
    """A subdirectory, at any depth, with `.npy` or `.npz` files; looked for in the first ``most`` of them."""
    pending, seen = [root], set[str]()
    for _ in range(most):
        if not pending:
            break
        here = pending.pop(0)
        if (real := os.path.realpath(here)) in seen:
            continue  # a link that leads back
        seen.add(real)
        try:
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if here != root and entry.name.endswith(SUFFIXES):
                        return here
                    if entry.is_dir():
                        pending.append(entry.path)
        except OSError:
            continue
    return None


def _classes(found: list[str], labels: Labels, where: Paths) -> list[str]:
    """The names of the classes in the order of their labels."""
    named = labels if labels is not None and labels != "folder" else sorted({*found})
    unknown = sorted({*found} - {*named} | ({*found} & {""}))
    if unknown:
        raise SourceError(
            "a file is in no subdirectory that has a label",
            expected="files in the subdirectories " + ", ".join(map(repr, list(named)[:8])),
            found=f"files in {unknown[0]!r}" if unknown[0] else "files outside the subdirectories",
            where=where,
        )
    return list(named)


def _field(header: Header, ragged: bool) -> Field:
    shape = header.shape[1:] if ragged else header.shape
    if len(header.shape) > _MOST_DIMENSIONS:
        raise SourceError(
            "an array has too many dimensions for a batch of them",
            expected=f"up to {_MOST_DIMENSIONS}",
            found=len(header.shape),
        )
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
            remedy="make the arrays agree in dtype and in all dimensions but the first; equally long arrays that "
            'are columns of one table are read with layout="columns"',
        )


def _column(field: Field, rows: list[npt.NDArray[Any]]) -> Any:
    if field.kind == "object":
        return Objects(rows)
    dtype = np.dtype(field.dtype)
    if field.kind == "dense":
        if not rows:
            return DenseColumn([RowTake(np.empty((0, *field.shape), dtype), np.empty(0, np.int64))])
        return DenseColumn.of(np.stack(rows, dtype=dtype))
    if not rows:
        return Ragged([RowSlices(np.empty((0, *field.shape), dtype), *np.empty((2, 0), np.int64))])
    return Ragged.of([row.astype(dtype, copy=False) for row in rows])
