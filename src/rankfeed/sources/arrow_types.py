"""Arrow's types as fields: what each column of a schema becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from rankfeed._util.validate import check_choice
from rankfeed.columns import Field
from rankfeed.errors import SourceError

Nulls = Literal["error", "mask"]

#: What is added to a column's name for the mask of its nulls.
VALID = "_valid"
#: What a column is called that has no name: pandas writes its index to CSV as one. (A column "" would be what
#: samples are that are no dicts.)
UNNAMED = "unnamed"


def fields_of(schema: Any, *, nulls: Nulls = "error", columns: Sequence[str] | None = None) -> dict[str, Field]:
    """The fields that the columns of a `pyarrow.Schema` become.

    Numbers and booleans are dense, fixed-size lists dense with a shape, lists of these ragged, text and bytes what
    they are; structs become columns "outer.inner". Timestamps, dates, times and durations are int64 in their own
    unit, decimals float64. Anything else (lists of lists, of text; maps) is kept as Python objects.

    Args:
        schema: of the data.
        nulls: "mask" adds a boolean column ``<name>_valid`` for each column that may hold nulls.
        columns: names of those wanted; None for all. Names that several columns share are left out, if they are
            not wanted.

    Raises:
        ArgumentError: ``nulls`` is something else.
        SourceError: two columns have one name.

    Examples:
        >>> import pyarrow as pa
        >>> kinds = {"x": pa.list_(pa.float32()), "when": pa.timestamp("us"), "at": pa.list_(pa.int8(), 2)}
        >>> schema = pa.schema(kinds)
        >>> {name: str(field) for name, field in fields_of(schema).items()}
        {'x': 'float32[*]', 'when': 'int64', 'at': 'int8[2]'}
    """
    check_choice("nulls", nulls, ("error", "mask"))
    roots = Counter(schema.names)
    fields: dict[str, Field] = {}
    twice: list[str] = []
    for name, path, kind in _leaves(schema):
        added = {name: field_of(kind)}
        if nulls == "mask":
            added[name + VALID] = Field("dense", "bool")
        for each, field in added.items():
            if each in fields or roots[path[0]] > 1:
                twice.append(each)
            fields[each] = field
    for name in twice:
        if columns is None or name in columns:
            raise two_of(name)
        fields.pop(name, None)
    return fields


def two_of(name: str) -> SourceError:
    """The error for columns that share a name."""
    return SourceError(
        "two columns have one name",
        found=repr(name),
        remedy="rename one of them where the data are written, or leave them out with columns=",
    )


def roots_of(schema: Any, names: Sequence[str], *, nulls: Nulls = "error") -> list[str]:
    """The columns of a schema that have to be read for some fields, each once, in the schema's order."""
    chosen = set(names)
    wanted = {
        path[0]
        for name, path in leaves_of(schema)
        if name in chosen or (nulls == "mask" and name + VALID in chosen)
    }
    return [name for name in schema.names if name in wanted]


#: The way to a column: the name of the schema's own column, and in structs the number of each field.
Path = tuple[str, *tuple[int, ...]]


def leaves_of(schema: Any) -> list[tuple[str, Path]]:
    """Names of the columns, structs taken apart, and the way to each."""
    return [(name, path) for name, path, _ in _leaves(schema)]


def _leaves(schema: Any) -> Iterator[tuple[str, Path, Any]]:
    import pyarrow as pa

    def walk(name: str, kind: Any, path: Path) -> Iterator[tuple[str, Path, Any]]:
        if not pa.types.is_struct(kind) or not kind.num_fields:
            yield name, path, kind
            return
        for index in range(kind.num_fields):
            inner = kind.field(index)
            yield from walk(f"{name}.{inner.name}", inner.type, (*path, index))

    for field in schema:
        yield from walk(field.name or UNNAMED, field.type, (field.name,))


def field_at(schema: Any, path: Path) -> Any:
    """The Arrow field at the end of a way."""
    field = schema.field(path[0])
    for index in path[1:]:
        field = field.type.field(index)
    return field


def element_of(kind: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Type and shape of numbers, or of fixed-size lists of them; None for anything else."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = element_of(kind.value_type)
        return None if inner is None else (inner[0], (*tensor_shape(kind), *inner[1]))
    if isinstance(kind, pa.BaseExtensionType):
        return element_of(kind.storage_type)
    if types.is_dictionary(kind):
        return element_of(kind.value_type)
    if types.is_fixed_size_list(kind):
        inner = element_of(kind.value_type)
        return None if inner is None else (inner[0], (kind.list_size, *inner[1]))
    if types.is_boolean(kind):
        return np.dtype(np.bool_), ()
    if types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()), ()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind) or types.is_duration(kind):
        return np.dtype(np.int64), ()
    if types.is_decimal(kind):
        return np.dtype(np.float64), ()
    return None


def tensor_shape(kind: Any) -> tuple[int, ...]:
    """The logical shape of a `pyarrow.FixedShapeTensorType`, whose elements may be stored in another order.

    Examples:
        >>> import pyarrow as pa
        >>> tensor_shape(pa.fixed_shape_tensor(pa.int8(), [100, 200, 500], permutation=[2, 0, 1]))
        (500, 100, 200)
    """
    return tuple(kind.shape[axis] for axis in tensor_axes(kind))


def tensor_axes(kind: Any) -> list[int]:
    """Which stored axis each logical axis of a `pyarrow.FixedShapeTensorType` is."""
    axes: list[int] = list(range(len(kind.shape))) if kind.permutation is None else list(kind.permutation)
    return axes


def is_list(kind: Any) -> bool:
    """Whether rows of an Arrow type differ in length."""
    import pyarrow as pa

    types = pa.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def field_of(kind: Any) -> Field:
    """What a column of an Arrow type becomes."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.FixedShapeTensorType):
        return field_of(kind.storage_type)
    if types.is_dictionary(kind):
        return field_of(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Field("str")
    if (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    ):
        return Field("bytes")
    element = element_of(kind)
    if element is not None:
        return Field("dense", element[0].name, element[1])
    if is_list(kind):
        element = element_of(kind.value_type)
        if element is not None:
            return Field("ragged", element[0].name, element[1])
    return Field("object")
