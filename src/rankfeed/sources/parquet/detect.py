"""Which Parquet files are meant, and what the folders that they lie in say of them.

Hive, Spark, Polars, DuckDB and others write ``year=2024/month=7/part-0.parquet``: the folders' names are columns
that the files themselves lack.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rankfeed.errors import SourceError
from rankfeed.sources.parquet.footer import ENCRYPTED, MAGIC
from rankfeed.sources.paths import Paths, expand, files_in, head, is_one, matched, natural

SUFFIXES = (".parquet", ".parq", ".pqt", ".pq")

#: Folders that tell that files beside them may have been deleted, by what made them.
_TABLES = {
    "_delta_log": ("a Delta Lake table", "deltalake.DeltaTable(path).file_uris()"),
    ".hoodie": ("a Hudi table", "the list of files that Hudi gives for a snapshot"),
}
#: Entries of folders that are looked at to find out whether Parquet files lie there.
_LOOKED_AT = 2_000
#: What Hive writes for a null.
NULL = "__HIVE_DEFAULT_PARTITION__"

_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class Place:
    """A file, and the values of its folders.

    Args:
        path: of the file.
        keys: (name, value) of each folder that is called ``name=value``, outermost first; None for a null.
    """

    path: str
    keys: tuple[tuple[str, str | None], ...] = ()


def places(where: Paths) -> list[Place]:
    """The files that are meant, in the order given, those of a folder in natural order.

    Below a folder that is given, every ``key=value`` folder counts; for files, those right above them.

    Raises:
        SourceError: nothing is there, or a folder is a table whose log says which files count.
    """
    found: list[Place] = []
    for path in expand(where):
        if not os.path.isdir(path):
            found.append(Place(os.path.abspath(path), _keys_above(path)))
            continue
        _refuse_tables(path)
        files = files_in(path, SUFFIXES, recursive=True) or [
            each for each in files_in(path, ("",), recursive=True) if _is_parquet(each)
        ]
        if not files:
            raise SourceError(
                "the folder holds no Parquet files",
                expected="files that end with " + ", ".join(SUFFIXES),
                where=path,
            )
        for file in files:
            folders = os.path.relpath(os.path.dirname(file), path).split(os.sep)
            found.append(Place(os.path.abspath(file), _keys([name for name in folders if "=" in name])))
    return found


def _refuse_tables(folder: str) -> None:
    """Never read a table's files by their names: those that were deleted or replaced are still there."""
    for name, (what, remedy) in _TABLES.items():
        if os.path.isdir(os.path.join(folder, name)):
            raise _stale(what, folder, f"open the list of files that count: {remedy}")
    metadata = os.path.join(folder, "metadata")
    if os.path.isdir(metadata) and any(name.endswith(".metadata.json") for name in os.listdir(metadata)):
        raise _stale(
            "an Iceberg table", folder, "open the list of files that count: pyiceberg's table.scan().plan_files()"
        )


def _stale(what: str, folder: str, remedy: str) -> SourceError:
    return SourceError(
        f"the folder is {what}: which of its files count is written in its log", where=folder, remedy=remedy
    )


def _keys_above(path: str) -> tuple[tuple[str, str | None], ...]:
    folders: list[str] = []
    for name in reversed(os.path.dirname(os.path.abspath(path)).split(os.sep)):
        if "=" not in name:
            break
        folders.insert(0, name)
    return _keys(folders)


def _keys(folders: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    pairs = (name.split("=", 1) for name in folders)
    return tuple((unquote(key), None if value == NULL else unquote(value)) for key, value in pairs if key)


def fits(where: Paths) -> bool:
    """Whether these are Parquet files, or folders with some: by their first or last bytes."""
    paths = [os.fspath(where)] if is_one(where) and os.path.exists(where) else matched(where)  # type: ignore[arg-type]
    if not paths:
        return False
    return all(_has_parquet(path) if os.path.isdir(path) else _is_parquet(path) for path in (paths[0], paths[-1]))


def _is_parquet(path: str) -> bool:
    if head(path, 4) in (MAGIC, ENCRYPTED):
        return True
    try:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size == 0:
                return path.endswith(SUFFIXES)  # nothing else can be said of it than what its name does
            file.seek(max(0, size - 4))
            return file.read(4) in (MAGIC, ENCRYPTED)
    except OSError:
        return False


def _has_parquet(folder: str) -> bool:
    pending, looked = [folder], 0
    while pending and looked < _LOOKED_AT:
        try:
            with os.scandir(pending.pop()) as entries:
                folders = []
                for entry in entries:
                    looked += 1
                    if entry.name.startswith((".", "_")):
                        if entry.name in ("_metadata", "_common_metadata") and _is_parquet(entry.path):
                            return True
                    elif entry.is_dir():
                        folders.append(entry.path)
                    elif (entry.name.endswith(SUFFIXES) or "." not in entry.name) and _is_parquet(entry.path):
                        return True
                    if looked >= _LOOKED_AT:
                        break
                pending += sorted(folders, key=natural, reverse=True)
        except OSError:
            continue
    return False
