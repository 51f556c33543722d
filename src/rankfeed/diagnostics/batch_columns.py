"""Flattens a batch of any structure (dicts, tuples, tensors, graphs) into named columns of one value per row."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

#: One entry for each row: an array, a list or a tuple.
Column = Any
#: How deep objects are opened.
_DEPTH = 6
#: Ending of the names of edges that are counted from the first node of their sample.
LOCAL = " (of a sample)"


def columns(batch: Any, rows: int | None = None) -> dict[str, Column]:
    """Fields with one entry for each of ``rows`` (if known) rows, by path; empty if the batch has none.

    A batch that contains itself, or is nested without end, has none.
    """
    with suppress(RecursionError):
        return _columns(batch, rows)
    return {}


def _columns(batch: Any, rows: int | None) -> dict[str, Column]:
    if (samples := _samples(batch, rows)) is not None:
        opened = [dict(_leaves(sample)) for sample in samples]
        names = dict.fromkeys(name for fields in opened for name in fields)
        return {name: [fields.get(name) for fields in opened] for name in names}
    count = _row_count(batch, rows)
    found = {}
    others: dict[str, npt.NDArray[Any]] = {}
    for name, leaf in _leaves(batch, count=count):
        value = _entries(leaf)
        if value is not None and len(value) == count:
            found[name] = value
        elif isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[1] == count:
            found[name] = np.moveaxis(value, 1, 0)  # time first
        elif isinstance(value, np.ndarray) and len(value) and count:
            others[name] = value
    return found | _concatenated(others, found, count or 0)


def _concatenated(
    arrays: Mapping[str, npt.NDArray[Any]], columns: Mapping[str, Column], count: int
) -> dict[str, Column]:
    """Arrays in which the samples follow one another, cut where an array of their numbers or bounds says."""
    starts: dict[int, npt.NDArray[Any]] = {}  # of each sample, by the length of what is concatenated
    sizes = {len(array) for array in arrays.values()}
    for array in (*arrays.values(), *(column for column in columns.values() if isinstance(column, np.ndarray))):
        if array.ndim != 1 or array.dtype.kind not in "iu" or array[0] < 0:
            continue
        if len(array) == count and array.min() >= 0 and array.sum() != count:  # lengths
            starts.setdefault(int(array.sum()), np.cumsum(array) - array)
        elif (np.diff(array) >= 0).all():
            if len(array) == count + 1 and not array[0]:  # bounds
                starts[int(array[-1])] = array[:-1]
            elif array[-1] < count <= len(array):  # the sample of each entry
                starts[len(array)] = np.searchsorted(array, np.arange(count))
    starts = {size: bounds for size, bounds in starts.items() if size in sizes}
    found: dict[str, Column] = {}
    for name, array in arrays.items():
        is_pairs = array.ndim == 2 and len(array) == 2 and array.dtype.kind in "iu" and array.min(initial=0) >= 0
        fitting = [nodes for nodes in starts if is_pairs and nodes > array.max(initial=0)]
        if fitting:  # edges from and to nodes
            bounds = starts[min(fitting)]
            samples = np.searchsorted(bounds, array[0], side="right") - 1
            found[name + LOCAL] = [array[:, samples == sample] - bounds[sample] for sample in range(count)]
        elif len(array) in starts:
            found[name] = np.split(array, starts[len(array)][1:])
    return found


def _row_count(batch: Any, rows: int | None) -> int | None:
    """The number of rows that most fields agree on; ``rows`` if any field has it."""
    nested = isinstance(batch, (list, tuple)) and not _is_column(batch)
    fields = [*batch.values()] if isinstance(batch, Mapping) else batch if nested else [batch]
    lengths: Counter[int] = Counter()
    seconds: list[int] = []  # dimensions after another one, which may be time
    for field in fields:
        values = [_entries(leaf) for _, leaf in _leaves(field)]
        shapes = [len(field)] if isinstance(field, (list, tuple)) else []
        shapes += [len(value) for value in values if value is not None]
        lengths.update([*dict.fromkeys(shapes)])
        second = {size for value in values if isinstance(value, np.ndarray) for size in value.shape[1:2]}
        seconds += second.difference(shapes)
    lengths.update(length for length in seconds if length in lengths)
    if rows in lengths or rows in seconds:
        return rows
    return next((length for length, _ in lengths.most_common(1)), None)


def _samples(batch: Any, rows: int | None) -> Column | None:
    """The samples of a batch that is a list of them, or that can be split into one."""
    split = getattr(batch, "to_data_list", None)  # of PyTorch Geometric
    if callable(split):
        with suppress(Exception):
            return list(split())
    if not isinstance(batch, (list, tuple)) or not batch or hasattr(batch, "_fields"):
        return None  # a PackedSequence, too
    if rows is not None and len(batch) != rows:
        return None
    arrays = [tuple(array.shape) for array in batch if hasattr(array, "shape") and len(array.shape)]
    if len(arrays) == len(batch):
        if rows is not None:
            return None if {shape[0] for shape in arrays} == {rows} else batch
        first = Counter(shape[0] for shape in arrays)
        images = len({*arrays}) == 1 and len(arrays[0]) == 3 and arrays[0][0] in (1, 3, 4)
        return batch if len(batch) > 2 and (images or 2 * max(first.values()) < len(batch)) else None
    if not all(map(_is_composite, batch)):
        return None
    if rows is not None:
        return batch
    entries = [[_entries(leaf) for _, leaf in _leaves(sample)] for sample in batch]
    lengths = [{len(value) for value in values if value is not None} for values in entries]
    every = set().union(*lengths)
    scalars = any(value is None for values in entries for value in values)
    if all(lengths) and len(every) == 1 and (len(batch) == 1 or (min(every) > len(batch) and not scalars)):
        return None  # fields of one length: batches of DALI's pipelines, or (inputs, targets)
    # Lists of one length, longer than there are lists, are columns: what ``zip(*samples)`` makes.
    sizes = {len(sample) if isinstance(sample, (list, tuple)) else -1 for sample in batch}
    are_columns = len(sizes) == 1 and min(sizes) > len(batch)
    return None if isinstance(batch, tuple) or are_columns else batch


def _is_composite(value: Any) -> bool:
    if isinstance(value, (Mapping, tuple, list)) or dataclasses.is_dataclass(value):
        return True
    return hasattr(value, "__dict__") and not hasattr(value, "__array__")


def _leaves(
    value: Any, path: str = "", depth: int = _DEPTH, count: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Arrays, columns and scalars of nested containers, through torch's pytree; objects by their fields.

    Lists of ``count`` entries are columns, too, unless they are the whole batch.
    """
    from torch.nn.utils.rnn import PackedSequence
    from torch.utils._pytree import keystr, tree_flatten_with_path

    def is_leaf(node: Any) -> bool:
        if _is_column(node) or isinstance(node, PackedSequence):
            return True
        return isinstance(node, (list, tuple)) and len(node) == count and node is not value

    pairs, _ = tree_flatten_with_path(value, is_leaf=is_leaf)
    for keys, leaf in pairs:
        part = keystr(keys).replace("]", "").replace("[", ".").replace("'", "").removeprefix(".")
        name = ".".join(text for text in (path, part) if text)
        opened = fields_of(leaf) if depth and not is_leaf(leaf) else None
        if opened is None:
            yield name, leaf
        else:
            yield from _leaves(opened, name, depth - 1, count)


def _is_column(value: Any) -> bool:
    """Whether a list has an entry for each row, and no containers or arrays."""
    plain = (str, bytes, int, float, complex, np.generic, type(None))
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, plain) for entry in value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a mapping or object that pytree does not know."""
    if isinstance(value, Mapping):
        return {str(name): field for name, field in value.items()}
    if hasattr(value, "__array__") or isinstance(value, (str, bytes, int, float, complex, type(None))):
        return None
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        with suppress(Exception):
            return dict(to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields = getattr(value, "__dict__", None)
    return {name: field for name, field in fields.items() if not name.startswith("_")} if fields else None


def _entries(leaf: Any) -> Any:
    """A leaf as an array, or a list, of entries; None if it has none."""
    from torch.nn.utils.rnn import PackedSequence, unpack_sequence

    if isinstance(leaf, PackedSequence):
        return [array_of(sequence) for sequence in unpack_sequence(leaf)]
    if isinstance(leaf, (list, tuple)):
        return leaf
    if hasattr(leaf, "detach"):
        with suppress(Exception):
            if getattr(leaf, "is_nested", False):
                return [array_of(tensor) for tensor in leaf.unbind()]
            return _entries(array_of(leaf))
        return None
    if hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
        array = np.asarray(leaf)
        return array if array.ndim else None
    return None


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """A tensor's values, dense; where numpy has no such type, their bytes."""
    import torch

    tensor = tensor.detach().cpu()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        return np.asarray(tensor.contiguous().view(torch.uint8).numpy())
