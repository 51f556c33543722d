"""Arrow IPC files and streams (Feather too) that others wrote, read in place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_bool, invalid
from rankfeed.columns import Columns, Field, Stored, column_of_parts
from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow_decode import copied, decoded, read_batch
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.arrow_open import ArrowFile, check_alike, files_of, fits, open_arrow, pieces_of
from rankfeed.sources.arrow_places import Shape
from rankfeed.sources.arrow_rows import column_of
from rankfeed.sources.arrow_table import known_fields
from rankfeed.sources.arrow_types import VALID, Nulls
from rankfeed.sources.chunked import CACHE_BYTES, ChunkedSource
from rankfeed.sources.format import Format
from rankfeed.sources.paths import Paths, common_root
from rankfeed.sources.source import Int64, by_chunk, check_columns, check_ids
from rankfeed.storage import DataFiles, check_whole, digest_of, mapped, touched
from rankfeed.storage.kept import Kept

#: Files that are held open; what a batch points into stays, however many others are opened.
OPEN_FILES = 256


class ArrowSource(ChunkedSource):
    """Arrow IPC files or streams: one, a list, a pattern, or a folder of them.

    Columns of numbers, of fixed-size lists, of lists of these, of text and of bytes are read where they lie in the
    mapped files, whatever the record batches. Compressed record batches are decoded whole, and kept in a bounded
    cache; so are columns that are none of these (bits, dictionaries, lists of text).

    Args:
        where: a path, a glob or brace pattern, a folder, or a list of these.
        columns: names of those to offer; None for all.
        nulls: "error": a null that is met is an error which names file, row and column; "mask": it is read as zero
            or empty, and a boolean column ``<name>_valid`` tells.
        unended: whether a stream without the mark at its end is read for what is there.
        shapes: columns of lists of lists that are arrays, and their shapes; None where a dimension varies.
        cache_bytes: of decoded record batches that are kept, shared by the threads of a process.

    Raises:
        SourceError: nothing is there, or files differ in their columns.
        CorruptError: a file is damaged.
        ArgumentError: no such column.

    Examples:
        >>> import tempfile, pyarrow as pa, pyarrow.feather
        >>> path = tempfile.mkdtemp() + "/t.feather"
        >>> pa.feather.write_feather(pa.table({"x": [1, 2, 3], "tokens": [[1], [], [2, 3]]}), path)
        >>> ArrowSource(path)[2]["tokens"]
        array([2, 3])
    """

    files: DataFiles

    def __init__(
        self,
        where: Paths,
        *,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        unended: bool = False,
        shapes: Mapping[str, Shape] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._paths = [os.path.abspath(path) for path in files_of(where)]
        self._nulls: Nulls = nulls
        self._unended = check_bool("unended", unended)
        if shapes is not None and not isinstance(shapes, Mapping):
            raise invalid("shapes", "a dict of shapes by column", shapes)
        shape: Any
        for shape in (shapes or {}).values():
            if not isinstance(shape, list | tuple) or not all(each is None or type(each) is int for each in shape):
                raise invalid("shapes", 'a dict of shapes by column, such as {"x": (None, 3)}', shapes)
        self._shapes = dict(shapes or {})
        self._open: Kept[ArrowFile] = Kept()
        self.files = DataFiles(self._paths)
        self._exceeds = int(self.files.sizes.sum()) > mapped.RESIDENT_BYTES
        first: ArrowFile | None = None
        plain: set[str] | None = None
        rows, chunks, blocks, digests = [], [], [], []
        for number, path in enumerate(self._paths):
            file = self._file(number)
            first = file if first is None else first
            check_alike(first.schema, file.schema, self._paths[0], path)
            if file.starts[-1]:  # one without rows has no record batch to say how they lie
                plain = set(file.plain) if plain is None else plain & set(file.plain)
            rows.append(int(file.starts[-1]))
            pieces, sizes = pieces_of(number, file.messages)
            chunks.append(pieces)
            blocks.append(sizes)
            digests.append(file.digest)
        assert first is not None
        if plain is None:
            raise SourceError("there are no rows", where=self._paths[0])
        with arrow_errors(self._paths[0]):
            known = known_fields(first.schema, nulls, self._shapes, columns)
        self._fields = {name: known[name] for name in check_columns(columns, known)}
        self._plain = frozenset(plain & set(self._fields))
        # What is read where it lies has no null in any file: of its mask nothing needs to be read.
        masks = {name + VALID for name in plain} if nulls == "mask" else set()
        self._whole = frozenset(masks & set(self._fields))
        self._decoded = frozenset(self._fields) - self._plain - self._whole
        self._file_starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._chunks = np.concatenate(chunks)
        self._blocks = np.concatenate(blocks)
        root = common_root(self._paths)
        names = [os.fsencode(os.path.relpath(path, root)) for path in self._paths]
        self._fingerprint = digest_of(*names, *(each.encode() for each in (*digests, self.files.fingerprint)))
        self._digests = digests
        self._init_chunks(self._chunks[:, 3], cache_bytes)
        if not self._decoded:
            self.looks_ahead = 0

    def __repr__(self) -> str:
        some = (
            self._paths[0] if len(self._paths) == 1 else f"{len(self._paths)} files in {common_root(self._paths)}"
        )
        return f"ArrowSource({some!r}, {len(self)} samples)"

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """Any order where columns are read in place; windows where a column is decoded."""
        return "window" if self._decoded else "global"

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return self._fields

    @property
    def blocks(self) -> Int64:
        """Rows in about 4 MiB, or in a compressed record batch: int64."""
        return self._blocks

    @property
    def fingerprint(self) -> str:
        """Of relative names, sizes, columns, where the record batches lie, and content samples."""
        return self._fingerprint

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into the files where they can be.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a null; names file and row.
            CorruptError: a file is damaged.
        """
        ids = check_ids(sample_ids, len(self))
        names = check_columns(columns, self._fields)
        self.files.check_open(at_intervals=True)
        plain = [name for name in names if name in self._plain]
        rest = [name for name in names if name in self._decoded]
        parts: dict[str, list[Any]] = {name: [] for name in plain}
        wanted = by_chunk(ids, self._file_starts) if plain else []
        for number, rows, slots in wanted:
            file = self._file(number)
            if len(wanted) <= mapped.LOOKS:
                check_whole(file.data, self._paths[number])
            batch = file.starts.searchsorted(rows, side="right") - 1
            within = rows - file.starts[batch]

            def where(row: int, number: int = number, batch: Int64 = batch, rows: Int64 = rows) -> str:
                return f"{self._paths[number]}, record batch {batch[row]}, row {rows[row]}"

            for name in plain:
                parts[name].append(file.plain[name].part(batch, within, slots, where))
        made = {name: column_of(self._fields[name], parts[name]) for name in plain}
        touched(lambda: sum(column.nbytes for column in made.values()), len(ids) * len(plain))
        if self._whole:
            valid = Stored(np.ones(len(ids), np.bool_)).part(np.arange(len(ids)))
            made |= {name: column_of_parts(self._fields[name], [valid]) for name in names if name in self._whole}
        if rest:
            made.update(super().fetch(ids, rest))
        return Columns({name: made[name] for name in names}, len(ids))

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Decode what will be read next, in the background."""
        rest = [name for name in check_columns(columns, self._fields) if name in self._decoded]
        if rest:
            super().expect(sample_ids, rest)

    def _load_chunk(self, number: int, names: tuple[str, ...]) -> dict[str, Stored]:
        place, batch, first, rows = self._chunks[number].tolist()
        file = self._file(place)
        check_whole(file.data, self._paths[place])
        where = f"{self._paths[place]}, record batch {batch}"
        start, _, end = file.messages.batches[batch].tolist()
        touched(lambda: (end - start) * rows // int(file.messages.rows[batch]))
        with arrow_errors(where):
            piece = slice(first, first + rows)
            found = read_batch(file.data, file.messages, batch, names, self._nulls, piece)
            fields = {name: self._fields[name] for name in names}
            if any(field.kind == "object" for field in fields.values()):
                found = copied(found)  # objects are decoded from it later
            first_row = int(file.starts[batch]) + first
            made = decoded(found, fields, self._shapes, where=where, first_row=first_row, nulls=self._nulls)
        # A view would hold its file open for as long as the chunk is kept.
        return {
            name: replace(stored, values=stored.values.copy())
            if np.may_share_memory(stored.values, file.data)
            else stored
            for name, stored in made.items()
        }

    def _file(self, number: int) -> ArrowFile:
        """A file, open; as it was when the source was made."""
        return self._open.get(number, lambda: self._opened(number), most=OPEN_FILES)

    def _opened(self, number: int) -> ArrowFile:
        path = self._paths[number]
        file = open_arrow(path, self._shapes, unended=self._unended, by_calls=self._exceeds)
        self.files.opened(number)
        if hasattr(self, "_digests") and file.digest != self._digests[number]:
            raise CorruptError("a file was replaced while it was in use", where=path, remedy="start the job again")
        return file


FORMAT = Format("arrow", "Arrow IPC files or streams (.arrow, .feather)", fits, ArrowSource)
