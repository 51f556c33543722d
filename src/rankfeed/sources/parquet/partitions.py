"""Parquet files in directories whose names are columns that the files do not have.

Hive, Spark, Polars, DuckDB and others write ``year=2024/month=7/part-0.parquet``.
"""

import glob
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from rankfeed.columns.columns import ColumnBuffer
from rankfeed.columns.field import Field
from rankfeed.errors import SourceError
from rankfeed.sources.arrow.arrow_columns import NULL_REMEDY
from rankfeed.sources.arrow.types import VALID, Nulls, storage_type
from rankfeed.sources.formats import PARQUET_SUFFIXES, is_parquet_file
from rankfeed.sources.paths import Paths, check_utf8, expand, files_in

_INTEGER = re.compile(r"-?[0-9]{1,18}")

#: What is in the directories of table formats, which still have deleted and replaced files: description, remedy.
_TABLES = {
    "_delta_log/": ("a Delta Lake table", "deltalake.DeltaTable(path).file_uris()"),
    ".hoodie/": ("a Hudi table", "the list of files that Hudi gives for a snapshot"),
    "metadata/*.metadata.json": ("an Iceberg table", "pyiceberg's table.scan().plan_files()"),
}
#: Written by Hive for a null.
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class PartitionedFile:
    """A file and the (name, value) of each ``name=value`` directory, outermost first; None for a null."""

    path: str
    keys: tuple[tuple[str, str | None], ...] = ()


def parquet_files(where: Paths) -> list[PartitionedFile]:
    """The files in the given order, those of a directory in natural order.

    Of a given directory, every ``key=value`` directory below it counts; of a file, those directly above it.
    """
    listed: list[PartitionedFile] = []
    for path in expand(where):
        if not os.path.isdir(path):
            above = reversed(os.path.dirname(os.path.abspath(path)).split(os.sep))
            keys = _keys([*takewhile(lambda name: "=" in name, above)][::-1])
            listed.append(PartitionedFile(os.path.abspath(path), keys))
            continue
        for pattern, (description, remedy) in _TABLES.items():
            if glob.glob(pattern, root_dir=path):
                raise SourceError(
                    f"the folder is {description}: only its log says which files are valid",
                    where=path,
                    remedy=f"open the list of valid files: {remedy}",
                )
        files = files_in(path, PARQUET_SUFFIXES, recursive=True) or [
            file for file in files_in(path, ("",), recursive=True) if is_parquet_file(file)
        ]
        if not files:
            raise SourceError(
                "the folder holds no Parquet files",
                expected="files that end with " + ", ".join(PARQUET_SUFFIXES),
                where=path,
            )
        for file in files:
            folders = os.path.relpath(os.path.dirname(file), path).split(os.sep)
            listed.append(PartitionedFile(os.path.abspath(file), _keys([name for name in folders if "=" in name])))
    return listed


def _keys(folders: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    pairs = (name.split("=", 1) for name in folders)
    return tuple((unquote(key), None if value == _NULL else unquote(value)) for key, value in pairs if key)


class Partitions:
    """The values that directory names give to files, whose own columns are ``own``.

    If a file has a column of that name (Polars writes both), the column is read, and compared with the directory
    by :meth:`check`.
    """

    def __init__(self, files: Sequence[PartitionedFile], own: Collection[str], nulls: Nulls) -> None:
        self._paths = [file.path for file in files]
        self._nulls = nulls
        names = [key for key, _ in files[0].keys]
        for file in files:
            keys = [key for key, _ in file.keys]
            if len(set(keys)) != len(keys):
                raise SourceError(
                    "two folders of a path name the same column",
                    expected="each key once",
                    found=", ".join(f"{key}={text}" for key, text in file.keys),
                    where=file.path,
                    remedy="rename one of the folders, or open the folder below the first of them",
                )
            if keys != names:
                raise SourceError(
                    "files differ in the keys of their folders",
                    expected=f"{names}, as for {files[0].path}",
                    found=keys,
                    where=file.path,
                    remedy="open folders of one layout at a time",
                )
            for key, text in file.keys:
                check_utf8(f"{key}={text}", file.path, "a folder that names the value of a column")
        #: By key of the directories, the value for each file.
        self.texts = {name: [file.keys[depth][1] for file in files] for depth, name in enumerate(names)}
        self._is_integer = {
            name: any(texts) and all(text is None or _INTEGER.fullmatch(text) for text in texts)
            for name, texts in self.texts.items()
        }
        self.fields: dict[str, Field] = {}
        for name in names:
            if self._is_integer[name]:
                self._check_spelling(name)
            if name not in own:
                self.fields[name] = Field("dense", "int64") if self._is_integer[name] else Field("str")
                if nulls == "mask":
                    self.fields[name + VALID] = Field("dense", "bool")

    def _check_spelling(self, name: str) -> None:
        """Refuse two directory names that are the same number (``y=01`` and ``y=1``)."""
        first: dict[int, str] = {}
        for text, path in zip(self.texts[name], self._paths, strict=True):
            if text is not None and first.setdefault(int(text), text) != text:
                raise SourceError(
                    f"two folder names give the same value of column {name!r}",
                    expected="one spelling of each number",
                    found=f"{name}={first[int(text)]} and {name}={text}",
                    where=path,
                    remedy="rename the folders of one of them, or leave the column out with columns=",
                )

    def column(self, name: str, file: int, rows: int) -> ColumnBuffer:
        if name not in self.texts:
            return ColumnBuffer(np.full(rows, self.texts[name.removesuffix(VALID)][file] is not None))
        text = self.texts[name][file]
        if text is None and self._nulls == "error":
            raise SourceError(
                f"the folder's name says that {name!r} is null", where=self._paths[file], remedy=NULL_REMEDY
            )
        if self._is_integer[name]:
            return ColumnBuffer(np.full(rows, int(text or 0), np.int64))
        encoded = np.frombuffer((text or "").encode(), np.uint8)
        return ColumnBuffer(np.tile(encoded, rows), np.arange(rows + 1, dtype=np.int64) * len(encoded))

    def check(self, name: str, file: int, column: Any, field: Field) -> None:
        """Compare a file's own column with its directory, if both are integers or text; nulls are ignored."""
        text = self.texts[name][file]
        is_integer = field.kind == "dense" and np.dtype(field.dtype).kind in "iu" and field.shape == ()
        if text is None or not (field.kind in ("str", "bytes") or (is_integer and self._is_integer[name])):
            return
        expected = int(text) if is_integer else text if field.kind == "str" else text.encode()
        kind = storage_type(column.type)
        kind = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)
        if not set(column.cast(kind).unique().to_pylist()) <= {expected, None}:
            raise SourceError(
                f"the file's own column {name!r} contradicts its folder",
                expected=f"{text} in all rows",
                where=self._paths[file],
                remedy="leave the column out with columns=, or move the file to where it belongs",
            )
