"""The layout of samples: their structure and the types of their fields. Pure functions.

`describe_sample` finds the layout of one sample, `join_layouts` the common one of two, `infer_layout` that of
several. `fit_values` converts the values of a field to its fixed type without loss, or names the value that does
not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Integral, Number
from typing import Any, Literal

import numpy as np

from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.field import Field
from rankfeed.columns.pointers import Array
from rankfeed.errors import ArgumentError, safe_repr

Path = tuple[Any, ...]
#: Fields by their `dotted_name`.
Fields = Mapping[str, Field]
#: Remedies: declare a field ragged, change its type, deliver lists, or change keys, names or value.
Cure = Literal["ragged", "type", "list", "keys", "names", "value"]


class Mismatch(ArgumentError):
    """A sample that does not fit the others, or the fixed fields."""

    row: int = 0  # of the sample
    path: Path = ()  # keys and positions that lead to the value
    cure: Cure = "value"
    becomes: str = ""  # a field that would hold this sample too

    @classmethod
    def of(
        cls, summary: str, path: Path, cure: Cure, *, expected: object, found: object, row: int = 0
    ) -> Mismatch:
        """The error for the value at ``path`` of sample ``row``."""
        where = f"field {dotted_name(path)!r}" if path else None
        error = cls(summary, expected=expected, found=found, where=where)
        error.row, error.path, error.cure = row, path, cure
        return error


@dataclass(frozen=True)
class Leaf:
    """A field of a sample."""

    field: Field  # its dtype is "" if all values were empty lists
    #: "tensor" (dense, ragged), "text" (and bytes), "list" (objects), "arrays" (of any shape, delivered as a list
    #: of tensors), "torch" (what numpy cannot hold, left to torch's collation).
    how: Literal["tensor", "text", "list", "arrays", "torch"] = "tensor"
    guessed: bool = False  # the dtype is the default for empty lists: numbers of another dtype do not fit

    def __str__(self) -> str:
        if is_unknown(self):
            return "an empty list"
        return f"{self.field.dtype}, shapes that differ" if self.how == "arrays" else str(self.field)


@dataclass(frozen=True)
class Branch:
    """A dict, list, tuple or named tuple of layouts, by key or position."""

    kind: Any
    parts: Mapping[Any, Layout]

    def __str__(self) -> str:
        if self.kind is dict:
            return "a dict with " + (", ".join(map(repr, self.parts)) or "no keys")
        return f"a {self.kind.__name__} of {len(self.parts)}"


Layout = Leaf | Branch


def dotted_name(path: Path) -> str:
    """A path as errors and ``ragged=`` write it: ("boxes", 1) is "boxes.1"."""
    return ".".join(map(str, path))


def leaf_of_field(field: Field) -> Leaf:
    """The leaf of a declared field."""
    hows: dict[str, Any] = {"bytes": "text", "str": "text", "object": "list"}
    return Leaf(field, hows.get(field.kind, "tensor"))


def parse_layout(fields: Any) -> Layout:
    """The layout that ``fields=`` declares: fields or their text in a dict, list or tuple, or a single one."""
    if isinstance(fields, (str, Field)):
        return leaf_of_field(Field.of(fields))
    try:
        if isinstance(fields, Mapping) and fields:
            return Branch(dict, {name: parse_layout(field) for name, field in fields.items()})
        if isinstance(fields, (tuple, list)) and fields:
            return Branch(type(fields), dict(enumerate(map(parse_layout, fields))))
    except RecursionError:  # a container that contains itself
        pass
    raise ArgumentError(
        "invalid fields",
        expected='a dict, or a tuple for samples that are tuples, of types: {"x": "float32[*, 3]", "y": "int64"}',
        found=safe_repr(fields),
    )


def flat_fields(layout: Layout) -> dict[str, Field] | None:
    """The fields by name if samples are flat dicts of columns, else None."""
    if isinstance(layout, Leaf) or layout.kind is not dict:
        return None
    parts = layout.parts.items()
    flat = {name: part.field for name, part in parts if isinstance(part, Leaf) and part.how in ("tensor", "text")}
    return flat if len(flat) == len(parts) else None


def leaves(layout: Layout, path: Path = ()) -> Iterable[tuple[Path, Leaf]]:
    """All fields with their paths."""
    if isinstance(layout, Leaf):
        yield path, layout
        return
    for key, part in layout.parts.items():
        yield from leaves(part, (*path, key))


def describe_sample(value: Any, fields: Fields | None = None, path: Path = (), *, in_dict: bool = False) -> Layout:
    """The layout of a sample, or of a value in it; in a dict, a tuple of numbers is an array, as a list is."""
    fields = fields or {}
    own = fields.get(dotted_name(path)) if path else None
    if own is not None and own.kind == "object":
        return Leaf(own, "list")
    if isinstance(value, Mapping):
        parts = {key: describe_sample(part, fields, (*path, key), in_dict=True) for key, part in value.items()}
        return Branch(dict, parts)
    if isinstance(value, (bytes, str)):
        return Leaf(Field("bytes" if isinstance(value, bytes) else "str"), "text")
    is_list = isinstance(value, (list, tuple))
    numbers = is_list and _has_only_numbers(value)
    # As in torch, a list or tuple becomes a list or tuple of batches; lists of numbers are arrays.
    is_branch = is_list and (hasattr(value, "_fields") or not (in_dict or (numbers and isinstance(value, list))))
    if not is_branch:
        try:
            array = as_array(dotted_name(path), value)
        except ArgumentError:
            is_branch = is_list and not numbers
            if not is_branch and isinstance(value, (int, list, tuple, np.ndarray, np.generic)):
                raise  # numbers without a dtype that holds them
            if is_tensor(value):
                shape = () if getattr(value, "is_nested", False) else tuple(value.shape)
                return Leaf(Field("object", str(value.dtype).removeprefix("torch."), shape), "torch")
            if not is_branch:
                return Leaf(Field("object"), "torch")
    if is_branch:
        kind = type(value) if hasattr(value, "_fields") or type(value) in (list, tuple) else tuple
        return Branch(kind, {at: describe_sample(part, fields, (*path, at)) for at, part in enumerate(value)})
    if isinstance(value, list):
        return Leaf(Field("ragged", array.dtype.name if array.size else "", array.shape[1:]))
    if array.ndim and own is not None and own.kind == "ragged":
        return Leaf(Field("ragged", array.dtype.name, array.shape[1:]))
    return Leaf(Field("dense", array.dtype.name, array.shape))


def _has_only_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_has_only_numbers, value))
    return isinstance(value, (Number, np.generic)) and not isinstance(value, (str, bytes))


def infer_layout(samples: Iterable[Any], fields: Fields | None = None, *, loose: bool = False) -> Layout:
    """The common layout of several samples (at least one).

    ``fields`` are those declared as ragged or as objects; ``loose`` makes arrays that differ in more than their
    first dimension a list of arrays. Raises Mismatch, with the sample's ``row``, if none holds all without loss.
    """
    layout: Layout | None = None
    rows = list(samples)
    for row, sample in enumerate(rows):
        try:
            described = describe_sample(sample, fields)
            layout = described if layout is None else join_layouts(layout, described, loose=loose)
        except Mismatch as error:
            error.row = row
            raise
        except ArgumentError as error:
            expected, actual = error.expected, error.found
            raise Mismatch.of(error.summary, (), "value", expected=expected, found=actual, row=row) from error
    assert layout is not None
    # Integers must keep their digits in the common dtype.
    map_leaves(rows, layout, lambda leaf, path, values: fit_values(values, leaf, path))
    return layout


def join_layouts(one: Layout, other: Layout, path: Path = (), *, loose: bool = False) -> Layout:
    """The common layout of two; raises Mismatch if there is none."""
    if one == other:
        return one
    if isinstance(one, Branch) and isinstance(other, Branch):
        if one.kind is not other.kind:
            raise Mismatch.of("samples differ in type", path, "value", expected=one, found=other)
        check_keys(one, other.parts.keys(), path)
        pairs = ((key, part, other.parts[key]) for key, part in one.parts.items())
        return Branch(one.kind, {key: join_layouts(a, b, (*path, key), loose=loose) for key, a, b in pairs})
    if isinstance(one, Leaf) and isinstance(other, Leaf) and {one.how, other.how} <= {"tensor", "arrays"}:
        return _join_numbers(one, other, path, loose)
    summary = f"values of field {dotted_name(path)!r} differ in type" if path else "samples differ in type"
    raise Mismatch.of(summary, path, "value", expected=one, found=other)


def check_keys(layout: Branch, keys: Collection[Any], path: Path, row: int = 0) -> None:
    """Raise Mismatch if a dict has other keys, or a list or tuple (whose keys are positions) another length."""
    if keys == layout.parts.keys() if layout.kind is dict else len(keys) == len(layout.parts):
        return
    if layout.kind is not dict:
        summary = f"a {layout.kind.__name__} has another length than those of other samples"
        raise Mismatch.of(summary, path, "keys", expected=len(layout.parts), found=len(keys), row=row)
    missing = [key for key in layout.parts if key not in keys]
    extra = [key for key in keys if key not in layout.parts]
    words = [
        f"{word} {', '.join(map(repr, names))}" for word, names in (("no", missing), ("also", extra)) if names
    ]
    expected, found = ", ".join(map(repr, layout.parts)), "a sample with " + " and ".join(words)
    raise Mismatch.of("samples have different keys", path, "keys", expected=expected, found=found, row=row)


def _join_numbers(one: Leaf, other: Leaf, path: Path, loose: bool) -> Leaf:
    field, other_field = one.field, other.field
    dtype = _join_dtypes(field.dtype, other_field.dtype)
    if one.how == other.how == "tensor":
        if (field.kind, field.shape) == (other_field.kind, other_field.shape):
            return Leaf(replace(field, dtype=dtype))
        shape = element_shape(other_field if one == _EMPTY_LIST else field)
        other_shape = element_shape(field if other == _EMPTY_LIST else other_field)
        if shape is not None and shape == other_shape:
            return Leaf(Field("ragged", dtype, shape))
    if loose:
        return Leaf(Field("object", dtype), "arrays")
    noun = f"arrays of field {dotted_name(path)!r}" if path else "samples"
    raise Mismatch.of(f"{noun} differ in more than their first dimension", path, "list", expected=one, found=other)


#: The leaf of values that were all ``[]``.
_EMPTY_LIST = Leaf(Field("ragged"))


def element_shape(field: Field) -> tuple[int, ...] | None:
    """Shape of an element along the first dimension; None if there is none."""
    if field.kind == "ragged":
        return field.shape
    return field.shape[1:] if field.shape else None


def _join_dtypes(left: str, right: str) -> str:
    """The dtype for numbers of both; `fit_values` checks whether it holds each of them."""
    if not left or not right or left == right:
        return left or right
    dtype = np.result_type(left, right)
    if dtype.kind == "f" and np.dtype(left).kind in "iu" and np.dtype(right).kind in "iu":
        return "uint64"  # no negative number fits; float64 would lose digits of both
    return dtype.name


def resolve_dtypes(layout: Layout) -> Layout:
    """The layout with numpy's default dtype, float64, for lists that were all empty."""
    if isinstance(layout, Branch):
        return Branch(layout.kind, {key: resolve_dtypes(part) for key, part in layout.parts.items()})
    if is_unknown(layout):
        return replace(layout, field=replace(layout.field, dtype="float64"), guessed=True)
    return layout


def is_unknown(leaf: Leaf) -> bool:
    """Whether the dtype of a field is unknown, because all values were empty lists."""
    return leaf.how in ("tensor", "arrays") and not leaf.field.dtype


def map_leaves(values: Sequence[Any], layout: Layout, function: Any, path: Path = ()) -> Any:
    """``function(leaf, path, values)`` of each field of some samples, as a structure of this layout."""
    if isinstance(layout, Leaf):
        return function(layout, path, values)
    kind, parts = layout.kind, layout.parts
    accepted: Any = Mapping if kind is dict else (list, tuple) if kind in (list, tuple) else kind
    for row, value in enumerate(values):
        if not isinstance(value, accepted):
            actual, noun = type(value).__name__, f"a value of field {dotted_name(path)!r}" if path else "a sample"
            raise Mismatch.of(f"{noun} is of another type", path, "value", expected=layout, found=actual, row=row)
        check_keys(layout, value.keys() if kind is dict else range(len(value)), path, row)
    mapped = {
        key: map_leaves([value[key] for value in values], part, function, (*path, key))
        for key, part in parts.items()
    }
    if kind is dict:
        return mapped
    return kind(*mapped.values()) if hasattr(kind, "_fields") else kind(mapped.values())


def fit_values(values: Sequence[Any], leaf: Leaf, path: Path = ()) -> Sequence[Any] | Array:
    """The values of a field, converted to its type without loss; raises Mismatch for one that does not fit.

    One array [rows] for a dense field of scalars, a list of arrays for other arrays, else the values.
    """
    if leaf.how == "list":
        return values
    if leaf.how in ("text", "torch"):
        _check_values(values, leaf, path)
        return values
    field = leaf.field
    dtype = np.dtype(field.dtype or np.bool_)  # only empty lists: any dtype
    if field.kind == "dense" and not field.shape:
        kinds = set(map(type, values))
        if len(kinds) == 1 and issubclass(kinds.pop(), (bool, int, float, np.generic)):
            numbers = np.array(values)
            # numpy makes floats of integers without a common dtype, which may lose digits.
            exact = numbers.dtype.kind in "iu" or (numbers.dtype == dtype and not isinstance(values[0], int))
            fits = convert_exactly(numbers, dtype) if exact else None
            if fits is not None:
                return fits
    if all(type(value) is np.ndarray and value.dtype == dtype and field.accepts(value.shape) for value in values):
        return values
    name, arrays = dotted_name(path), []
    for row, value in enumerate(values):
        try:
            arrays.append(as_array(name, value))
        except ArgumentError as error:
            raise _misfit(path, "value", leaf, error.found, row) from error
    if all(array.dtype == dtype and field.accepts(array.shape) for array in arrays):
        return arrays
    return [_fit_array(values[row], array, leaf, path, row) for row, array in enumerate(arrays)]


def _fit_array(value: Any, array: Array, leaf: Leaf, path: Path, row: int) -> Array:
    field, dtype = leaf.field, np.dtype(leaf.field.dtype or np.bool_)
    if field.kind == "ragged" and isinstance(value, list) and array.shape == (0,):
        return np.empty((0, *field.shape), dtype)
    actual = str(Field("dense", array.dtype.name, array.shape))
    if not field.accepts(array.shape):
        ragged = Field("ragged", field.dtype, field.shape[1:])
        if field.kind == "dense" and field.shape and ragged.accepts(array.shape):
            raise _misfit(path, "ragged", leaf, actual, row, becomes=ragged)
        raise _misfit(path, "list", leaf, actual, row)
    converted = None if leaf.guessed and array.size and array.dtype != dtype else convert_exactly(array, dtype)
    if converted is not None:
        return converted
    if isinstance(value, (int, float, np.generic)):
        actual += f", {value!r:.60}"
    if array.dtype.kind in "iu" and dtype.kind == "f":
        actual += f", which {dtype} cannot hold exactly"
    wider = np.dtype(array.dtype.name if leaf.guessed else _join_dtypes(array.dtype.name, dtype.name))
    holds = wider != dtype and convert_exactly(array, wider) is not None
    raise _misfit(path, "type", leaf, actual, row, becomes=replace(field, dtype=wider.name) if holds else "")


def convert_exactly(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """The same numbers in another dtype; None if one would change, or floats would become integers."""
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    if array.dtype.kind not in "iu":
        return array.astype(dtype) if np.can_cast(array.dtype, dtype, "safe") else None
    low, high = int(array.min()), int(array.max())
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return array.astype(dtype) if limits.min <= low and high <= limits.max else None
    if dtype.kind not in "fc":
        return None
    converted, limit = array.astype(dtype), 2 ** (np.finfo(dtype).nmant + 1)  # above it, floats skip integers
    # As objects they are Python's numbers, which compare exactly.
    same = (-limit <= low and high <= limit) or (converted.real.astype(object) == array.astype(object)).all()
    return converted if same else None


def _check_values(values: Sequence[Any], leaf: Leaf, path: Path) -> None:
    """Check texts, or values that torch collates: tensors must have one type, which torch does not require."""
    kind: type = bytes if leaf.field.kind == "bytes" else str
    for row, value in enumerate(values):
        if leaf.how == "torch":
            actual = describe_sample(value) if is_tensor(value) else Leaf(Field("object"), "torch")
            if actual != leaf:
                raise _misfit(path, "list", leaf, actual, row)
        elif not isinstance(value, kind):
            raise _misfit(path, "value", leaf, type(value).__name__, row)
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                summary = f"text of field {dotted_name(path)!r} is not valid Unicode"
                raise Mismatch.of(summary, path, "value", expected="text", found=error, row=row) from error


def _misfit(path: Path, cure: Cure, leaf: Leaf, found: object, row: int, *, becomes: object = "") -> Mismatch:
    name = dotted_name(path)
    summary = f"a value does not fit field {name!r}" if path else "a sample does not fit the others"
    error = Mismatch.of(summary, path, cure, expected=leaf, found=found, row=row)
    error.becomes = str(becomes)
    return error


#: float64 holds all integers up to this.
_EXACT = 2.0**53
#: Types of values that need no copy.
_IMMUTABLE = frozenset(
    {bool, int, float, complex, str, bytes, type(None), np.int64, np.float32, np.float64, np.bool_}
)


def as_array(name: str, value: Any) -> Array:
    """A number, array, tensor or list of numbers as an array of a dtype that torch has; raises ArgumentError.

    Examples:
        >>> as_array("x", [1, 2**63 + 1])
        array([                  1, 9223372036854775809], dtype=uint64)
    """
    if is_tensor(value):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, nested
            raise ArgumentError(
                f"{name!r} is a tensor that numpy cannot hold",
                found=f"{getattr(value, 'dtype', type(value).__name__)}: {error}",
                remedy="convert it to a dense tensor of a numpy dtype, or pass a collate_fn",
            ) from error
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ArgumentError(
            f"{name!r} is an array with masked values",
            found=f"{int(np.ma.getmaskarray(value).sum())} of {value.size} values masked",
            remedy="fill them (value.filled(0)), and return the mask as a separate field",
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # the value's own __array__ may raise anything
        reraise_interrupt(error)
        array = np.empty(0, object)
    if array.dtype.kind not in "biufc":
        kind = type(value).__name__
        raise ArgumentError(
            f"{name!r} is not a number, string, bytes or numeric array",
            found=f"{kind} of dtype {array.dtype}"
            if hasattr(value, "dtype")
            else f"{kind}: {safe_repr(value, 60)}",
            remedy="convert it to one of these; objects are not stored, because reading them would run code",
        )
    if array.dtype.kind in "fc":
        if array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
            raise ArgumentError(
                f"{name!r} has a dtype that neither torch nor Arrow has",
                found=f"dtype {array.dtype}",
                remedy="convert it to float64 if its precision is sufficient",
            )
        if isinstance(value, (list, tuple)) and bool((np.abs(array) >= _EXACT).any()):
            array = _with_exact_integers(name, value, array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _with_exact_integers(name: str, value: Any, array: Array) -> Array:
    """The floats that numpy made of a list if no integer lost digits, else the list as uint64."""
    numbers = np.array(value, object).ravel().tolist()
    integers = [int(number) for number in numbers if isinstance(number, Integral)]
    only_integers = len(integers) == len(numbers)
    if only_integers and min(integers) >= 0 and max(integers) < 2**64:
        return np.array(value, np.uint64)
    if only_integers or any(int(float(number)) != number for number in integers):
        raise ArgumentError(
            f"{name!r} has integers that no dtype holds together with the other numbers",
            found=f"{max(integers, key=abs)} in a {type(value).__name__} of {len(numbers)}",
            remedy="convert them in the sample, or pass a collate_fn",
        )
    return array


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def copy_sample(value: Any) -> Any:
    """A copy of a sample that a transform may change in place; raises ArgumentError if it is nested too deeply."""
    try:
        return _copy(value)
    except RecursionError:
        raise ArgumentError(
            "a sample is nested too deeply",
            found=f"a {type(value).__name__} within a {type(value).__name__} and so on",
            remedy="return samples that do not contain themselves",
        ) from None


def _copy(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_tensor(value):
        return value.clone()
    if type(value) is dict:
        return {name: part if type(part) in _IMMUTABLE else _copy(part) for name, part in value.items()}
    if isinstance(value, MutableMapping):
        copied = copy(value)
        for name, part in value.items():
            copied[name] = _copy(part)
        return copied
    if type(value) in (list, tuple):
        return type(value)(part if type(part) in _IMMUTABLE else _copy(part) for part in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copy, value))
    return copy(value) if hasattr(value, "__copy__") else value
