"""Hugging Face data sets: folders that `save_to_disk` wrote, and `Dataset` objects, read without `datasets`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_name, check_names, check_optional
from rankfeed.columns import Columns, Dense, Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.arrow.errors import arrow_errors
from rankfeed.sources.arrow.file import read_schema
from rankfeed.sources.arrow.source import ArrowSource
from rankfeed.sources.arrow.table import ArrowTableSource
from rankfeed.sources.arrow.types import Nulls, fields_of
from rankfeed.sources.chunked import CACHE_BYTES
from rankfeed.sources.format import Format
from rankfeed.sources.hf.features import Features, read_features
from rankfeed.sources.json_index import read_json
from rankfeed.sources.paths import Paths
from rankfeed.sources.source import Int64, Source, check_columns, check_ids
from rankfeed.storage import digest_of, resolve_data_name
from rankfeed.storage.decodable import decodable

STATE_NAME, INFO_NAME, DICT_NAME = "state.json", "dataset_info.json", "dataset_dict.json"

#: Rows of a block where an indices mapping leads all over the table.
_MAPPED_ROWS = 4096


@decodable
class _Named(msgspec.Struct):
    filename: str


@decodable
class _State(msgspec.Struct, rename={"data_files": "_data_files", "indices": "_indices_data_files",
                                     "fingerprint": "_fingerprint", "columns": "_format_columns",
                                     "all_columns": "_output_all_columns"}):  # fmt: skip
    data_files: list[_Named]
    fingerprint: str = ""
    indices: list[_Named] | None = None
    columns: list[str] | None = None
    all_columns: bool = False


@decodable
class _Info(msgspec.Struct):
    features: dict[str, Any] | None = None


@decodable
class _Dict(msgspec.Struct):
    splits: list[str]


class HuggingFaceSource(Source):
    """A folder that `Dataset.save_to_disk` wrote, or a `datasets.Dataset`.

    Columns are as Arrow has them (see `ArrowSource`), and as the features say: arrays of a fixed shape are dense,
    those with a varying first dimension ragged; of images, recordings and videos the encoded bytes are given.
    A format of the Dataset's selects columns, and does not change their types.

    Args:
        where: the folder, or a `datasets.Dataset`.
        split: which of the splits of a folder that `DatasetDict.save_to_disk` wrote.
        columns: names of those to offer; None for all, or for those of the Dataset's format.
        nulls: as for `ArrowSource`.
        cache_bytes: of decoded record batches that are kept.

    Raises:
        SourceError: it cannot be read, is empty, or has several splits.
        CorruptError: a file is missing or damaged.
        UnsafeError: a name leads out of the folder.
        ArgumentError: no such column or split, or the Dataset has a transform of its own.
    """

    def __init__(
        self,
        where: Any,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        nulls: Nulls = "error",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._options: dict[str, Any] = {"nulls": nulls, "cache_bytes": cache_bytes}
        self._wanted = None if columns is None else tuple(check_names("columns", columns))
        split = check_optional(check_name, "split", split)
        if isinstance(where, (str, os.PathLike)):
            self._dataset: Any = None
            self._folder = _folder(os.path.abspath(where), split)
        elif split is not None:
            raise ArgumentError("a Dataset is one split", found=f"split={split!r}", remedy="leave split out")
        else:
            check_dataset(where)
            self._dataset, self._folder = where, ""
        self._read()

    def _read(self) -> None:
        if self._dataset is None:
            state_path = os.path.join(self._folder, STATE_NAME)
            state = read_json(state_path, _State)
            info = read_json(os.path.join(self._folder, INFO_NAME), _Info)
            features, place, own = read_features(info.features, self._folder), self._folder, state.fingerprint
            table: Any = [resolve_data_name(self._folder, each.filename, state_path) for each in state.data_files]
            mapping: Any = [
                resolve_data_name(self._folder, each.filename, state_path) for each in state.indices or ()
            ] or None
            chosen = None if state.all_columns else state.columns
        else:
            dataset = self._dataset
            features, place = read_features(dataset.features.to_dict(), "the Dataset"), "the Dataset"
            own, table = dataset._fingerprint, _table_of(dataset.data)
            mapping = None if dataset._indices is None else _table_of(dataset._indices)
            chosen = None if dataset._output_all_columns else dataset._format_columns
        # Of a column of files, the bytes.
        columns = None if self._wanted is None else [*self._wanted, *(f"{each}.bytes" for each in self._wanted)]
        stored = _fields_of(table, features, place, self._options["nulls"], columns)
        known = {named: each for each in stored if (named := features.named(each)) is not None}
        wanted = self._wanted if self._wanted is not None else _chosen(chosen, known)
        names = check_columns(wanted, {name: stored[each] for name, each in known.items()})
        self._names = {name: known[name] for name in names}
        self._table = _source_of(table, list(self._names.values()), features, place, self._options)
        self._mapping = None if mapping is None else _mapping_of(mapping, len(self._table), place)
        self.looks_ahead = self._table.looks_ahead
        parts = [own, self._table.fingerprint, self._mapping.fingerprint if self._mapping else ""]
        self._fingerprint = digest_of(*(str(part).encode() for part in parts))

    def __getstate__(self) -> dict[str, Any]:
        if all(each is None or isinstance(each, ArrowSource) for each in (self._table, self._mapping)):
            return {**self.__dict__, "_dataset": None}  # files, as they were first seen here
        # A Dataset travels as `datasets` has it: files by their names, tables in memory whole.
        kept = ("_dataset", "_folder", "_options", "_wanted", "_fingerprint")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._dataset is None:
            return
        self._read()
        if self._fingerprint != state["_fingerprint"]:
            raise SourceError(
                "the data set was replaced while it was in use",
                expected=state["_fingerprint"],
                found=self._fingerprint,
                where=self._folder,
                remedy="start the job again",
            )

    def __repr__(self) -> str:
        return f"HuggingFaceSource({self._folder or 'a Dataset'!r}, {len(self)} samples)"

    def _num_samples(self) -> int:
        return len(self._table) if self._mapping is None else len(self._mapping)

    @property
    def default_shuffle(self) -> Literal["global", "window"]:  # type: ignore[override]
        """That of the files."""
        return self._table.default_shuffle

    @property
    def blocks(self) -> Int64:
        """Rows in about 4 MiB, or in a compressed record batch: int64."""
        if self._mapping is None:
            return self._table.blocks
        edges = np.append(np.arange(0, len(self), _MAPPED_ROWS), len(self))
        return np.diff(edges)

    @property
    def fields(self) -> Mapping[str, Field]:
        """What each column holds."""
        return {name: self._table.fields[stored] for name, stored in self._names.items()}

    @property
    def fingerprint(self) -> str:
        """Of the Dataset's own fingerprint, and of sizes, columns and counts."""
        return self._fingerprint

    def fetch(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> Columns:
        """The rows of some samples.

        Args:
            sample_ids: ints in [0, len(self)).
            columns: names of those wanted; None for all.

        Raises:
            SourceError: no such sample, or a null; names file and row.
            CorruptError: a file is damaged.
        """
        names = check_columns(columns, self.fields)
        rows = self._rows(check_ids(sample_ids, len(self)))
        found = self._table.fetch(rows, [self._names[name] for name in names])
        return Columns({name: found[self._names[name]] for name in names}, len(rows))

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        """Decode what will be read next, in the background."""
        names = check_columns(columns, self.fields)
        rows = self._rows(check_ids(sample_ids, len(self)))
        self._table.expect(rows, [self._names[name] for name in names])

    def check_unchanged(self) -> None:
        """Find that one of the files was rewritten in place.

        Raises:
            CorruptError: one was; names it.
        """
        for each in (self._table, self._mapping):
            if each is not None:
                each.check_unchanged()

    def _rows(self, ids: Int64) -> Int64:
        """Which rows of the table these samples are."""
        if self._mapping is None or not len(ids):
            return ids
        column = self._mapping.fetch(ids)[next(iter(self._mapping.fields))]
        assert isinstance(column, Dense)
        rows = column.gather()
        if int(rows.max()) >= len(self._table):
            raise CorruptError(
                "the indices mapping leads out of the table",
                expected=f"up to {len(self._table) - 1}",
                found=int(rows.max()),
                where=self._folder or "the Dataset",
            )
        return rows.astype(np.int64)


def _fields_of(
    table: Any, features: Features, place: str, nulls: Nulls, columns: Sequence[str] | None
) -> dict[str, Field]:
    """What is stored in files, judged by the first, or in a table in memory."""
    if isinstance(table, list) and not table:
        raise SourceError("the data set is empty", where=place)
    schema = read_schema(table[0]) if isinstance(table, list) else table.schema
    with arrow_errors(table[0] if isinstance(table, list) else place):
        return fields_of(schema, nulls=nulls, columns=columns, shapes=features.shapes)


def _source_of(
    table: Any, columns: list[str] | None, features: Features, place: str, options: Mapping[str, Any]
) -> ArrowSource | ArrowTableSource:
    """A source of files, or of a table in memory."""
    if isinstance(table, list):
        return ArrowSource(table, columns=columns, shapes=features.shapes, **options)
    return ArrowTableSource(table, columns=columns, shapes=features.shapes, name=place, **options)


def _mapping_of(mapping: Any, rows: int, place: str) -> ArrowSource | ArrowTableSource:
    source = _source_of(mapping, None, Features({}, frozenset()), place, {"nulls": "error"})
    found = list(source.fields.values())
    if [(field.kind, field.dtype, field.shape) for field in found] != [("dense", "uint64", ())]:
        raise CorruptError(
            "the indices mapping is none", expected="one column of uint64", found=source.fields, where=place
        )
    return source


def _chosen(columns: Sequence[str] | None, known: Mapping[str, str]) -> list[str] | None:
    """The columns of a format, with what is in those that are structs."""
    if columns is None:
        return None
    return [name for name in known if any(name == each or name.startswith(f"{each}.") for each in columns)]


def _table_of(table: Any) -> Any:
    """The files that a table of `datasets` consists of; or the table itself, where it was changed since."""
    blocks = getattr(table, "blocks", [[table]])
    parts = [part for row in blocks for part in row]
    if all(len(row) == 1 for row in blocks) and all(
        isinstance(getattr(part, "path", None), str) and not getattr(part, "replays", None) for part in parts
    ):
        return [part.path for part in parts]
    return table.table


def is_dataset(where: Any) -> bool:
    """Whether this is a `datasets.Dataset` whose rows are those of its table: without a transform of its own."""
    return (
        any(
            kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"
            for kind in type(where).__mro__
        )
        and where._format_type != "custom"
    )


def check_dataset(where: Any) -> None:
    """Refuse what is no Dataset that can be read without `datasets`.

    Raises:
        ArgumentError: it is something else, or has a transform of its own.
    """
    if not is_dataset(where):
        raise ArgumentError(
            "this is no folder and no Dataset without a transform",
            expected="a path, or a datasets.Dataset",
            found=type(where).__name__,
            remedy="give the transform to rankfeed.Loader, or wrap the Dataset with rankfeed.from_dataset",
        )


def _folder(path: str, split: str | None) -> str:
    """The folder of the split that is meant."""
    where = os.path.join(path, DICT_NAME)
    if not os.path.isfile(where):
        if split is not None:
            raise ArgumentError("this is one split", found=f"split={split!r}", remedy="leave split out")
        return path
    splits = read_json(where, _Dict).splits
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise ArgumentError(
            "the folder has several splits" if split is None else "no such split",
            expected="split= one of " + ", ".join(map(repr, splits)),
            found=None if split is None else repr(split),
            remedy=f"rankfeed.open(..., split={splits[0]!r})" if splits else None,
        )
    return resolve_data_name(path, str(split), where)


def fits(where: Paths) -> bool:
    """Whether this is a folder that `save_to_disk` wrote."""
    if not isinstance(where, (str, os.PathLike)):
        return False
    has_state = all(os.path.isfile(os.path.join(where, name)) for name in (STATE_NAME, INFO_NAME))
    return has_state or os.path.isfile(os.path.join(where, DICT_NAME))


FORMAT = Format("huggingface", "a folder of Hugging Face datasets (save_to_disk)", fits, HuggingFaceSource)
