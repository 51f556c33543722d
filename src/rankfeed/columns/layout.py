"""The layout of samples: what some of them have in common, and whether further ones fit. Pure functions.

`describe` says what one sample holds, `join` what two have in common, `layout_of` does both for several. `fitted`
converts the values of a column to a field that is fixed, without loss, or says which value does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rankfeed.columns.arrays import as_array, is_list_of_numbers, is_tensor
from rankfeed.columns.field import Field
from rankfeed.errors import ArgumentError, safe_repr

Array = npt.NDArray[Any]
Path = tuple[Any, ...]
#: Fields by the names of `dotted`.
Fields = Mapping[str, Field]
#: What would help: declare a field ragged, fix its type, deliver lists, or something else.
Cure = Literal["ragged", "type", "list", "keys", "names", "value"]

_Result = TypeVar("_Result")


class Mismatch(ArgumentError):
    """A sample that does not go with the others, or with the fields that are fixed.

    Attributes:
        row: which of the samples it is.
        path: keys and positions that lead to the value.
        cure: what would help.
        becomes: the field that would hold this sample as well; empty if none would.
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
        """The error of the sample with this number."""
        error = cls(summary, expected=expected, found=found, where=f"field {dotted(path)!r}" if path else None)
        error.row, error.path, error.cure, error.becomes = row, path, cure, str(becomes)
        return error

    def at(self, row: int) -> Mismatch:
        """The same of another sample."""
        self.row = row
        return self


@dataclass(frozen=True)
class Leaf:
    """A field of a sample.

    Args:
        field: what it holds. A dtype of "" is that of empty lists, which fit any.
        how: "tensor" (dense, ragged), "text" (also bytes), "list" (objects, delivered as they are), "arrays" (of
            any shape: only as a list of tensors), "torch" (what numpy cannot hold: left to torch's own collation).
        guessed: whether the dtype is a guess, of empty lists alone: numbers of another type are no fit.
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
    """A dict, list or tuple of further layouts.

    Args:
        kind: dict, list, tuple, or a class of named tuples.
        parts: what it holds, by key or position.
    """

    kind: Any
    parts: Mapping[Any, Layout]

    def __str__(self) -> str:
        if self.kind is dict:
            return "a dict with " + (", ".join(map(repr, self.parts)) or "no keys")
        return f"a {self.kind.__name__} of {len(self.parts)}"


Layout = Leaf | Branch


def dotted(path: Path) -> str:
    """A path as errors and ``ragged=`` name it.

    Examples:
        >>> dotted(("boxes",)), dotted((1, "x"))
        ('boxes', '1.x')
    """
    return ".".join(map(str, path))


def leaf_of(field: Field) -> Leaf:
    """The leaf of a field."""
    hows: dict[str, Any] = {"bytes": "text", "str": "text", "object": "list"}
    return Leaf(field, hows.get(field.kind, "tensor"))


def layout_of_fields(fields: Any) -> Layout:
    """The layout that ``fields=`` asks for: fields or their text in a dict, list or tuple, or one by itself.

    Raises:
        ArgumentError: something in it is no field.

    Examples:
        >>> str(layout_of_fields({"x": "float32[*, 2]", "y": "int64"}))
        "a dict with 'x', 'y'"
    """
    if isinstance(fields, (str, Field)):
        return leaf_of(Field.of(fields))
    try:
        if isinstance(fields, Mapping) and fields:
            return Branch(dict, {name: layout_of_fields(each) for name, each in fields.items()})
        if isinstance(fields, (tuple, list)) and fields:
            return Branch(type(fields), {number: layout_of_fields(each) for number, each in enumerate(fields)})
    except RecursionError:  # a container that contains itself
        pass
    raise ArgumentError(
        "fields= takes what samples hold",
        expected='a dict, or a tuple for samples that are tuples, of types: {"x": "float32[*, 3]", "y": "int64"}',
        found=safe_repr(fields),
    )


def flat_fields(layout: Layout) -> dict[str, Field] | None:
    """The fields by name, if samples are dicts of columns; else None.

    Examples:
        >>> flat_fields(describe({"x": 1.5, "name": "a"}))
        {'x': Field(kind='dense', dtype='float64', shape=()), 'name': Field(kind='str', dtype='', shape=())}
        >>> flat_fields(describe((1.5, "a")))
    """
    if not isinstance(layout, Branch) or layout.kind is not dict:
        return None
    found: dict[str, Field] = {}
    for name, part in layout.parts.items():
        if not isinstance(part, Leaf) or part.how not in ("tensor", "text"):
            return None
        found[name] = part.field
    return found


def leaves(layout: Layout, path: Path = ()) -> Iterable[tuple[Path, Leaf]]:
    """All fields, each with the path to it."""
    if isinstance(layout, Leaf):
        yield path, layout
        return
    for key, part in layout.parts.items():
        yield from leaves(part, (*path, key))


def describe(value: Any, known: Fields | None = None, path: Path = (), *, in_dict: bool = False) -> Layout:
    """What one sample, or a value in one, holds.

    Args:
        value: the sample.
        known: fields that stay ragged, or lists of objects, whatever the sample holds.
        path: to the value.
        in_dict: whether the value stands in a dict: there a tuple of numbers is an array, as a list is.

    Raises:
        ArgumentError: it is a number that no type holds.

    Examples:
        >>> str(describe([1, 2]).field), str(describe(2.5).field)
        ('int64[*]', 'float64')
    """
    known = known or {}
    declared = known.get(dotted(path)) if path else None
    if declared is not None and declared.kind == "object":
        return Leaf(declared, "list")
    if isinstance(value, Mapping):
        parts = {key: describe(each, known, (*path, key), in_dict=True) for key, each in value.items()}
        return Branch(dict, parts)
    if isinstance(value, (bytes, str)):
        return Leaf(Field("bytes" if isinstance(value, bytes) else "str"), "text")
    if _is_branch(value, in_dict):
        kind = type(value) if hasattr(value, "_fields") or type(value) in (list, tuple) else tuple
        return Branch(kind, {at: describe(each, known, (*path, at)) for at, each in enumerate(value)})
    try:
        array = as_array(dotted(path), value)
    except ArgumentError:
        if isinstance(value, (int, list, tuple, np.ndarray, np.generic)):
            raise  # numbers without a type that holds them
        if is_tensor(value):
            shape = () if getattr(value, "is_nested", False) else tuple(value.shape)
            return Leaf(Field("object", str(value.dtype).removeprefix("torch."), shape), "torch")
        return Leaf(Field("object"), "torch")
    if isinstance(value, list):
        dtype = array.dtype.name if array.size else ""
        return Leaf(Field("ragged", dtype, array.shape[1:]))
    if array.ndim and declared is not None and declared.kind == "ragged":
        return Leaf(Field("ragged", array.dtype.name, array.shape[1:]))
    return Leaf(Field("dense", array.dtype.name, array.shape))


def _is_branch(value: Any, in_dict: bool) -> bool:
    """Whether a list or tuple is delivered as one of batches, as torch does; else it is an array."""
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


def layout_of(samples: Iterable[Any], known: Fields | None = None, *, loose: bool = False) -> Layout:
    """What several samples hold.

    Args:
        samples: at least one.
        known: as of `describe`.
        loose: whether arrays may differ in all dimensions.

    Raises:
        Mismatch: they have nothing in common that loses no value; its ``row`` is one that differs from the first.

    Examples:
        >>> str(layout_of([{"x": np.zeros((3, 2))}, {"x": np.zeros((5, 2))}]).parts["x"])
        'float64[*, 2]'
    """
    found: Layout | None = None
    rows = list(samples)
    for row, sample in enumerate(rows):
        try:
            each = describe(sample, known)
            found = each if found is None else join(found, each, loose=loose)
        except Mismatch as error:
            raise error.at(row) from None
        except ArgumentError as error:
            raise Mismatch.of(
                error.summary, (), "value", expected=error.expected, found=error.found, row=row
            ) from error
    assert found is not None
    mapped(rows, found, lambda leaf, path, values: fitted(values, leaf, path))  # whole numbers keep their digits
    return found


def join(one: Layout, other: Layout, path: Path = (), *, loose: bool = False) -> Layout:
    """What two layouts have in common.

    Args:
        one: what a sample holds, or a rank found.
        other: what another does.
        path: to them.
        loose: whether arrays may differ in all dimensions.

    Raises:
        Mismatch: nothing.

    Examples:
        >>> str(join(describe([]), describe([1, 2])))
        'int64[*]'
        >>> str(join(describe(1), describe(2.5)))
        'float64'
    """
    if one == other:
        return one
    if isinstance(one, Branch) and isinstance(other, Branch):
        _same_keys(one, other, path)
        if one.kind is not other.kind:
            raise Mismatch.of("samples differ in type", path, "value", expected=one, found=other)
        parts = {key: join(one.parts[key], other.parts[key], (*path, key), loose=loose) for key in one.parts}
        return Branch(one.kind, parts)
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        numeric = {"tensor", "arrays"}
        if one.how in numeric and other.how in numeric:
            return _join_numbers(one, other, path, loose)
    summary = f"values of field {dotted(path)!r} differ in type" if path else "samples differ in type"
    raise Mismatch.of(summary, path, "value", expected=one, found=other)


def _same_keys(one: Branch, other: Branch, path: Path) -> None:
    missing = [key for key in one.parts if key not in other.parts]
    extra = [key for key in other.parts if key not in one.parts]
    if missing or extra:
        raise mismatch_of_keys(one.kind, list(one.parts), missing, extra, path)


def mismatch_of_keys(
    kind: Any, keys: Sequence[Any], missing: Sequence[Any], extra: Sequence[Any], path: Path
) -> Mismatch:
    """The error of a dict, list or tuple that has not what the others have."""
    if kind is not dict:
        found = len(keys) - len(missing) + len(extra)
        return Mismatch.of(
            f"a {kind.__name__} has another length than those of other samples",
            path,
            "keys",
            expected=len(keys),
            found=found,
        )
    said = [f"{word} {', '.join(map(repr, some))}" for word, some in (("no", missing), ("also", extra)) if some]
    return Mismatch.of(
        "samples have different keys",
        path,
        "keys",
        expected=", ".join(map(repr, keys)),
        found="a sample with " + " and ".join(said),
    )


def _join_numbers(one: Leaf, other: Leaf, path: Path, loose: bool) -> Leaf:
    dtype = _join_dtypes(one.field.dtype, other.field.dtype)
    for each, its in ((one, other), (other, one)):
        if is_empty_list(each) and (its.field.kind != "dense" or its.field.shape):  # goes with all but numbers
            if its.how == "arrays":
                return its
            return Leaf(Field("ragged", dtype, its.field.shape[its.field.kind == "dense" :]))
    if one.how == other.how == "tensor":
        if one.field.kind == other.field.kind and one.field.shape == other.field.shape:
            return Leaf(Field(one.field.kind, dtype, one.field.shape))
        inners = [
            each.field.shape if each.field.kind == "ragged" else each.field.shape[1:] for each in (one, other)
        ]
        scalars = [each.field.kind == "dense" and not each.field.shape for each in (one, other)]
        if inners[0] == inners[1] and not any(scalars):
            return Leaf(Field("ragged", dtype, inners[0]))
    if loose:
        return Leaf(Field("object", dtype), "arrays")
    raise Mismatch.of(
        f"arrays of field {dotted(path)!r} differ in more than their first dimension"
        if path
        else "samples differ in more than their first dimension",
        path,
        "list",
        expected=one,
        found=other,
    )


def _join_dtypes(one: str, other: str) -> str:
    """The type that holds numbers of both; whether it holds each of them is a question of their values."""
    if not one or not other or one == other:
        return one or other
    dtype = np.result_type(one, other)
    if dtype.kind == "f" and np.dtype(one).kind in "iu" and np.dtype(other).kind in "iu":
        return "uint64"  # beside it negative numbers do not fit; in float64 both would lose digits
    return dtype.name


def settled(layout: Layout) -> Layout:
    """The layout with a type for lists that were all empty: numpy's, float64."""
    if isinstance(layout, Branch):
        return Branch(layout.kind, {key: settled(part) for key, part in layout.parts.items()})
    if is_unknown(layout):
        return Leaf(Field(layout.field.kind, "float64", layout.field.shape), layout.how, guessed=True)
    return layout


def is_empty_list(leaf: Leaf) -> bool:
    """Whether a field has held nothing but ``[]``."""
    return leaf == Leaf(Field("ragged"))


def is_unknown(leaf: Leaf) -> bool:
    """Whether no sample has shown the type of a field: all were empty lists."""
    return leaf.how in ("tensor", "arrays") and not leaf.field.dtype


def mapped(values: Sequence[Any], layout: Layout, make: Any, path: Path = ()) -> Any:
    """What ``make(leaf, path, values)`` makes of each field of some samples, as a layout of its own.

    Raises:
        Mismatch: a sample is built differently, or what ``make`` raises.

    Examples:
        >>> samples = [{"x": 1, "y": (2, "a")}, {"x": 3, "y": (4, "b")}]
        >>> mapped(samples, describe(samples[0]), lambda leaf, path, values: list(values))
        {'x': [1, 3], 'y': ([2, 4], ['a', 'b'])}
    """
    if isinstance(layout, Leaf):
        return make(layout, path, values)
    parts = layout.parts
    if layout.kind is dict:
        for row, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise _other_type(layout, value, path, row)
            if value.keys() != parts.keys():
                missing = [key for key in parts if key not in value]
                extra = [key for key in value if key not in parts]
                raise mismatch_of_keys(dict, list(parts), missing, extra, path).at(row)
        return {
            key: mapped([value[key] for value in values], part, make, (*path, key)) for key, part in parts.items()
        }
    kinds = (list, tuple) if layout.kind in (list, tuple) else layout.kind
    for row, value in enumerate(values):
        if not isinstance(value, kinds):
            raise _other_type(layout, value, path, row)
        if len(value) != len(parts):
            missing, extra = list(parts)[len(value) :], list(range(len(parts), len(value)))
            raise mismatch_of_keys(layout.kind, list(parts), missing, extra, path).at(row)
    made = [
        mapped(column, part, make, (*path, at))
        for (at, part), column in zip(parts.items(), zip(*values, strict=True), strict=True)
    ]
    return layout.kind(*made) if hasattr(layout.kind, "_fields") else layout.kind(made)


def _other_type(layout: Branch, value: Any, path: Path, row: int) -> Mismatch:
    return Mismatch.of(
        "a sample is of another type" if not path else f"a value of field {dotted(path)!r} is of another type",
        path,
        "value",
        expected=layout,
        found=type(value).__name__,
        row=row,
    )


def fitted(values: Sequence[Any], leaf: Leaf, path: Path = ()) -> Sequence[Any] | Array:
    """The values of a field, converted to what is fixed for it: never with loss.

    Returns:
        one array [rows] of a dense field of numbers, a list of arrays of other arrays, the values of all else.

    Raises:
        Mismatch: one does not fit; names its shape or type.

    Examples:
        >>> fitted([1, 2.5], leaf_of(Field.of("float64")))
        [array(1.), array(2.5)]
        >>> fitted([[], [1]], leaf_of(Field.of("uint8[*]")))
        [array([], dtype=uint8), array([1], dtype=uint8)]
    """
    if leaf.how == "text":
        return _texts(values, leaf, path)
    if leaf.how == "list":
        return values
    if leaf.how == "torch":
        return _for_torch(values, leaf, path)
    field = leaf.field
    dtype = np.dtype(field.dtype or np.bool_)  # nothing but empty lists: any type
    if field.kind == "dense" and not field.shape:
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else object
        if issubclass(kind, (bool, int, float, np.generic)):
            numbers = np.array(values)
            # Of whole numbers that have no type in common, numpy makes floats, which may have lost digits.
            rounded = numbers.dtype.kind == "f" and issubclass(kind, int)
            right = numbers.dtype.kind in "iu" or (numbers.dtype == dtype and not rounded)
            fits = exactly(numbers, dtype) if right else None
            if fits is not None:
                return fits
    name = dotted(path)
    arrays: list[Array] = []
    for row, value in enumerate(values):
        try:
            arrays.append(as_array(name, value))
        except ArgumentError as error:
            found = (
                f"{type(value).__name__} {str(value)[:60]!r}" if isinstance(value, (str, bytes)) else error.found
            )
            raise Mismatch.of(_misfit(path), path, "value", expected=leaf, found=found, row=row) from error
    if field.kind == "object":
        right = {array.dtype for array in arrays} <= {dtype}
    elif field.kind == "dense":
        right = {(array.dtype, array.shape) for array in arrays} <= {(dtype, field.shape)}
    else:
        right = {(array.dtype, array.shape[1:], array.ndim > 0) for array in arrays} <= {
            (dtype, field.shape, True)
        }
    if not right:
        pairs = zip(values, arrays, strict=True)
        arrays = [_one(value, array, leaf, dtype, path, row) for row, (value, array) in enumerate(pairs)]
    return arrays


def _one(value: Any, array: Array, leaf: Leaf, dtype: np.dtype[Any], path: Path, row: int) -> Array:
    """One array as its field wants it."""
    field = leaf.field
    if array.shape == (0,) and isinstance(value, list) and (field.kind == "ragged" or field.shape[:1] == (0,)):
        return np.empty((0, *field.shape[field.kind == "dense" :]), dtype)
    ragged = field.kind == "ragged"
    if ragged and not (array.ndim and array.shape[1:] == field.shape):
        cure: Cure = "list"
    elif field.kind == "dense" and array.shape != field.shape:
        same = array.ndim and field.shape and array.shape[1:] == field.shape[1:]
        cure = "ragged" if same else "list"
    else:
        converted = None if leaf.guessed and array.size else exactly(array, dtype)
        if converted is not None or array.dtype == dtype:
            return array if converted is None else converted
        found = str(Field("dense", array.dtype.name, array.shape))
        number = f", {value!r:.60}" if isinstance(value, (int, float, np.generic)) else ""
        if array.dtype.kind in "iu" and dtype.kind == "f":
            number += f", which {dtype} cannot hold exactly"
        raise Mismatch.of(
            _misfit(path), path, "type", expected=leaf, found=found + number, row=row, becomes=_wider(array, leaf)
        )
    wider = Field("ragged", field.dtype, field.shape[1:]) if cure == "ragged" else ""
    found = str(Field("dense", array.dtype.name, array.shape))
    raise Mismatch.of(_misfit(path), path, cure, expected=leaf, found=found, row=row, becomes=wider)


def _wider(array: Array, leaf: Leaf) -> Field | str:
    """The field with a type that holds these numbers too; empty if there is none."""
    field = leaf.field
    if leaf.guessed:
        return Field(field.kind, array.dtype.name, field.shape)
    dtype = _join_dtypes(array.dtype.name, field.dtype)
    if dtype == field.dtype or exactly(array, np.dtype(dtype)) is None:
        return ""
    return Field(field.kind, dtype, field.shape)


def exactly(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """The same numbers under another type; None if one of them would change, or a fraction be asked to be whole.

    Examples:
        >>> exactly(np.array([2**53]), np.dtype("float64")), exactly(np.array([2**53 + 1]), np.dtype("float64"))
        (array([9.00719925e+15]), None)
    """
    if array.dtype == dtype or not array.size:
        return array.astype(dtype, copy=False)
    if array.dtype.kind not in "iu":
        return array.astype(dtype) if np.can_cast(array.dtype, dtype, "safe") else None
    least, most = int(array.min()), int(array.max())
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return array.astype(dtype) if limits.min <= least and most <= limits.max else None
    if dtype.kind not in "fc":
        return None
    converted = array.astype(dtype)
    digits = 2 ** (np.finfo(dtype).nmant + 1)
    if -digits <= least and most <= digits:
        return converted
    real = converted.real.astype(np.float64)
    if not np.isfinite(real).all():
        return None
    kept = all(int(now) == int(before) for now, before in zip(real.ravel(), array.ravel(), strict=True))
    return converted if kept else None


def _texts(values: Sequence[Any], leaf: Leaf, path: Path) -> Sequence[Any]:
    kind: type = bytes if leaf.field.kind == "bytes" else str
    for row, value in enumerate(values):
        if not isinstance(value, kind):
            found = type(value).__name__
            raise Mismatch.of(_misfit(path), path, "value", expected=leaf, found=found, row=row)
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                summary = f"text of field {dotted(path)!r} is no Unicode"
                raise Mismatch.of(summary, path, "value", expected="text", found=error, row=row) from error
    return values


def _for_torch(values: Sequence[Any], leaf: Leaf, path: Path) -> Sequence[Any]:
    """Values that torch collates: tensors among them are of one type, which torch itself would not insist on."""
    for row, value in enumerate(values):
        found = describe(value) if is_tensor(value) else Leaf(Field("object"), "torch")
        if found != leaf:
            raise Mismatch.of(_misfit(path), path, "list", expected=leaf, found=found, row=row)
    return values


def _misfit(path: Path) -> str:
    return f"a value does not fit field {dotted(path)!r}" if path else "a sample does not fit the others"
