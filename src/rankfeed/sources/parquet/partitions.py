"""Columns in the names of directories (``year=2024/month=7``), not in the files."""

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from rankfeed.columns.columns import ColumnBuffer
from rankfeed.columns.field import Field
from rankfeed.errors import SourceError
from rankfeed.sources.parquet.detect import PartitionedFile
from rankfeed.sources.paths import check_utf8

_INTEGER = re.compile(r"-?[0-9]{1,18}")


class Partitions:
    """The values that directory names give to files, whose own columns are ``own``.

    If a file has a column of that name (Polars writes both), the column is read, and compared with the directory
    by :meth:`check`.
    """

    def __init__(
        self,
        files: Sequence[PartitionedFile],
        own: Collection[str],
        nulls: Literal["error", "mask"] = "error",
    ) -> None:
        self._paths = [file.path for file in files]
        self._nulls = nulls
        names = [key for key, _ in files[0].keys]
        for file in files:
            keys = [key for key, _ in file.keys]
            if keys != names or len(set(keys)) != len(keys):
                raise SourceError(
                    "files differ in the keys of their folders",
                    expected=f"{names}, as for {files[0].path}",
                    found=keys,
                    where=file.path,
                    remedy="open folders of one layout at a time",
                )
            for key, text in file.keys:
                check_utf8(f"{key}={text}", file.path, "a folder that names the value of a column")
        self._texts = {name: [file.keys[number][1] for file in files] for number, name in enumerate(names)}
        self._is_integer = {
            name: any(texts) and all(text is None or _INTEGER.fullmatch(text) for text in texts)
            for name, texts in self._texts.items()
        }
        self.fields: dict[str, Field] = {}
        for name in names:
            if self._is_integer[name]:
                self._check_spelling(name)
            if name not in own:
                self.fields[name] = Field("dense", "int64") if self._is_integer[name] else Field("str")
                if nulls == "mask":
                    self.fields[f"{name}_valid"] = Field("dense", "bool")

    def _check_spelling(self, name: str) -> None:
        """Refuse two directory names that are the same number (``y=01`` and ``y=1``)."""
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
        """For the fingerprint: each key with its value for each file."""
        return [f"{name}={texts}" for name, texts in self._texts.items()]

    def column(self, name: str, file: int, rows: int) -> ColumnBuffer:
        if name not in self._texts:
            return ColumnBuffer(np.full(rows, self._texts[name.removesuffix("_valid")][file] is not None))
        text = self._texts[name][file]
        if text is None and self._nulls == "error":
            raise SourceError(
                f"the folder's name says that {name!r} is null",
                where=self._paths[file],
                remedy='leave the column out with columns=, or open with nulls="mask"',
            )
        if self._is_integer[name]:
            return ColumnBuffer(np.full(rows, int(text or 0), np.int64))
        encoded = np.frombuffer((text or "").encode(), np.uint8)
        return ColumnBuffer(np.tile(encoded, rows), np.arange(rows + 1, dtype=np.int64) * len(encoded))

    def check(self, name: str, file: int, column: ColumnBuffer) -> None:
        """Compare a file's own column with its directory, if both are integers or both text; nulls are ignored."""
        text = self._texts[name][file] if name in self._texts else None
        if text is None:
            return
        given: Any = slice(None) if column.unreadable is None else ~column.unreadable.rows
        if column.index is not None:  # of a dictionary, the values that are used
            given = np.unique(column.index[given])
        if column.offsets is None:
            if not self._is_integer[name] or column.values.dtype.kind not in "iu" or column.values.ndim != 1:
                return
            same = bool((column.values[given] == int(text)).all())
        else:
            encoded = text.encode()
            starts, lengths = column.offsets[:-1][given], np.diff(column.offsets)[given]
            same = bool((lengths == len(encoded)).all())
            if same and len(starts) and encoded:
                rows = column.values[starts[:, None] + np.arange(len(encoded))]
                same = bool((rows == np.frombuffer(encoded, np.uint8)).all())
        if not same:
            raise SourceError(
                f"the file's own column {name!r} contradicts its folder",
                expected=f"{text} in all rows",
                where=self._paths[file],
                remedy="leave the column out with columns=, or move the file to where it belongs",
            )
