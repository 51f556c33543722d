"""Which Arrow IPC files are meant, and opening one: messages, plain columns, and how rows fall into blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.errors import CorruptError, SourceError
from rankfeed.sources.arrow_decode import read_schema
from rankfeed.sources.arrow_errors import arrow_errors
from rankfeed.sources.arrow_messages import MAGIC, REMEDY, Messages, read_messages
from rankfeed.sources.arrow_places import Shape, leaves, stored_type, without_nulls
from rankfeed.sources.arrow_rows import LeafRows, problem
from rankfeed.sources.paths import Paths, expand, files_in, head, matched
from rankfeed.storage import digest_of, map_file

Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]

SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")
#: Bytes of a block of what is not compressed.
_BLOCK_BYTES = 4 << 20
#: Rows that are decoded at once where there are dictionaries, whose values may be much longer than their numbers.
_DICTIONARY_ROWS = 1 << 16


@dataclass(frozen=True)
class ArrowFile:
    """An open file.

    Args:
        data: its bytes.
        messages: where its record batches lie.
        starts: int64 [batches + 1], the first row of each.
        plain: columns that are read where they lie.
        schema: a `pyarrow.Schema`.
        digest: changes with columns, counts, and where the record batches lie.
    """

    data: Bytes
    messages: Messages
    starts: Int64
    plain: Mapping[str, LeafRows]
    schema: Any
    digest: str


def open_arrow(path: str, shapes: Mapping[str, Shape], *, unended: bool = False) -> ArrowFile:
    """Open a file.

    Args:
        path: of it.
        shapes: columns of lists of lists that are arrays, and their shapes.
        unended: whether a stream without the mark at its end is read for what is there.

    Raises:
        SourceError: it cannot be read.
        CorruptError: it is damaged.
    """
    data = map_file(path)
    messages = read_messages(data, path, unended=unended)
    with arrow_errors(path):
        schema = read_schema(data, messages)
        found = without_nulls(leaves(schema, shapes), messages)
        # Names of inner fields are looked at here alone: they may be no text.
        types = [(each.name, _type(each.type)) for each in schema]
    for name, leaf in found.items():
        if (why := problem(leaf, messages)) is not None:
            raise CorruptError(
                "an Arrow file is damaged", found=why, where=f"{path}, column {name!r}", remedy=REMEDY
            )
    starts = np.concatenate([[0], np.cumsum(messages.rows)]).astype(np.int64)
    digest = digest_of(
        repr((len(data), types, len(messages.dictionaries))).encode(),
        messages.rows.tobytes(),
        messages.batches.tobytes(),
    )
    plain = {name: LeafRows(leaf, data, messages) for name, leaf in found.items()}
    return ArrowFile(data, messages, starts, plain, schema, digest)


def _type(kind: Any) -> str:
    """A type as text, the same whether or not the library is imported that an extension type is of."""
    kind = stored_type(kind)
    inner = [kind.field(index) for index in range(kind.num_fields)]
    if not inner:
        return str(kind)
    return f"{kind.id}{getattr(kind, 'list_size', '')}<{', '.join(f'{e.name}: {_type(e.type)}' for e in inner)}>"


def check_alike(first: Any, other: Any, first_path: str, path: str) -> None:
    """Compare the schemas of two files.

    Raises:
        SourceError: they differ; names the column.
    """
    if not first.equals(other, check_metadata=False):
        differing = [
            name
            for name in dict.fromkeys([*first.names, *other.names])
            if [each for each in first if each.name == name] != [each for each in other if each.name == name]
        ]
        raise SourceError(
            "files differ in their columns",
            expected=f"{first_path}: " + ", ".join(f"{each.name!r}: {each.type}" for each in first)[:300],
            found=", ".join(f"{each.name!r}: {each.type}" for each in other)[:300],
            where=f"{path}, column {(differing or ['(their order)'])[0]!r}",
            remedy="write them with one schema, or open them one by one",
        )


def pieces_of(number: int, messages: Messages) -> tuple[Int64, Int64]:
    """What is decoded at once, [pieces, 4] of file, record batch, first row and rows; and the rows of blocks."""
    pieces: list[tuple[int, int, int, int]] = []
    blocks: list[int] = []
    filled = 0
    sizes = (messages.batches[:, 2] - messages.batches[:, 1]).tolist()
    for batch, (rows, size) in enumerate(zip(messages.rows.tolist(), sizes, strict=True)):
        if not rows:
            continue
        whole = bool(messages.compressed[batch]) or not messages.little
        cuts = 1 if whole else min(rows, max(1, math.ceil(size / _BLOCK_BYTES)))
        edges = [rows * cut // cuts for cut in range(cuts + 1)]
        step = rows if whole or not messages.dictionaries else _DICTIONARY_ROWS
        for low, high in pairwise(edges):
            pieces += [(number, batch, first, min(step, high - first)) for first in range(low, high, step)]
        if not blocks or whole or cuts > 1 or filled + size > _BLOCK_BYTES:
            blocks += [high - low for low, high in pairwise(edges)]
            filled = _BLOCK_BYTES if whole or cuts > 1 else size
        else:  # small ones are read together
            blocks[-1] += rows
            filled += size
    return np.array(pieces, np.int64).reshape(-1, 4), np.array(blocks, np.int64)


def files_of(where: Paths) -> list[str]:
    """The files meant, folders spelled out.

    Raises:
        SourceError: there are none.
    """
    found: list[str] = []
    for path in expand(where):
        inside = files_in(path, SUFFIXES) if os.path.isdir(path) else [path]
        if not inside:
            raise SourceError("no Arrow files in the folder", expected=" or ".join(SUFFIXES), where=path)
        found += inside
    return found


def is_arrow(path: str) -> bool:
    """Whether a file begins like an Arrow IPC file or stream."""
    first = head(path, 16)
    if first.startswith(MAGIC):
        return True
    # A stream: the mark of a message, the length of its head, and the place of its table, all small.
    return len(first) == 16 and first[:4] == b"\xff" * 4 and 0 < int.from_bytes(first[4:8], "little") < 1 << 28


def fits(where: Paths) -> bool:
    """Whether these are Arrow IPC files, or folders of them."""
    found = []
    for path in matched(where):
        try:
            found += files_in(path, SUFFIXES) if os.path.isdir(path) else [path]
        except SourceError:
            return False
        # A folder of Hugging Face's says itself which of its files are its rows.
        if os.path.isfile(os.path.join(path, "state.json")):
            return False
    return bool(found) and all(is_arrow(path) for path in {found[0], found[-1]})
