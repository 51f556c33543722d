"""Columns that lie in the names of folders (``year=2024/month=7``), not in the files."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from rankfeed.columns import ColumnBuffer, Field
from rankfeed.errors import SourceError
from rankfeed.sources.parquet.detect import Place
from rankfeed.sources.paths import check_utf8

_INTEGER = re.compile(r"-?[0-9]{1,18}")


class Partitions:
    """What folders say of the files in them.

    Where a file has a column of that name itself (Polars writes both), that one is read, and held to the folder's
    name by :meth:`check`.

    Args:
        found: the files.
        own: names of the files' own columns.
        nulls: as with a source.

    Raises:
        SourceError: files differ in their folders' keys, or two names of folders are the same number (``y=01`` and
            ``y=1``); names both.

    Examples:
        >>> both = Partitions([Place("a", (("day", "07"),)), Place("b", (("day", "12"),))], own=[])
        >>> both.fields, both.stored("day", file=1, rows=2).values
        ({'day': Field(kind='dense', dtype='int64', shape=())}, array([12, 12]))
    """

    def __init__(
        self, found: Sequence[Place], own: Collection[str], nulls: Literal["error", "mask"] = "error"
    ) -> None:
        self._paths = [place.path for place in found]
        names = [key for key, _ in found[0].keys]
        for place in found:
            keys = [key for key, _ in place.keys]
            if keys != names or len(set(keys)) != len(keys):
                raise SourceError(
                    "files differ in the keys of their folders",
                    expected=f"{names}, as for {found[0].path}",
                    found=keys,
                    where=place.path,
                    remedy="open folders of one layout at a time",
                )
            for key, text in place.keys:
                check_utf8(f"{key}={text}", place.path, "a folder that names the value of a column")
        self._texts = {name: [place.keys[number][1] for place in found] for number, name in enumerate(names)}
        self._whole = {
            name: any(texts) and all(text is None or _INTEGER.fullmatch(text) for text in texts)
            for name, texts in self._texts.items()
        }
        for name in names:
            if self._whole[name]:
                self._check_distinct(name)
        self.fields: dict[str, Field] = {}
        for name in names:
            if name not in own:
                self.fields[name] = Field("dense", "int64") if self._whole[name] else Field("str")
                if nulls == "mask":
                    self.fields[f"{name}_valid"] = Field("dense", "bool")
        self._nulls = nulls

    def _check_distinct(self, name: str) -> None:
        """Refuse two names of folders that are one number.

        Raises:
            SourceError: names both.
        """
        first: dict[int, str] = {}
        for text, path in zip(self._texts[name], self._paths, strict=True):
            if text is not None and first.setdefault(int(text), text) != text:
                raise SourceError(
                    f"two folder names give the same value of column {name!r}",
                    expected="one spelling of each number",
                    found=f"{name}={first[int(text)]} and {name}={text}",
                    where=path,
                    remedy="rename the folders of one of them, or leave the column out with columns=",
                )

    def describe(self) -> list[str]:
        """What a fingerprint counts: each key with its value for each file."""
        return [f"{name}={texts}" for name, texts in self._texts.items()]

    def stored(self, name: str, file: int, rows: int) -> ColumnBuffer:
        """A column for some rows of a file.

        Raises:
            SourceError: the folder's value is a null, and nulls are errors.
        """
        if name not in self._texts:
            return ColumnBuffer(np.full(rows, self._texts[name.removesuffix("_valid")][file] is not None))
        text = self._texts[name][file]
        if text is None and self._nulls == "error":
            raise SourceError(
                f"the folder's name says that {name!r} is null",
                where=self._paths[file],
                remedy='leave the column out with columns=, or open with nulls="mask"',
            )
        if self._whole[name]:
            return ColumnBuffer(np.full(rows, int(text or 0), np.int64))
        encoded = np.frombuffer((text or "").encode(), np.uint8)
        return ColumnBuffer(np.tile(encoded, rows), np.arange(rows + 1, dtype=np.int64) * len(encoded))

    def check(self, name: str, file: int, stored: ColumnBuffer) -> None:
        """Hold a file's own column to the name of its folder, where both are whole numbers or both text.

        A null contradicts nothing.

        Raises:
            SourceError: they contradict each other.
        """
        text = self._texts[name][file] if name in self._texts else None
        if text is None:
            return
        given: Any = slice(None) if stored.unreadable is None else ~stored.unreadable.rows
        if stored.index is not None:  # of a dictionary column, the values that are used
            given = np.unique(stored.index[given])
        if stored.offsets is None:
            if not self._whole[name] or stored.values.dtype.kind not in "iu" or stored.values.ndim != 1:
                return
            same = bool((stored.values[given] == int(text)).all())
        else:
            encoded = text.encode()
            starts, lengths = stored.offsets[:-1][given], np.diff(stored.offsets)[given]
            same = bool((lengths == len(encoded)).all())
            if same and len(starts) and encoded:
                rows = stored.values[starts[:, None] + np.arange(len(encoded))]
                same = bool((rows == np.frombuffer(encoded, np.uint8)).all())
        if not same:
            raise SourceError(
                f"the file's own column {name!r} contradicts the folder that it lies in",
                expected=f"{text} in all rows",
                where=self._paths[file],
                remedy="leave the column out with columns=, or move the file to where it belongs",
            )
