"""Detecting Parquet files, and listing them with the values in the names of their directories.

Hive, Spark, Polars, DuckDB and others write ``year=2024/month=7/part-0.parquet``: the directory names are columns
that the files do not have.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from urllib.parse import unquote

from rankfeed.errors import SourceError
from rankfeed.sources.paths import Paths, expand, files_in, head, walk

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
#: Lists of the row groups of other files.
SUMMARY_FILES = ("_metadata", "_common_metadata")
SUFFIXES = (".parquet", ".parq", ".pqt", ".pq")

#: Directories of table formats, in which files may have been deleted: name -> description, remedy.
_TABLES = {
    "_delta_log": ("a Delta Lake table", "deltalake.DeltaTable(path).file_uris()"),
    ".hoodie": ("a Hudi table", "the list of files that Hudi gives for a snapshot"),
}
#: Files of a folder that are looked at to detect the format.
_MOST_FILES = 2_000
#: Written by Hive for a null.
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class PartitionedFile:
    """A file and the (name, value) of each ``name=value`` directory, outermost first; None for a null."""

    path: str
    keys: tuple[tuple[str, str | None], ...] = ()


def list_files(where: Paths) -> list[PartitionedFile]:
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
        _refuse_tables(path)
        files = files_in(path, SUFFIXES, recursive=True) or [
            file for file in files_in(path, ("",), recursive=True) if _is_parquet_file(file)
        ]
        if not files:
            raise SourceError(
                "the folder holds no Parquet files",
                expected="files that end with " + ", ".join(SUFFIXES),
                where=path,
            )
        for file in files:
            folders = os.path.relpath(os.path.dirname(file), path).split(os.sep)
            listed.append(PartitionedFile(os.path.abspath(file), _keys([name for name in folders if "=" in name])))
    return listed


def _refuse_tables(folder: str) -> None:
    """Refuse directories of table formats: deleted and replaced files are still in them."""
    metadata = os.path.join(folder, "metadata")
    tables = [table for name, table in _TABLES.items() if os.path.isdir(os.path.join(folder, name))]
    if os.path.isdir(metadata) and any(name.endswith(".metadata.json") for name in os.listdir(metadata)):
        tables.append(("an Iceberg table", "pyiceberg's table.scan().plan_files()"))
    for description, remedy in tables:
        raise SourceError(
            f"the folder is {description}: only its log says which files are valid",
            where=folder,
            remedy=f"open the list of valid files: {remedy}",
        )


def _keys(folders: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    pairs = (name.split("=", 1) for name in folders)
    return tuple((unquote(key), None if value == _NULL else unquote(value)) for key, value in pairs if key)


def is_parquet(paths: list[str]) -> bool:
    """Whether these are Parquet files or directories with some, by their names or first bytes."""
    return all(
        _has_parquet(path) if os.path.isdir(path) else _is_parquet_file(path) for path in (paths[0], paths[-1])
    )


def _is_parquet_file(path: str) -> bool:
    return path.endswith(SUFFIXES) or head(path, 4) in (MAGIC, ENCRYPTED)


def _has_parquet(folder: str) -> bool:
    """Whether there is a Parquet file among the first files at any depth."""
    files = islice(((here, name) for here, names in walk(folder) for name in names), _MOST_FILES)
    return any(
        _is_parquet_file(os.path.join(here, name))
        for here, name in files
        if name in SUMMARY_FILES or (name[0] != "_" and (name.endswith(SUFFIXES) or "." not in name))
    )
