"""Equally long `.npy` files as the columns of one table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rankfeed.columns import Columns, Field
from rankfeed.errors import SourceError
from rankfeed.sources.npy.file import NumpyFileSource
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of


def column_name(path: str) -> str:
    """What a column is called: its file's name without the suffix.

    Examples:
        >>> column_name("data/x_train.npy")
        'x_train'
    """
    return os.path.splitext(os.path.basename(path))[0]


class NumpyColumnsSource(Source):
    """Rows over several `.npy` files: row i of each file is sample i. The files are memory-mapped.

    Args:
        paths: of the files; a column is called after its file, without the suffix.
        columns: names of those to offer; None for all.
        allow_pickle: whether arrays of objects may be read.

    Raises:
        SourceError: two files have one name, or arrays differ in their first dimension; names both.
        CorruptError, UnsafeError: see `NumpyFileSource`.
    """

    def __init__(
        self, paths: Sequence[str], *, columns: Sequence[str] | None = None, allow_pickle: bool = False
    ) -> None:
        self._files: dict[str, NumpyFileSource] = {}
        for path in paths:
            name = column_name(path)
            if name in self._files:
                raise SourceError(
                    "two columns have one name",
                    expected="files of different names",
                    found=f"{self._files[name].path} and {path}",
                    remedy="rename one of them, or leave it out",
                )
            self._files[name] = NumpyFileSource(path, allow_pickle=allow_pickle)
        first = next(iter(self._files.values()))
        for each in self._files.values():
            if len(each) != len(first):
                raise SourceError(
                    "columns differ in their number of rows",
                    expected=f"{len(first)} rows, as in {first.path}",
                    found=f"{len(each)} rows",
                    where=each.path,
                    remedy='leave the file out; or pass layout="samples" if each file is a sample',
                )
        self._names = check_columns(columns, {name: each.fields["array"] for name, each in self._files.items()})

    def _num_samples(self) -> int:
        return len(next(iter(self._files.values())))

    def __repr__(self) -> str:
        return f"NumpyColumnsSource({', '.join(self._names)}: {len(self)} samples)"

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return {name: self._files[name].fields["array"] for name in self._names}

    @cached_property
    def blocks(self) -> Int64:
        """Runs of rows, as of the file with the longest rows: int64."""
        return max((self._files[name].blocks for name in self._names), key=len)

    @cached_property
    def fingerprint(self) -> str:
        """Of the files."""
        return digest_of(*(self._files[name].fingerprint.encode() for name in self._names))

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples: pointers into the mapped files; copied where they do not lie as in a batch.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a file cannot be read.
            CorruptError: a file is damaged.
        """
        ids: Any = check_ids(sample_ids, len(self))
        names = check_columns(columns, self.fields)
        return Columns({name: self._files[name].fetch(ids)["array"] for name in names}, len(np.atleast_1d(ids)))

    def check_unchanged(self) -> None:
        """Find that one of the files was rewritten in place.

        Raises:
            CorruptError: one was; names it.
        """
        for each in self._files.values():
            each.check_unchanged()
