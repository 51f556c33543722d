"""A version of a Lance table, read with the Lance library in this process, or in a helper if it would crash here.

The library starts threads at its first use; of processes that are forked later and use it, about half crash or
hang. So opening a table uses a helper process only, and the process that reads uses the library directly. A
process that was forked from one that had imported the library reads through a helper process, which costs a copy.
"""

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from rankfeed._util.fork_safety import init_in_each_process
from rankfeed._util.imports import need
from rankfeed._util.threads import in_parallel
from rankfeed.errors import ArgumentError, CorruptError, RankfeedError, SourceError, UnsafeError
from rankfeed.sources.source import Int64, check_same_data
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.untrusted import check_data_name

_MAGIC = b"LANC"
#: Major and minor version of a data file, and the magic bytes.
_FOOTER = struct.Struct("<HH4s")
_CLEANED_UP = "open the table again; to keep a version from being cleaned up while it is read, tag it"
_DAMAGED = "restore the file from a copy, or open an older version of the table (version=...)"

#: Seconds between two checks of the helper process that its parent still exists.
_PARENT_CHECK_SECONDS = 5.0
_PROGRAM = "import sys; from rankfeed.sources.lance.lance_table import serve; serve(int(sys.argv[1]))"
#: Tables that a fork inherited: freeing them would run the library.
_ABANDONED: list[object] = []
_forked_from_lance = False


@dataclass(frozen=True)
class TableInfo:
    """What is known of a version before rows are read."""

    uri: str
    version: int
    schema: Any  #: a `pyarrow.Schema`
    fragments: Int64  #: [f], their ids
    rows: Int64  #: [f], rows of each that are not deleted
    data_bytes: Int64  #: [f], size of the data files of each
    #: Of all this except the URI, and of the names of the data files, which Lance draws at random.
    digest: str
    #: int64 [k], sorted: the rows that a filter accepts, counted over the rows that are not deleted.
    chosen: Int64 | None = None
    files: tuple[tuple[str, ...], ...] = ()  #: the paths of the files of each fragment, if they are local


class LanceTable:
    """An open version of a table: a number or a tag; None for the latest. ``table`` is an open `LanceDataset`."""

    closed = False

    def __init__(self, uri: str, version: int | str | None, table: Any = None) -> None:
        lance = need("lance", extra="lance")
        self.uri = uri
        with lance_errors(f"{uri}, version {version or 'latest'}"):
            try:
                self._table = lance.dataset(uri, version=version) if table is None else table
            except ValueError as error:
                if "not found" not in str(error).lower():
                    raise
                raise SourceError(
                    "there is no such table" if version is None else f"the table has no version {version}",
                    found=_short_message(error),
                    where=uri,
                    remedy=None if version is None else _CLEANED_UP,
                ) from error
            self.version = int(self._table.version)
            self._fragments = {fragment.fragment_id: fragment for fragment in self._table.get_fragments()}
        self.where = f"{uri}, version {self.version}"  # in error messages
        self._checked: set[int] = set()  # fragments

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, as `IsolatedTable` does in another process."""
        return getattr(self, method)(*arguments)

    def info(self, condition: str | None = None) -> TableInfo:
        """Schema, fragments and counts, and the rows that a condition in SQL accepts."""
        rows, sizes, paths = [], [], []
        with lance_errors(self.where):
            schema = self._table.schema
            names = [str(self.version), str(schema)]
            for fragment_id, fragment in self._fragments.items():
                data = _data_files(fragment, self.where)
                rows.append(int(fragment.count_rows()))
                sizes.append(sum(size for _, size in data))
                names.append(f"{fragment_id}:{fragment.metadata.physical_rows}:{rows[-1]}:{data}")
                paths.append(tuple(path for path, _ in self._files(fragment, self.where)))
        if rows and min(rows) < 0:
            raise CorruptError("a fragment has a negative number of rows", where=self.where, remedy=_DAMAGED)
        return TableInfo(
            self.uri,
            self.version,
            schema,
            np.array(list(self._fragments), np.int64),
            np.array(rows, np.int64),
            np.array(sizes, np.int64),
            digest_of(*(name.encode() for name in names)),
            None if condition is None else self._matching_rows(condition),
            tuple(paths),
        )

    def _matching_rows(self, condition: str) -> Int64:
        with lance_errors(self.where):
            try:
                scanner = self._table.scanner(columns=["_rowoffset"], filter=condition, scan_in_order=True)
                parts = [batch.column(0).to_numpy().astype(np.int64) for batch in scanner.to_batches()]
            except (ValueError, TypeError) as error:
                if "Invalid user input" not in str(error):
                    raise
                raise ArgumentError(
                    "the filter cannot be used",
                    expected="a condition in SQL on the table's columns, such as: label = 3 AND year > 1999",
                    found=f"{condition!r}: {_short_message(error)}",
                    where=self.where,
                ) from error
        return np.sort(np.concatenate([np.empty(0, np.int64), *parts]))

    def check(self) -> list[int]:
        """Check that all files exist and are complete; returns the fragments with a list of deleted rows."""
        in_parallel(self._check_fragment, list(self._fragments))
        return [key for key, fragment in self._fragments.items() if fragment.metadata.deletion_file]

    def read_deletions(self, fragment: int) -> None:
        """Read a list of deleted rows; a damaged one may crash the process."""
        with lance_errors(self._fragment_name(fragment)):
            self._fragments[fragment].scanner(columns=[], with_row_address=True, limit=1).to_table()

    def span(self, fragment: int, first: int, count: int, columns: Sequence[str]) -> Any:
        """A range of the rows of a fragment that are not deleted, as a `pyarrow.Table`."""
        self._check_fragment(fragment)
        where = self._fragment_name(fragment)
        with lance_errors(where):
            scanner = self._fragments[fragment].scanner(
                columns=list(columns), offset=first, limit=count, batch_size=max(1, count)
            )
            return _counted(scanner.to_table(), count, where)

    def take(self, rows: Int64, fragments: Sequence[int], columns: Sequence[str]) -> Any:
        """Rows of some fragments, int64 [m] (ascending, without deleted ones), as a `pyarrow.Table`."""
        for fragment in fragments:
            self._check_fragment(fragment)
        with lance_errors(self.where):
            return _counted(self._table.take(rows, columns=list(columns)), len(rows), self.where)

    def batch(self, rows: Int64, columns: Any, row_ids: bool) -> Any:
        """Rows (at least one) in the given order, as a `pyarrow.RecordBatch`.

        ``columns`` are names, or a dict of names and SQL expressions; ``row_ids`` adds the column `_rowid`.
        """
        if row_ids:
            columns = {**columns, "_rowid": "_rowid"} if isinstance(columns, dict) else [*columns, "_rowid"]
        with lance_errors(self.where):
            table = self._table.take(rows, columns=columns).combine_chunks()
        (batch,) = _counted(table, len(rows), self.where).to_batches()
        return batch

    def blobs(self, rows: Int64, column: str) -> list[bytes | None]:
        """The bytes of a blob column in some rows, in the given order."""
        where = f"{self.where}, column {column!r}"
        with lance_errors(where):
            pairs = self._table.read_blobs(column, indices=rows.tolist(), preserve_order=True)
        if len(pairs) != len(rows):
            raise CorruptError("blobs are missing", expected=len(rows), found=len(pairs), where=where)
        return [content for _, content in pairs]

    def _fragment_name(self, fragment: int) -> str:
        return f"{self.where}, fragment {fragment}"

    def _check_fragment(self, fragment: int) -> None:
        """Check the files of a fragment before it is read: Lance reads truncated files without an error."""
        if fragment in self._checked:
            return
        where = self._fragment_name(fragment)
        with lance_errors(where):
            for path, size in self._files(self._fragments[fragment], where):
                _check_file(path, size, where)
        self._checked.add(fragment)

    def _files(self, fragment: Any, where: str) -> list[tuple[str, int]]:
        """Paths and sizes (0 if unknown) of the files of a fragment; none if they are not local."""
        if "://" in self.uri:
            return []
        files = [(f"data/{path}", size) for path, size in _data_files(fragment, where)]
        if fragment.metadata.deletion_file is not None:
            files += [(path, 0) for path in [fragment.deletion_file()] if path is not None]
        return [(os.path.join(self.uri, path), size) for path, size in files]


def _data_files(fragment: Any, where: str) -> list[tuple[str, int]]:
    """Paths and sizes (0 if not recorded) of data files, which must be in the table's directory."""
    files = fragment.metadata.files
    for file in files:
        check_data_name(file.path, where)
        if getattr(file, "base_id", None) is not None:
            raise UnsafeError(
                "the table names files of another table (a shallow clone)",
                expected="files in the directory of the table",
                found=f"{file.path} of base {file.base_id}",
                where=where,
                remedy="open the other table; or copy it by LanceDataset.deep_clone()",
            )
    return [(file.path, file.file_size_bytes or 0) for file in files]


def _check_file(path: str, size: int, where: str) -> None:
    """Check the size (0 if unknown) of a file, and the metadata at the end of a data file."""
    try:
        with open(path, "rb") as file:
            actual = os.fstat(file.fileno()).st_size
            file.seek(max(0, actual - _FOOTER.size))
            end = file.read(_FOOTER.size)
    except FileNotFoundError as error:
        raise _file_missing(path, where) from error
    except OSError as error:
        raise SourceError("a file of the table cannot be read", found=error, where=where) from error
    is_data = path.endswith(".lance")
    if (size and actual != size) or (is_data and not end.endswith(_MAGIC)):
        raise CorruptError(
            "a data file has another size than the table's manifest says, or no end marker",
            expected=f"{size or actual} bytes, ending with {_MAGIC!r}",
            found=f"{actual} bytes, ending with {end[-4:]!r}, in {path}",
            where=where,
            remedy=_DAMAGED,
        )
    if is_data and _FOOTER.unpack(end)[:2] >= (0, 3):  # older files have other metadata
        # If a page has an encoding with an unknown name and a zero byte in it, a scan ends the process
        # (pylance 14: `CString::new` in arrow-rs' `ffi_stream`). Here it raises an error.
        need("lance.file", extra="lance").LanceFileReader(path).metadata()


def _file_missing(problem: str, where: str) -> CorruptError:
    return CorruptError(
        "a file of the table is missing",
        expected="all files of this version: was it cleaned up while it was in use?",
        found=problem,
        where=where,
        remedy=_CLEANED_UP,
    )


def _counted(table: Any, rows: int, where: str) -> Any:
    if table.num_rows != rows:
        raise CorruptError(
            "Lance returned another number of rows than requested",
            expected=rows,
            found=table.num_rows,
            where=where,
            remedy=_DAMAGED,
        )
    return table


@contextmanager
def lance_errors(where: str) -> Iterator[None]:
    """Convert errors of the library, and Rust panics (no `Exception`), to errors that name the table."""
    try:
        yield
    except RankfeedError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the program
        text = _short_message(error)
        if "not found" in text.lower() or "No such file" in text:
            raise _file_missing(text, where) from error
        raise CorruptError(
            "the table cannot be read: it may be damaged", found=text, where=where, remedy=_DAMAGED
        ) from error


def _short_message(error: object) -> str:
    """The message of an error of the library, without positions in its source."""
    text = str(error).split(", /home/")[0].split(", /Users/")[0].splitlines()
    return f"{type(error).__name__}: {text[0][:400] if text else ''}"


def forked_from_lance() -> bool:
    """Whether this process was forked from one where the library may have run, and so must not use it."""
    return _forked_from_lance


def _after_fork_in_child() -> None:
    global _forked_from_lance
    _forked_from_lance = _forked_from_lance or "lance" in sys.modules


os.register_at_fork(after_in_child=_after_fork_in_child)


class IsolatedTable:
    """A `LanceTable` in a helper process, which ends with this one; a crash of the library is a CorruptError."""

    def __init__(self, uri: str, version: int | str | None) -> None:
        self.where = f"{uri}, version {version or 'latest'}"
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        try:
            self.where = self.call("open", uri, version)
        except RankfeedError:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, about: str = "") -> Any:
        """Call a method of the table; ``about`` is what it reads, for the error."""
        with self._lock:
            try:
                self._pipe.send((method, arguments))
                answer = self._pipe.recv()
            except BaseException as error:  # if interrupted, the next call must not receive this answer
                self.close()
                if not isinstance(error, (EOFError, OSError)):
                    raise
                raise CorruptError(
                    "Lance crashed while it read the table: it may be damaged",
                    found=f"exit status {self._process.returncode}",
                    where=self.where + about,
                    remedy="open an older version of the table (version=...), or restore it from a copy",
                ) from error
        if isinstance(answer, RankfeedError):
            raise answer
        return answer

    @property
    def closed(self) -> bool:
        """Whether the helper process ended."""
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int) -> None:
    """The main function of the helper process: open a table, and answer calls until the parent ends."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent
    table: Any = None
    with Connection(descriptor) as pipe:
        while True:
            while not pipe.poll(_PARENT_CHECK_SECONDS):
                if os.getppid() != parent:
                    return
            try:
                method, arguments = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                if method == "open":
                    table = LanceTable(*arguments)
                    answer = table.where
                else:
                    answer = table.call(method, *arguments)
            except RankfeedError as error:
                answer = error
            pipe.send(answer)


def inspect_table(uri: str, version: int | str | None, condition: str | None) -> TableInfo:
    """Check a table in a helper process, so that the library does not run here, and return what it knows of it."""
    with closing(IsolatedTable(uri, version)) as table:
        for fragment in table.call("check"):
            table.call("read_deletions", fragment, about=f", fragment {fragment}: its list of deleted rows")
        info: TableInfo = table.call("info", condition)
        return info


class TableHandle:
    """A table to read, opened when it is first used in a process; refused if it is another than ``info`` says."""

    def __init__(self, info: TableInfo) -> None:
        self._info = replace(info, schema=None, chosen=None, files=())
        self._open: LanceTable | IsolatedTable | None = None
        init_in_each_process(self._init_process)

    def _init_process(self) -> None:
        if self._open is not None:
            _ABANDONED.append(self._open)
        self._open, self._lock = None, threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return TableHandle, (self._info,)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LanceTable`, from any thread."""
        with self._lock:
            if self._open is None or self._open.closed:
                table = (IsolatedTable if forked_from_lance() else LanceTable)(self._info.uri, self._info.version)
                check_same_data(table.call("info").digest, self._info.digest, table.where)
                self._open = table
            table = self._open
        return table.call(method, *arguments)
