"""The layout of samples: their structure and the types of their fields. Pure functions.

`describe_sample` finds the layout of one sample, `join_layouts` the common one of two, `infer_layout` that of
several. `fit_values` converts the values of a field to its fixed type without loss, or names the value that does
not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rankfeed.columns.arrays import as_array, is_list_of_numbers, is_tensor
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, safe_repr

Array = npt.NDArray[Any]
Path = tuple[Any, ...]
#: Fields by their `dotted_name`.
Fields = Mapping[str, Field]
#: Remedies: declare a field ragged, change its type, deliver lists, or change keys, names or value.
Cure = Literal["ragged", "type", "list", "keys", "names", "value"]


class Mismatch(ArgumentError):
    """A sample that does not fit the others, or the fixed fields.

    Attributes:
        row: number of the sample.
        path: keys and positions that lead to the value.
        cure: kind of remedy.
        becomes: a field that would hold this sample too; empty if there is none.
    """

    row: int = 0
    path: Path = ()
    cure: Cure = "value"
    becomes: str = ""

    @classmethod
    def of(
        cls,
        summary: str,
        path: Path,
        cure: Cure,
        *,
        expected: object,
        found: object,
        row: int = 0,
        becomes: object = "",
    ) -> Mismatch:
        """The error for the value at ``path`` of sample ``row``."""
        where = f"field {dotted_name(path)!r}" if path else None
        error = cls(summary, expected=expected, found=found, where=where)
        error.row, error.path, error.cure, error.becomes = row, path, cure, str(becomes)
        return error

    def at(self, row: int) -> Mismatch:
        """The same error for another sample."""
        self.row = row
        return self


@dataclass(frozen=True)
class Leaf:
    """A field of a sample.

    Args:
        field: its type; the dtype is "" if all values were empty lists.
        how: "tensor" (dense, ragged), "text" (and bytes), "list" (objects), "arrays" (of any shape, delivered as a
            list of tensors), "torch" (what numpy cannot hold, left to torch's collation).
        guessed: whether the dtype is the default for empty lists: numbers of another dtype do not fit.
    """

    field: Field
    how: Literal["tensor", "text", "list", "arrays", "torch"] = "tensor"
    guessed: bool = False

    def __str__(self) -> str:
        if is_unknown(self):
            return "an empty list"
        return f"{self.field.dtype}, shapes that differ" if self.how == "arrays" else str(self.field)


@dataclass(frozen=True)
class Branch:
    """A dict, list or tuple of layouts.

    Args:
        kind: dict, list, tuple, or a class of named tuples.
        parts: layouts by key or position.
    """

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
    """The leaf of a field."""
    hows: dict[str, Any] = {"bytes": "text", "str": "text", "object": "list"}
    return Leaf(field, hows.get(field.kind, "tensor"))


def parse_layout(fields: Any) -> Layout:
    """The layout that ``fields=`` declares: fields or their text in a dict, list or tuple, or a single one.

    Raises:
        ArgumentError: it contains something else.
    """
    if isinstance(fields, (str, Field)):
        return leaf_of_field(Field.of(fields))
    try:
        if isinstance(fields, Mapping) and fields:
            return Branch(dict, {name: parse_layout(each) for name, each in fields.items()})
        if isinstance(fields, (tuple, list)) and fields:
            return Branch(type(fields), {number: parse_layout(each) for number, each in enumerate(fields)})
    except RecursionError:  # a container that contains itself
        pass
    raise ArgumentError(
        "invalid fields",
        expected='a dict, or a tuple for samples that are tuples, of types: {"x": "float32[*, 3]", "y": "int64"}',
        found=safe_repr(fields),
    )


def flat_fields(layout: Layout) -> dict[str, Field] | None:
    """The fields by name if samples are flat dicts of columns, else None."""
    if not isinstance(layout, Branch) or layout.kind is not dict:
        return None
    found: dict[str, Field] = {}
    for name, part in layout.parts.items():
        if not isinstance(part, Leaf) or part.how not in ("tensor", "text"):
            return None
        found[name] = part.field
    return found


def leaves(layout: Layout, path: Path = ()) -> Iterable[tuple[Path, Leaf]]:
    """All fields with their paths."""
    if isinstance(layout, Leaf):
        yield path, layout
        return
    for key, part in layout.parts.items():
        yield from leaves(part, (*path, key))


def describe_sample(value: Any, known: Fields | None = None, path: Path = (), *, in_dict: bool = False) -> Layout:
    """The layout of a sample, or of a value in it; in a dict, a tuple of numbers is an array, as a list is.

    Raises:
        ArgumentError: a number that no dtype holds.

    Examples:
        >>> str(describe_sample([1, 2]).field), str(describe_sample(2.5).field)
        ('int64[*]', 'float64')
    """
    known = known or {}
    declared = known.get(dotted_name(path)) if path else None
    if declared is not None and declared.kind == "object":
        return Leaf(declared, "list")
    if isinstance(value, Mapping):
        parts = {key: describe_sample(each, known, (*path, key), in_dict=True) for key, each in value.items()}
        return Branch(dict, parts)
    if isinstance(value, (bytes, str)):
        return Leaf(Field("bytes" if isinstance(value, bytes) else "str"), "text")
    if _is_branch(value, in_dict):
        kind = type(value) if hasattr(value, "_fields") or type(value) in (list, tuple) else tuple
        return Branch(kind, {at: describe_sample(each, known, (*path, at)) for at, each in enumerate(value)})
    try:
        array = as_array(dotted_name(path), value)
    except ArgumentError:
        if isinstance(value, (int, list, tuple, np.ndarray, np.generic)):
            raise  # numbers without a dtype that holds them
        if is_tensor(value):
            shape = () if getattr(value, "is_nested", False) else tuple(value.shape)
            return Leaf(Field("object", str(value.dtype).removeprefix("torch."), shape), "torch")
        return Leaf(Field("object"), "torch")
    if isinstance(value, list):
        return Leaf(Field("ragged", array.dtype.name if array.size else "", array.shape[1:]))
    if array.ndim and declared is not None and declared.kind == "ragged":
        return Leaf(Field("ragged", array.dtype.name, array.shape[1:]))
    return Leaf(Field("dense", array.dtype.name, array.shape))


def _is_branch(value: Any, in_dict: bool) -> bool:
    """Whether a list or tuple becomes a list or tuple of batches, as in torch, rather than an array."""
    if not isinstance(value, (list, tuple)):
        return False
    if hasattr(value, "_fields"):
        return True
    if not in_dict:
        return isinstance(value, tuple) or not is_list_of_numbers(value)
    if is_list_of_numbers(value):
        return False
    try:
        as_array("", value)
    except ArgumentError:
        return True
    return False


def infer_layout(samples: Iterable[Any], known: Fields | None = None, *, loose: bool = False) -> Layout:
    """The common layout of several samples (at least one).

    Raises:
        Mismatch: no layout holds all of them without loss; its ``row`` is a sample that differs from the first.

    Examples:
        >>> str(infer_layout([{"x": np.zeros((3, 2))}, {"x": np.zeros((5, 2))}]).parts["x"])
        'float64[*, 2]'
    """
    found: Layout | None = None
    rows = list(samples)
    for row, sample in enumerate(rows):
        try:
            each = describe_sample(sample, known)
            found = each if found is None else join_layouts(found, each, loose=loose)
        except Mismatch as error:
            raise error.at(row) from None
        except ArgumentError as error:
            raise Mismatch.of(
                error.summary, (), "value", expected=error.expected, found=error.found, row=row
            ) from error
    assert found is not None
    # Integers must keep their digits in the common dtype.
    map_leaves(rows, found, lambda leaf, path, values: fit_values(values, leaf, path))
    return found


def join_layouts(one: Layout, other: Layout, path: Path = (), *, loose: bool = False) -> Layout:
    """The common layout of two.

    Raises:
        Mismatch: there is none.

    Examples:
        >>> str(join_layouts(describe_sample([]), describe_sample([1, 2])))
        'int64[*]'
        >>> str(join_layouts(describe_sample(1), describe_sample(2.5)))
        'float64'
    """
    if one == other:
        return one
    if isinstance(one, Branch) and isinstance(other, Branch):
        missing = [key for key in one.parts if key not in other.parts]
        extra = [key for key in other.parts if key not in one.parts]
        if missing or extra:
            raise mismatch_of_keys(one.kind, list(one.parts), missing, extra, path)
        if one.kind is not other.kind:
            raise Mismatch.of("samples differ in type", path, "value", expected=one, found=other)
        parts = one.parts.items()
        return Branch(
            one.kind, {key: join_layouts(part, other.parts[key], (*path, key), loose=loose) for key, part in parts}
        )
    if isinstance(one, Leaf) and isinstance(other, Leaf) and {one.how, other.how} <= {"tensor", "arrays"}:
        return _join_numbers(one, other, path, loose)
    summary = f"values of field {dotted_name(path)!r} differ in type" if path else "samples differ in type"
    raise Mismatch.of(summary, path, "value", expected=one, found=other)


def mismatch_of_keys(
    kind: Any, keys: Sequence[Any], missing: Sequence[Any], extra: Sequence[Any], path: Path
) -> Mismatch:
    """The error for a dict, list or tuple with missing or additional elements."""
    if kind is not dict:
        found = len(keys) - len(missing) + len(extra)
        summary = f"a {kind.__name__} has another length than those of other samples"
        return Mismatch.of(summary, path, "keys", expected=len(keys), found=found)
    words = [f"{word} {', '.join(map(repr, some))}" for word, some in (("no", missing), ("also", extra)) if some]
    return Mismatch.of(
        "samples have different keys",
        path,
        "keys",
        expected=", ".join(map(repr, keys)),
        found="a sample with " + " and ".join(words),
    )


def _join_numbers(one: Leaf, other: Leaf, path: Path, loose: bool) -> Leaf:
    dtype = _join_dtypes(one.field.dtype, other.field.dtype)
    for each, its in ((one, other), (other, one)):
        if is_empty_list(each) and (its.field.kind != "dense" or its.field.shape):  # fits all but scalars
            if its.how == "arrays":
                return its
            return Leaf(Field("ragged", dtype, its.field.shape[its.field.kind == "dense" :]))
    if one.how == other.how == "tensor":
        if one.field.kind == other.field.kind and one.field.shape == other.field.shape:
            return Leaf(Field(one.field.kind, dtype, one.field.shape))
        fields = (one.field, other.field)
        inners = [field.shape if field.kind == "ragged" else field.shape[1:] for field in fields]
        scalars = [field.kind == "dense" and not field.shape for field in fields]
        if inners[0] == inners[1] and not any(scalars):
            return Leaf(Field("ragged", dtype, inners[0]))
    if loose:
        return Leaf(Field("object", dtype), "arrays")
    what = f"arrays of field {dotted_name(path)!r}" if path else "samples"
    raise Mismatch.of(f"{what} differ in more than their first dimension", path, "list", expected=one, found=other)


def _join_dtypes(one: str, other: str) -> str:
    """The dtype for numbers of both; `fit_values` checks whether it holds each of them."""
    if not one or not other or one == other:
        return one or other
    dtype = np.result_type(one, other)
    if dtype.kind == "f" and np.dtype(one).kind in "iu" and np.dtype(other).kind in "iu":
        return "uint64"  # no negative number fits; float64 would lose digits of both
    return dtype.name


def resolve_dtypes(layout: Layout) -> Layout:
    """The layout with numpy's default dtype, float64, for lists that were all empty."""
    if isinstance(layout, Branch):
        return Branch(layout.kind, {key: resolve_dtypes(part) for key, part in layout.parts.items()})
    if is_unknown(layout):
        return Leaf(Field(layout.field.kind, "float64", layout.field.shape), layout.how, guessed=True)
    return layout


def is_empty_list(leaf: Leaf) -> bool:
    """Whether all values of a field were ``[]``."""
    return leaf == Leaf(Field("ragged"))


def is_unknown(leaf: Leaf) -> bool:
    """Whether the dtype of a field is unknown, because all values were empty lists."""
    return leaf.how in ("tensor", "arrays") and not leaf.field.dtype


def map_leaves(values: Sequence[Any], layout: Layout, function: Any, path: Path = ()) -> Any:
    """``function(leaf, path, values)`` of each field of some samples, in the structure of the layout.

    Raises:
        Mismatch: a sample has another structure, or ``function`` raises it.

    Examples:
        >>> samples = [{"x": 1, "y": (2, "a")}, {"x": 3, "y": (4, "b")}]
        >>> map_leaves(samples, describe_sample(samples[0]), lambda leaf, path, values: list(values))
        {'x': [1, 3], 'y': ([2, 4], ['a', 'b'])}
    """
    if isinstance(layout, Leaf):
        return function(layout, path, values)
    parts = layout.parts
    is_dict = layout.kind is dict
    kinds: Any = Mapping if is_dict else (list, tuple) if layout.kind in (list, tuple) else layout.kind
    for row, value in enumerate(values):
        if not isinstance(value, kinds):
            what = f"a value of field {dotted_name(path)!r}" if path else "a sample"
            raise Mismatch.of(
                f"{what} is of another type", path, "value", expected=layout, found=type(value).__name__, row=row
            )
        keys = value.keys() if is_dict else range(len(value))
        if keys != parts.keys() if is_dict else len(value) != len(parts):
            missing = [key for key in parts if key not in keys]
            extra = [key for key in keys if key not in parts]
            raise mismatch_of_keys(layout.kind, list(parts), missing, extra, path).at(row)
    mapped = {
        key: map_leaves([value[key] for value in values], part, function, (*path, key))
        for key, part in parts.items()
    }
    if is_dict:
        return mapped
    return layout.kind(*mapped.values()) if hasattr(layout.kind, "_fields") else layout.kind(mapped.values())


def fit_values(values: Sequence[Any], leaf: Leaf, path: Path = ()) -> Sequence[Any] | Array:
    """The values of a field, converted to its type without loss.

    Returns:
        one array [rows] for a dense field of scalars, a list of arrays for other arrays, else the values.

    Raises:
        Mismatch: a value does not fit; names its shape or type.

    Examples:
        >>> fit_values([[], [1]], leaf_of_field(Field.of("uint8[*]")))
        [array([], dtype=uint8), array([1], dtype=uint8)]
    """
    if leaf.how == "text":
        return _fit_texts(values, leaf, path)
    if leaf.how == "list":
        return values
    if leaf.how == "torch":
        return _fit_for_torch(values, leaf, path)
    field = leaf.field
    dtype = np.dtype(field.dtype or np.bool_)  # only empty lists: any dtype
    if field.kind == "dense" and not field.shape:
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else object
        if issubclass(kind, (bool, int, float, np.generic)):
            numbers = np.array(values)
            # numpy makes floats of integers without a common dtype, which may lose digits.
            rounded = numbers.dtype.kind == "f" and issubclass(kind, int)
            exact = numbers.dtype.kind in "iu" or (numbers.dtype == dtype and not rounded)
            fits = convert_exactly(numbers, dtype) if exact else None
            if fits is not None:
                return fits
    name = dotted_name(path)
    arrays: list[Array] = []
    for row, value in enumerate(values):
        try:
            arrays.append(as_array(name, value))
        except ArgumentError as error:
            is_text = isinstance(value, (str, bytes))
            found = f"{type(value).__name__} {str(value)[:60]!r}" if is_text else error.found
            raise Mismatch.of(_misfit(path), path, "value", expected=leaf, found=found, row=row) from error
    if all(_is_of(field, dtype, array) for array in arrays):
        return arrays
    pairs = zip(values, arrays, strict=True)
    return [_fit_array(value, array, leaf, dtype, path, row) for row, (value, array) in enumerate(pairs)]


def _is_of(field: Field, dtype: np.dtype[Any], array: Array) -> bool:
    if field.kind == "ragged":
        return array.dtype == dtype and array.ndim > 0 and array.shape[1:] == field.shape
    return array.dtype == dtype and (field.kind == "object" or array.shape == field.shape)


def _fit_array(value: Any, array: Array, leaf: Leaf, dtype: np.dtype[Any], path: Path, row: int) -> Array:
    field = leaf.field
    if array.shape == (0,) and isinstance(value, list) and (field.kind == "ragged" or field.shape[:1] == (0,)):
        return np.empty((0, *field.shape[field.kind == "dense" :]), dtype)
    found = str(Field("dense", array.dtype.name, array.shape))
    if field.kind == "ragged" and not (array.ndim and array.shape[1:] == field.shape):
        raise Mismatch.of(_misfit(path), path, "list", expected=leaf, found=found, row=row)
    if field.kind == "dense" and array.shape != field.shape:
        if array.ndim and field.shape and array.shape[1:] == field.shape[1:]:
            wider = Field("ragged", field.dtype, field.shape[1:])
            raise Mismatch.of(_misfit(path), path, "ragged", expected=leaf, found=found, row=row, becomes=wider)
        raise Mismatch.of(_misfit(path), path, "list", expected=leaf, found=found, row=row)
    converted = None if leaf.guessed and array.size else convert_exactly(array, dtype)
    if converted is not None or array.dtype == dtype:
        return array if converted is None else converted
    number = f", {value!r:.60}" if isinstance(value, (int, float, np.generic)) else ""
    if array.dtype.kind in "iu" and dtype.kind == "f":
        number += f", which {dtype} cannot hold exactly"
    becomes = _wider_field(array, leaf)
    raise Mismatch.of(_misfit(path), path, "type", expected=leaf, found=found + number, row=row, becomes=becomes)


def _wider_field(array: Array, leaf: Leaf) -> Field | str:
    """The field with a dtype that holds these numbers too; empty if there is none."""
    field = leaf.field
    if leaf.guessed:
        return Field(field.kind, array.dtype.name, field.shape)
    dtype = _join_dtypes(array.dtype.name, field.dtype)
    if dtype == field.dtype or convert_exactly(array, np.dtype(dtype)) is None:
        return ""
    return Field(field.kind, dtype, field.shape)


def convert_exactly(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """The same numbers in another dtype; None if one would change, or floats would become integers.

    Examples:
        >>> float64 = np.dtype("float64")
        >>> convert_exactly(np.array([2**53]), float64), convert_exactly(np.array([2**53 + 1]), float64)
        (array([9.00719925e+15]), None)
    """
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
    converted = array.astype(dtype)
    exact = 2 ** (np.finfo(dtype).nmant + 1)
    if -exact <= low and high <= exact:
        return converted
    real = converted.real.astype(np.float64)
    if not np.isfinite(real).all():
        return None
    same = all(int(new) == int(old) for new, old in zip(real.ravel(), array.ravel(), strict=True))
    return converted if same else None


def _fit_texts(values: Sequence[Any], leaf: Leaf, path: Path) -> Sequence[Any]:
    kind: type = bytes if leaf.field.kind == "bytes" else str
    for row, value in enumerate(values):
        if not isinstance(value, kind):
            raise Mismatch.of(_misfit(path), path, "value", expected=leaf, found=type(value).__name__, row=row)
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                summary = f"text of field {dotted_name(path)!r} is no Unicode"
                raise Mismatch.of(summary, path, "value", expected="text", found=error, row=row) from error
    return values


def _fit_for_torch(values: Sequence[Any], leaf: Leaf, path: Path) -> Sequence[Any]:
    """Values that torch collates; tensors must have one type, which torch itself does not require."""
    for row, value in enumerate(values):
        found = describe_sample(value) if is_tensor(value) else Leaf(Field("object"), "torch")
        if found != leaf:
            raise Mismatch.of(_misfit(path), path, "list", expected=leaf, found=found, row=row)
    return values


def _misfit(path: Path) -> str:
    return f"a value does not fit field {dotted_name(path)!r}" if path else "a sample does not fit the others"
