"""Detecting Parquet files, and listing them with the values in the names of their directories.

Hive, Spark, Polars, DuckDB and others write ``year=2024/month=7/part-0.parquet``: the directory names are columns
that the files do not have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rankfeed.errors import SourceError
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, expand, files_in, head, is_one, matched, natural

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
SUFFIXES = (".parquet", ".parq", ".pqt", ".pq")

#: Directories of table formats, in which files may have been deleted: name -> description, remedy.
_TABLES = {
    "_delta_log": ("a Delta Lake table", "deltalake.DeltaTable(path).file_uris()"),
    ".hoodie": ("a Hudi table", "the list of files that Hudi gives for a snapshot"),
}
_MOST_ENTRIES = 2_000
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
    found: list[PartitionedFile] = []
    for path in expand(where):
        if not os.path.isdir(path):
            found.append(PartitionedFile(os.path.abspath(path), _keys_above(path)))
            continue
        _refuse_tables(path)
        files = files_in(path, SUFFIXES, recursive=True) or [
            each for each in files_in(path, ("",), recursive=True) if _is_parquet_file(each)
        ]
        if not files:
            raise SourceError(
                "the folder holds no Parquet files",
                expected="files that end with " + ", ".join(SUFFIXES),
                where=path,
            )
        for file in files:
            folders = os.path.relpath(os.path.dirname(file), path).split(os.sep)
            found.append(PartitionedFile(os.path.abspath(file), _keys([name for name in folders if "=" in name])))
    return found


def _refuse_tables(folder: str) -> None:
    """Refuse directories of table formats: deleted and replaced files are still in them."""

    def stale(what: str, remedy: str) -> SourceError:
        return SourceError(
            f"the folder is {what}: which of its files count is written in its log",
            where=folder,
            remedy=f"open the list of files that count: {remedy}",
        )

    for name, (what, remedy) in _TABLES.items():
        if os.path.isdir(os.path.join(folder, name)):
            raise stale(what, remedy)
    metadata = os.path.join(folder, "metadata")
    if os.path.isdir(metadata) and any(name.endswith(".metadata.json") for name in os.listdir(metadata)):
        raise stale("an Iceberg table", "pyiceberg's table.scan().plan_files()")


def _keys_above(path: str) -> tuple[tuple[str, str | None], ...]:
    folders: list[str] = []
    for name in reversed(os.path.dirname(os.path.abspath(path)).split(os.sep)):
        if "=" not in name:
            break
        folders.insert(0, name)
    return _keys(folders)


def _keys(folders: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    pairs = (name.split("=", 1) for name in folders)
    return tuple((unquote(key), None if value == _NULL else unquote(value)) for key, value in pairs if key)


def is_parquet(where: Paths) -> bool:
    """Whether these are Parquet files or directories with some, by their first or last bytes."""
    paths = [os.fspath(where)] if is_one(where) and os.path.exists(where) else matched(where)  # type: ignore[arg-type]
    return bool(paths) and all(
        _has_parquet(path) if os.path.isdir(path) else _is_parquet_file(path) for path in (paths[0], paths[-1])
    )


def _is_parquet_file(path: str) -> bool:
    if head(path, 4) in (MAGIC, ENCRYPTED):
        return True
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return path.endswith(SUFFIXES)  # there is only the name
            file.seek(max(0, size - 4))
            return file.read(4) in (MAGIC, ENCRYPTED)
    except OSError:
        return False


def _has_parquet(folder: str) -> bool:
    pending, seen = [folder], 0
    while pending and seen < _MOST_ENTRIES:
        try:
            with os.scandir(pending.pop()) as entries:
                folders = []
                for entry in entries:
                    seen += 1
                    if entry.name.startswith((".", "_")):
                        if entry.name in ("_metadata", "_common_metadata") and _is_parquet_file(entry.path):
                            return True
                    elif entry.is_dir():
                        folders.append(entry.path)
                    elif (entry.name.endswith(SUFFIXES) or "." not in entry.name) and _is_parquet_file(entry.path):
                        return True
                    if seen >= _MOST_ENTRIES:
                        break
                pending += sorted(folders, key=natural, reverse=True)
        except OSError:
            continue
    return False


FORMAT = Format(
    "parquet",
    "Parquet files (or a folder of them)",
    is_parquet,
    "rankfeed.sources.parquet.source:ParquetSource",
)
