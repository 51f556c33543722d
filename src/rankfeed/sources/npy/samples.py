"""Directories, patterns and lists of `.npy` and `.npz` files with one sample per file."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from rankfeed.columns.columns import Bytes, Column, Dense, make_column
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, SourceError, printable
from rankfeed.sources.formats import NUMPY_SUFFIXES, nested_array
from rankfeed.sources.npy.arrays import ARRAY, Array, Header, load_arrays, read_headers
from rankfeed.sources.paths import Paths, common_root, escape, expand, files_in, label
from rankfeed.sources.source import Int64, Source, check_columns, class_labels, even_blocks
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import DataFiles

#: The column of class numbers.
LABEL = "label"
#: Files are read one by one, so blocks only keep the list of blocks short.
_BLOCK = 256
#: A batch has one more dimension than a sample, and an array of NumPy 1 has at most 32.
_MOST_DIMENSIONS = 31

Labels = Literal["folder"] | Sequence[str] | None

#: The remedy for labels that are in no directory name.
LABELS_OF_TABLE = "for labels in a CSV file, pass name_column= and add them in the transform= of the Loader"


class NumpySamplesSource(Source):
    """Files with a sample each, in natural order of their names (2 before 10).

    A `.npy` file is a sample with one column, "array"; a `.npz` file has a column for each of its arrays. Arrays
    of a column agree in dtype and in all dimensions but the first.

    Attributes:
        classes: names of the subdirectories in the order of their labels; empty without ``labels``.
    """

    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        labels: Labels = None,
        name_column: str | None = None,
    ) -> None:
        self._labels, self._name_column, self._allow_pickle = labels, name_column, allow_pickle
        root, paths = numpy_files(where, recursive=labels is not None)
        self._root = os.path.join(os.path.abspath(root), "")
        self._suffix = paths[0][-4:]
        self.files = DataFiles([os.path.abspath(path) for path in paths])
        self.classes: list[str] = [] if labels is None else self._find_classes(labels, where)
        if self.classes:
            self.logical_types = {LABEL: class_labels(self.classes)}
        all_fields = self._find_fields()
        fields = {name: all_fields[name] for name in check_columns(columns, all_fields)}
        schema = ",".join([*(f"{name}:{field}" for name, field in fields.items()), *map(ascii, self.classes)])
        fingerprint = digest_of(self.files.fingerprint.encode(), schema.encode())
        self._init_samples(label(paths), fields, even_blocks(len(paths), _BLOCK), fingerprint)

    def _find_fields(self) -> dict[str, Field]:
        """From one header and the sizes of all files for `.npy`, from all headers for `.npz`."""
        first, varying = self._headers(0), set[str]()
        if self._suffix == ".npz":
            with ThreadPoolExecutor(4) as pool:
                for headers in pool.map(self._headers, range(len(self.files))):
                    both = headers.keys() & first.keys()
                    varying |= {name for name in both if headers[name].shape != first[name].shape}
        elif (self.files.sizes != self.files.sizes[0]).any():  # reading checks dtype and the other dimensions
            varying = {ARRAY}
        fields = {name: _field(header, name in varying) for name, header in first.items()}
        added = {LABEL: Field("dense", "int64")} if self._labels is not None else {}
        if self._name_column is not None:
            added[self._name_column] = Field("str")
        if taken := fields.keys() & added.keys():
            raise ArgumentError(
                "the name of an added column exists already",
                expected="other names than " + ", ".join(map(repr, fields)),
                found=repr(min(taken)),
                remedy="pass another name_column=; or rename the array in the files",
            )
        return fields | added

    def _name(self, sample_id: int) -> str:
        return self.files.path(sample_id).removeprefix(self._root)

    def _find_classes(self, labels: Labels, where: Paths) -> list[str]:
        folders = {_class_of(self._name(sample_id)) for sample_id in range(len(self.files))}
        classes = sorted(folders) if labels is None or labels == "folder" else list(labels)
        unknown = sorted(folders - {*classes} | (folders & {""}))
        if unknown:
            named = [name for name in classes if name]
            raise SourceError(
                "a file is in no subdirectory that has a label",
                expected="files in the subdirectories " + ", ".join(map(repr, named[:8]))
                if named
                else "a subdirectory for each class",
                found=f"files in {unknown[0]!r}" if unknown[0] else "files outside the subdirectories",
                where=where,
                remedy="name all subdirectories in labels=[...]"
                if unknown[0]
                else f"move the files into subdirectories; {LABELS_OF_TABLE}",
            )
        return classes

    def _headers(self, sample_id: int) -> dict[str, Header]:
        return read_headers(self.files.path(sample_id), allow_pickle=self._allow_pickle)

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        paths = [self._name(sample_id) for sample_id in ids.tolist()] if self._labels or self._name_column else []
        if self._labels is not None:
            numbers = {name: index for index, name in enumerate(self.classes)}
            columns[LABEL] = Dense.of(np.array([numbers[_class_of(path)] for path in paths], np.int64))
        if self._name_column is not None:
            columns[self._name_column] = Bytes.of([printable(path) for path in paths], text=True)
        if stored := [name for name in names if name not in columns]:
            samples = [self._read(sample_id, stored) for sample_id in ids.tolist()]
            for sample_id in ids.tolist():  # completely read by now
                self.files.check(sample_id)
            for name in stored:
                columns[name] = make_column(name, [sample[name] for sample in samples], self.fields[name])
        return {name: columns[name] for name in names}

    def _read(self, sample_id: int, names: list[str]) -> dict[str, Array]:
        path = self.files.path(sample_id)

        def check(name: str, header: Header) -> None:
            field = self.fields[name]
            if field.kind != "object" and not header.fits(field):
                raise SourceError(
                    "an array is unlike the others of its column",
                    expected=field,
                    found=header,
                    where=path if self._suffix == ".npy" else f"{path}, array {name!r}",
                    remedy="make the arrays agree in dtype and in all dimensions but the first; equally long "
                    'arrays that are columns of one table are read with layout="columns"',
                )

        return load_arrays(path, names, mapped=False, allow_pickle=self._allow_pickle, check=check)


def _class_of(name: str) -> str:
    """The first directory of a relative path; "" for a file that is in none."""
    return os.path.dirname(name).partition(os.sep)[0]


def _field(header: Header, varies: bool) -> Field:
    if len(header.shape) > _MOST_DIMENSIONS and not header.dtype.hasobject:
        raise SourceError(
            "an array has too many dimensions for a batch of them",
            expected=f"up to {_MOST_DIMENSIONS}",
            found=len(header.shape),
        )
    is_ragged = varies and header.shape
    return header.field("ragged", header.shape[1:]) if is_ragged else header.field("dense", header.shape)


def numpy_files(where: Paths, *, recursive: bool = False) -> tuple[str, list[str]]:
    """The directory that names are relative to, and the files in natural order.

    Files in subdirectories of a directory are an error, unless ``recursive``, which needs a directory.
    """
    paths = expand(where)
    root = common_root(paths)
    if len(paths) == 1 and os.path.isdir(paths[0]):
        (root,) = paths
        paths = files_in(root, NUMPY_SUFFIXES, recursive, skip=(".",))
        if not recursive and (nested := nested_array(root)) is not None:
            pattern, name = "*" + nested[-4:], os.path.relpath(nested, root)
            raise SourceError(
                f"the directory has {nested[-4:]} files in subdirectories",
                expected="files in one directory, unless an option says how subdirectories are read",
                found=f"{len(paths)} files, and {name!r}",
                where=root,
                remedy='pass labels="folder" to number the samples by their subdirectory; or open one '
                f"subdirectory: {os.path.join(root, name.split(os.sep)[0])!r}; or give a pattern: "
                f"{os.path.join(escape(root), '**', pattern)!r} for all files"
                + (f", {os.path.join(escape(root), pattern)!r} for those at the top" if paths else ""),
            )
    elif recursive:
        raise ArgumentError(
            'labels="folder" needs a directory',
            expected="a directory with a subdirectory for each class",
            found=where,
        )
    if not paths:
        raise SourceError("no .npy or .npz files", where=where)
    if len({path[-4:] for path in paths}) > 1:
        raise SourceError("a dataset is either .npy or .npz files", found="both", where=where)
    return root, paths
