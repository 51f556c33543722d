"""Maps Arrow types to the fields of columns; ``arrow_columns.py`` reads the values."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rankfeed._util.validate import check_choice
from rankfeed.columns.field import Field
from rankfeed.errors import SourceError
from rankfeed.sources.source import class_labels, from_difference

Nulls = Literal["error", "mask"]
#: Path to a column: the name of the top-level column, then field numbers in structs.
Path = tuple[str, *tuple[int, ...]]
#: Lengths of the nested lists that store an array; None for a dimension that varies.
ArrayShape = tuple[int | None, ...]

#: Suffix of the column that masks nulls.
VALID = "_valid"
#: Name of a column without one, such as the index that pandas writes to CSV; "" marks samples that are not dicts.
UNNAMED = "unnamed"


def fields_of(
    schema: Any,
    *,
    nulls: Nulls = "error",
    columns: Sequence[str] | None = None,
    shapes: Mapping[str, ArrayShape] | None = None,
) -> dict[str, Field]:
    """The fields of the columns of a `pyarrow.Schema`.

    Numbers and booleans are dense, fixed-size lists dense with a shape, lists of these ragged, text and bytes str
    and bytes; structs become columns "outer.inner". Timestamps, dates, times and durations are int64 in their own
    unit, decimals float64. Everything else (lists of lists or text, maps) becomes Python objects.
    ``nulls="mask"`` adds a boolean column ``<name>_valid`` for each; ``shapes`` has the nested lists that are
    arrays. Two columns of one name are a SourceError, unless ``columns``, the wanted ones, are others.
    """
    check_choice("nulls", nulls, ("error", "mask"))
    top_level = Counter(schema.names)
    fields: dict[str, Field] = {}
    duplicates: list[str] = []
    for name, path, kind in leaves_of(schema):
        added = {name: shaped_field(kind, shapes[name]) if shapes and name in shapes else field_of(kind)}
        if nulls == "mask":
            added[name + VALID] = Field("dense", "bool")
        duplicates += [column for column in added if column in fields or top_level[path[0]] > 1]
        fields |= added
    for name in duplicates:
        column = name.removesuffix(VALID) if nulls == "mask" else name
        if columns is None or name in columns or column in columns:
            is_mask = column != name and column in fields
            raise SourceError(
                "two columns have one name",
                found=repr(name) + (f", a column and the mask of {column!r}" if is_mask else ""),
                remedy="rename one of the columns where the data are written, or leave both out with columns="
                + ('; or pass nulls="error", which adds no masks' if is_mask else ""),
            )
        fields.pop(name, None)
    return fields


def logical_types_of(schema: Any) -> dict[str, str]:
    """What the int64 values of columns are: Arrow's types, and class labels that `datasets` stored."""
    types: dict[str, str] = {}
    for name, _, kind in leaves_of(schema):
        kind = _value_type(kind)
        while isinstance(kind, pa.FixedShapeTensorType) or is_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = _value_type(kind.value_type)
        if pa.types.is_temporal(kind) or pa.types.is_int64(kind):
            types[name] = str(kind)
    return types | _stored_labels(schema)


def _stored_labels(schema: Any) -> dict[str, str]:
    """The class labels in the metadata that `datasets` adds to a schema."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return labels_of_features(json.loads(_features_of(schema))["info"]["features"])
    return {}


def _features_of(schema: Any) -> bytes:
    return bytes((schema.metadata or {}).get(b"huggingface", b""))


def labels_of_features(features: Any) -> dict[str, str]:
    """The class labels among the features of `datasets`, as JSON has them."""
    types: dict[str, str] = {}
    pending: list[tuple[str, Any]] = list(features.items()) if isinstance(features, Mapping) else []
    while pending:
        name, feature = pending.pop()
        if isinstance(feature, list):
            pending += [(name, inner) for inner in feature[:1]]
        elif isinstance(feature, Mapping):
            names = feature.get("names")
            if feature.get("_type") == "ClassLabel" and isinstance(names, list):
                types[name] = class_labels(names)
            elif "_type" not in feature:
                pending += [(f"{name}.{inner}", nested) for inner, nested in feature.items()]
            elif "feature" in feature:
                pending.append((name, feature["feature"]))
    return types


def masks_of(names: Collection[str], nulls: Nulls) -> dict[str, tuple[str]]:
    """The mask of each column, which is derived from it; none unless ``nulls`` is "mask"."""
    return {name: (name + VALID,) for name in names if name + VALID in names} if nulls == "mask" else {}


def roots_of(schema: Any, names: Iterable[str]) -> list[str]:
    """The top-level columns that contain some fields, in the order of the schema."""
    roots = set(parents_of(schema, names).values())
    return [name for name in schema.names if name in roots]


def parents_of(schema: Any, names: Iterable[str]) -> dict[str, str]:
    """The top-level column that contains each field; of a mask, that of its column."""
    parents = {name: path[0] for name, path, _ in leaves_of(schema)}
    return {name: parents[name if name in parents else name.removesuffix(VALID)] for name in names}


def leaves_of(schema: Any) -> Iterator[tuple[str, Path, Any]]:
    """Name, path and type of each column, with structs taken apart."""

    def walk(name: str, kind: Any, path: Path) -> Iterator[tuple[str, Path, Any]]:
        if not pa.types.is_struct(kind) or not kind.num_fields:
            yield name, path, kind
            return
        for index in range(kind.num_fields):
            inner = kind.field(index)
            yield from walk(f"{name}.{inner.name}", inner.type, (*path, index))

    for field in schema:
        yield from walk(field.name or UNNAMED, field.type, (field.name,))


def field_of(kind: Any) -> Field:
    """The field of a column of an Arrow type."""
    types = pa.types
    kind = _value_type(kind)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Field("str")
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    if is_binary or types.is_fixed_size_binary(kind):
        return Field("bytes")
    if (element := element_of(kind)) is not None:
        return Field("dense", element[0].name, element[1])
    if is_list(kind) and (element := element_of(kind.value_type)) is not None:
        return Field("ragged", element[0].name, element[1])
    return Field("object")


def element_of(kind: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Dtype and shape of numbers, or of fixed-size lists of them; None for other types."""
    types = pa.types
    kind = _value_type(kind)
    is_tensor = isinstance(kind, pa.FixedShapeTensorType)
    if is_tensor or types.is_fixed_size_list(kind):
        inner = element_of(kind.value_type)
        shape = tuple(kind.shape[axis] for axis in tensor_axes(kind)) if is_tensor else (kind.list_size,)
        return None if inner is None else (inner[0], (*shape, *inner[1]))
    if types.is_boolean(kind):
        return np.dtype(np.bool_), ()
    if types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()), ()
    if types.is_temporal(kind):
        return np.dtype(np.int64), ()
    return (np.dtype(np.float64), ()) if types.is_decimal(kind) else None


def tensor_axes(kind: Any) -> list[int]:
    """The stored axis of each logical axis of a `pyarrow.FixedShapeTensorType`."""
    return list(range(len(kind.shape))) if kind.permutation is None else list(kind.permutation)


def is_list(kind: Any) -> bool:
    """Whether rows of an Arrow type differ in length."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or is_list_view(kind)


def is_list_view(kind: Any) -> bool:
    """Whether rows of an Arrow type may lie anywhere in its values."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def storage_type(kind: Any) -> Any:
    """An Arrow type without extension types around it."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def _value_type(kind: Any) -> Any:
    """An Arrow type without dictionaries and extension types around it, except tensors."""
    while True:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.FixedShapeTensorType):
            kind = kind.storage_type
        else:
            return kind


def shaped_field(kind: Any, shape: ArrayShape) -> Field:
    """The field of a column of nested lists that are arrays of a shape, of which the first dimension may vary."""
    kind = whole = storage_type(kind)
    for _ in shape:
        if not hasattr(kind, "value_type"):
            raise ValueError(f"arrays of {len(shape)} dimensions are stored as {whole}")
        kind = kind.value_type
    element = field_of(kind)
    if element.kind != "dense" or None in shape[1:]:
        return Field("object")
    inner = tuple(length for length in shape if length is not None)
    return Field("ragged" if shape[0] is None else "dense", element.dtype, (*inner, *element.shape))


def check_same_schema(first: Any, other: Any, first_path: str, path: str, columns: Sequence[str] | None) -> None:
    """Compare the columns of two files, or some ``columns`` of them; a SourceError names the first difference."""
    if first.equals(other) and _features_of(first) == _features_of(other):
        return
    expected, actual = (_column_types(schema, columns) for schema in (first, other))
    labels, other_labels = _stored_labels(first), _stored_labels(other)
    for name in sorted(labels.keys() & other_labels.keys()):
        label, other_label = labels[name], other_labels[name]
        if label != other_label and (columns is None or name in columns):
            expected[name], actual[name] = from_difference(label, other_label), from_difference(other_label, label)
    if expected != actual:
        name = next(column for column in [*expected, *actual] if expected.get(column) != actual.get(column))
        kinds = expected.get(name, "no such column"), actual.get(name, "no such column")
        hint = "; a writer without a schema gives a column without values the type null"
        raise SourceError(
            f"the files differ in column {name!r}",
            expected=f"{kinds[0]} as in {first_path}",
            found=kinds[1],
            where=path,
            remedy="write the files with one schema, or leave the column out with columns="
            + (hint if any(re.search(r"\bnull\b", kind) for kind in kinds) else ""),
        )


def _column_types(schema: Any, columns: Sequence[str] | None) -> dict[str, str]:
    """The type of each column, without differences that do not matter to a reader."""
    types: dict[str, str] = {}
    for name, _, kind in leaves_of(schema):
        types[name] = f"{types[name]}, {type_name(kind)}" if name in types else type_name(kind)
    if columns is None:
        return types
    bases = {name if name in types else name.removesuffix(VALID) for name in columns}
    return {name: text for name, text in types.items() if name in bases}


def type_name(kind: Any) -> str:
    """A type as text: the same for layouts that read alike, and whatever extension types are registered."""
    kind = _value_type(kind)
    if isinstance(kind, pa.FixedShapeTensorType) or not kind.num_fields:
        return str(kind).removeprefix("large_")
    has_names = pa.types.is_struct(kind) or pa.types.is_union(kind)
    fields = [kind.field(index) for index in range(kind.num_fields)]
    inner = ", ".join(
        f"{field.name}: {type_name(field.type)}" if has_names else type_name(field.type) for field in fields
    )
    size = f"[{kind.list_size}]" if pa.types.is_fixed_size_list(kind) else ""
    return f"{str(kind).split('<')[0].removeprefix('large_')}<{inner}>{size}"
