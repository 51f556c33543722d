"""Hugging Face datasets: directories that `save_to_disk` wrote, and `Dataset` objects, read without `datasets`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankfeed._util.validate import check_columns_option, check_name, check_optional
from rankfeed.columns.columns import Column, Dense
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, CorruptError, SourceError
from rankfeed.sources.arrow.arrow_source import ArrowSource, ArrowTableSource
from rankfeed.sources.arrow.file import read_schema
from rankfeed.sources.arrow.types import ArrayShape, Nulls, fields_of, labels_of_features, masks_of
from rankfeed.sources.chunked import CACHE_BYTES
from rankfeed.sources.formats import HF_DICT_NAME, HF_INFO_NAME, HF_STATE_NAME
from rankfeed.sources.source import Int64, SourceView, check_columns, check_ids, check_same_data, even_blocks
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.commit import decodable
from rankfeed.storage.file_errors import arrow_errors
from rankfeed.storage.untrusted import read_json, resolve_data_name

#: Rows of a block if an indices mapping scatters samples over the table.
_MAPPED_ROWS = 4096
#: Features that are stored as a struct of the bytes of a file and its name.
_FILE_FEATURES = ("Image", "Audio", "Video", "Pdf", "Mesh", "Nifti")
_ARRAY_FEATURES = ("Array2D", "Array3D", "Array4D", "Array5D")
_Length = Annotated[int, msgspec.Meta(ge=0)]


@decodable
class _DataFile(msgspec.Struct):
    filename: str


@decodable
class _State(msgspec.Struct, rename={"data_files": "_data_files", "indices": "_indices_data_files",
                                     "fingerprint": "_fingerprint", "columns": "_format_columns",
                                     "all_columns": "_output_all_columns"}):  # fmt: skip
    data_files: list[_DataFile]
    fingerprint: str = ""
    indices: list[_DataFile] | None = None
    columns: list[str] | None = None
    all_columns: bool = False


@decodable
class _Info(msgspec.Struct):
    features: dict[str, Any] | None = None


@decodable
class _Splits(msgspec.Struct):
    splits: list[str]


def _read_features(features: Mapping[str, Any] | None, where: str) -> tuple[dict[str, ArrayShape], set[str]]:
    """The shapes of columns of arrays, and the columns of encoded files."""
    shapes: dict[str, ArrayShape] = {}
    files: set[str] = set()
    for name, feature in (features or {}).items():
        kind = feature.get("_type") if isinstance(feature, Mapping) else None
        if kind in _FILE_FEATURES:
            files.add(name)
        elif kind in _ARRAY_FEATURES:
            try:
                shapes[name] = msgspec.convert(feature.get("shape"), tuple[_Length | None, ...])
                if len(shapes[name]) != int(kind[5]):
                    raise ValueError(f"{len(shapes[name])} dimensions")
            except (ValueError, msgspec.ValidationError) as error:
                where = f"{where}, column {name!r}"
                raise CorruptError("an array has an invalid shape", found=error, where=where) from error
    return shapes, files


def _column_name(stored: str, files: set[str]) -> str | None:
    """The name of a stored column; None for the name of an encoded file, which is left out."""
    outer, _, inner = stored.rpartition(".")
    if outer not in files:
        return stored
    return {"bytes": outer, "bytes_valid": f"{outer}_valid"}.get(inner)


class HuggingFaceSource(SourceView):
    """A directory that `Dataset.save_to_disk` wrote, or a `datasets.Dataset`.

    Columns are those of Arrow (see `ArrowSource`), with the features: arrays of a fixed shape are dense, those
    with a varying first dimension ragged; of images, audio and videos the encoded bytes are delivered. A format
    of the Dataset selects columns, and does not change their types.

    Args:
        where: the folder, or a `datasets.Dataset`.
        split: one of the splits of a folder that `DatasetDict.save_to_disk` wrote.
        columns: names of the columns to offer; None for all, or for those of the Dataset's format.
        nulls: as for `ArrowSource`.
        cache_bytes: decoded bytes of record batches to keep.

    Raises:
        SourceError: it cannot be read, is empty, or has several splits.
        CorruptError: a file is missing or damaged.
        UnsafeError: a name leaves the folder.
        ArgumentError: no such column or split, or the Dataset has a transform of its own.
    """

    identified = True  # by the fingerprint of the Dataset itself

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
        self._wanted = None if columns is None else tuple(check_columns_option(columns))
        split = check_optional(check_name, "split", split)
        if isinstance(where, (str, os.PathLike)):
            self._dataset: Any = None
            self._folder = _split_folder(os.path.abspath(where), split)
        elif split is not None:
            raise ArgumentError("a Dataset is one split", found=f"split={split!r}", remedy="leave split out")
        else:
            if not is_dataset(where):
                raise ArgumentError(
                    "this is neither a folder nor a Dataset without a transform",
                    expected="a path, or a datasets.Dataset",
                    found=type(where).__name__,
                    remedy="give the transform to rankfeed.Loader, or wrap the Dataset with rankfeed.from_dataset",
                )
            self._dataset, self._folder = where, ""
        self._read()

    def _read(self) -> None:
        table: Any
        mapping: Any
        if self._dataset is None:
            place = self._folder
            where = os.path.join(place, HF_STATE_NAME)
            state = read_json(where, _State)
            features = read_json(os.path.join(place, HF_INFO_NAME), _Info).features
            table, mapping = (
                [resolve_data_name(place, file.filename, where) for file in listed]
                for listed in (state.data_files, state.indices or ())
            )
            mapping = mapping or None
            if not table:
                raise SourceError("the dataset is empty", where=place)
            own_fingerprint, format_columns = state.fingerprint, None if state.all_columns else state.columns
        else:
            dataset, place = self._dataset, "the Dataset"
            features = dataset.features.to_dict()
            table, mapping = _files_or_table(dataset.data), _files_or_table(dataset._indices)
            own_fingerprint = dataset._fingerprint
            format_columns = None if dataset._output_all_columns else dataset._format_columns
        shapes, files = _read_features(features, place)
        nulls, selected = self._options["nulls"], self._wanted
        columns = None if selected is None else [*selected, *(f"{name}.bytes" for name in selected)]
        where = table[0] if isinstance(table, list) else place
        with arrow_errors(where):
            schema = read_schema(where) if isinstance(table, list) else table.schema
            stored = fields_of(schema, nulls=nulls, columns=columns, shapes=shapes)
        all_fields = {name: field for field in stored if (name := _column_name(field, files)) is not None}
        if selected is None and format_columns is not None:  # with the fields of structs
            selected = tuple(
                name for name in all_fields if any(f"{name}.".startswith(f"{c}.") for c in format_columns)
            )
        derived = masks_of(all_fields, nulls)
        #: Name of each column -> name in the table.
        self._names = {name: all_fields[name] for name in check_columns(selected, all_fields, derived)}
        columns = list(self._names.values())
        self._table = _open_table(table, place, columns=columns, shapes=shapes, **self._options)
        self._mapping = None if mapping is None else _open_table(mapping, place)
        if self._mapping is not None and [*self._mapping.fields.values()] != [Field("dense", "uint64")]:
            raise CorruptError(
                "the indices mapping has other columns",
                expected="one column of uint64",
                found=self._mapping.fields,
                where=place,
            )
        super().__init__(self._table)  # the properties are those of the table
        self.derived = derived
        types = {**self._table.logical_types, **labels_of_features(features)}
        self.logical_types = {name: types[stored] for name, stored in self._names.items() if stored in types}
        parts = [own_fingerprint, self._table.fingerprint, self._mapping.fingerprint if self._mapping else ""]
        self._init_samples(
            self._folder or "a Dataset",
            {name: self._table.fields[stored] for name, stored in self._names.items()},
            self._table.blocks if self._mapping is None else even_blocks(len(self._mapping), _MAPPED_ROWS),
            digest_of(*(str(part).encode() for part in parts)),
        )

    def __getstate__(self) -> dict[str, Any]:
        if all(source is None or isinstance(source, ArrowSource) for source in (self._table, self._mapping)):
            return {**self.__dict__, "_dataset": None}  # files as this job first saw them
        # The Dataset is pickled: files by their names, tables in memory completely.
        kept = ("_dataset", "_folder", "_options", "_wanted", "_fingerprint")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._dataset is None:
            return
        self._read()
        check_same_data(self._fingerprint, state["_fingerprint"], self._folder or "the Dataset")

    def _fetch(self, ids: Int64, names: Sequence[str]) -> dict[str, Column]:
        columns = self._table.fetch(self._rows(ids), [self._names[name] for name in names])
        return {name: columns[self._names[name]] for name in names}

    def expect(self, sample_ids: npt.ArrayLike, columns: Sequence[str] | None = None) -> None:
        names = check_columns(columns, self._names, self.derived)
        rows = self._rows(check_ids(sample_ids, len(self)))
        self._table.expect(rows, [self._names[name] for name in names])

    def check_unchanged(self, *, at_intervals: bool = False) -> None:
        for source in (self._table, self._mapping):
            if source is not None:
                source.check_unchanged(at_intervals=at_intervals)

    def _rows(self, ids: Int64) -> Int64:
        """The rows of the table that contain some samples."""
        if self._mapping is None or not len(ids):
            return ids
        column = self._mapping.fetch(ids)[next(iter(self._mapping.fields))]
        assert isinstance(column, Dense)
        rows = column.gather()
        if int(rows.max()) >= len(self._table):
            raise CorruptError(
                "the indices mapping has rows that the table does not have",
                expected=f"up to {len(self._table) - 1}",
                found=int(rows.max()),
                where=self._folder or "the Dataset",
            )
        return rows.astype(np.int64)


def is_dataset(where: Any) -> bool:
    """Whether this is a `datasets.Dataset` without a transform of its own."""
    names = [(kind.__module__, kind.__name__) for kind in type(where).__mro__]
    return ("datasets.arrow_dataset", "Dataset") in names and where._format_type != "custom"


def _open_table(table: Any, place: str, **options: Any) -> ArrowSource | ArrowTableSource:
    if isinstance(table, list):
        return ArrowSource(table, **options)
    return ArrowTableSource(table, name=place, **options)


def _files_or_table(table: Any) -> Any:
    """The paths of a table of `datasets`, or the table itself if it was changed in memory; None for None."""
    if table is None:
        return None
    blocks = getattr(table, "blocks", [[table]])
    parts = [part for row in blocks for part in row]
    if all(len(row) == 1 for row in blocks) and all(
        isinstance(getattr(part, "path", None), str) and not getattr(part, "replays", None) for part in parts
    ):
        return [part.path for part in parts]
    return table.table


def _split_folder(path: str, split: str | None) -> str:
    """The directory of the chosen split."""
    where = os.path.join(path, HF_DICT_NAME)
    if not os.path.isfile(where):
        if split is not None:
            raise ArgumentError("this is one split", found=f"split={split!r}", remedy="leave split out")
        return path
    splits = read_json(where, _Splits).splits
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
