"""Rows of a batch of any shape: columns by name, and what is compared of them."""

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from rankfeed.diagnostics.keys import array_of, bytes_of
from rankfeed.errors import AuditError

#: One entry for each row: an array, a list or a tuple.
Column = Any
#: How deep objects are opened, tokens of a shingle, and of how many hashes one is kept.
_DEPTH, _TOKENS, _KEPT = 6, 12, 16
#: Factors of the hash of a shingle.
_FACTORS = np.random.default_rng(12).integers(1 << 62, size=_TOKENS, dtype=np.uint64) | np.uint64(1)


def columns(batch: Any, rows: int | None = None) -> dict[str, Column]:
    """Fields with one entry for each of ``rows`` (if known) rows, by path; empty if the batch has no such fields.

    Examples:
        >>> columns({"x": np.zeros((2, 3)), "meta": {"k": ["a", "b"]}, "step": 7}).keys()
        dict_keys(['x', 'meta.k'])
        >>> columns([{"x": 1}, {"x": 2}, {"x": 3}])
        {'x': [1, 2, 3]}
    """
    if (samples := _samples(batch, rows)) is not None:
        opened = [dict(_leaves(sample)) for sample in samples]
        names = dict.fromkeys(name for each in opened for name in each)
        return {name: [each.get(name) for each in opened] for name in names}
    count = _row_count(batch, rows)
    found = {}
    for name, leaf in _leaves(batch, count=count):
        value = _entries(leaf)
        if value is not None and len(value) == count:
            found[name] = value
        elif isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[1] == count:
            found[name] = np.moveaxis(value, 1, 0)  # time first
    return found


def _row_count(batch: Any, rows: int | None) -> int | None:
    """The number of rows that most fields agree on; ``rows`` if any field has it."""
    nested = isinstance(batch, (list, tuple)) and not _is_column(batch)
    fields = [*batch.values()] if isinstance(batch, Mapping) else batch if nested else [batch]
    lengths: Counter[int] = Counter()
    for field in fields:
        shapes = [len(field)] if isinstance(field, (list, tuple)) else []
        for _, leaf in _leaves(field):
            value = _entries(leaf)
            shapes += [len(value)] if value is not None else []
            shapes += value.shape[1:2] if isinstance(value, np.ndarray) else ()
        lengths.update([*dict.fromkeys(shapes)])
    return rows if rows in lengths else next((length for length, _ in lengths.most_common(1)), None)


def _samples(batch: Any, rows: int | None) -> Column | None:
    """The samples of a batch that is a list of them, or that can be split into one."""
    split = getattr(batch, "to_data_list", None)  # of PyTorch Geometric
    if callable(split):
        with suppress(Exception):
            return list(split())
    if not isinstance(batch, (list, tuple)) or not batch or hasattr(batch, "_fields"):
        return None
    if rows is not None and len(batch) != rows:
        return None
    arrays = [tuple(each.shape) for each in batch if hasattr(each, "shape") and len(each.shape)]
    if len(arrays) == len(batch):
        if rows is not None:
            return None if len(arrays[0]) and {shape[0] for shape in arrays} == {rows} else batch
        first = Counter(shape[0] for shape in arrays)
        images = len({*arrays}) == 1 and len(arrays[0]) == 3 and arrays[0][0] in (1, 3, 4)
        return batch if len(batch) > 2 and (images or 2 * max(first.values()) < len(batch)) else None
    composite = [each for each in batch if isinstance(each, (Mapping, tuple, list)) or _has_fields(each)]
    if len(composite) < len(batch):
        return None
    if rows is not None:
        return batch
    shapes = [[len(value) for _, leaf in _leaves(each) if (value := _entries(leaf)) is not None] for each in batch]
    every = {length for each in shapes for length in each}
    if all(shapes) and len(every) == 1 and (len(batch) == 1 or min(every) > len(batch)):
        return None  # fields of one length: batches of DALI's pipelines, or (inputs, targets)
    if isinstance(batch, tuple) or _are_columns(batch):
        return None
    return batch


def _are_columns(batch: Column) -> bool:
    """Whether these are lists of one length, longer than there are lists: what ``zip(*samples)`` makes."""
    lengths = {len(each) if isinstance(each, (list, tuple)) else -1 for each in batch}
    return len(lengths) == 1 and min(lengths) > len(batch)


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or (hasattr(value, "__dict__") and not hasattr(value, "__array__"))


def _leaves(
    value: Any, path: str = "", depth: int = _DEPTH, count: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Arrays, columns and scalars of nested containers, through torch's pytree; objects by their fields.

    Lists of ``count`` entries are columns, too, unless they are the whole batch.
    """
    from torch.utils._pytree import keystr, tree_flatten_with_path

    def is_leaf(node: Any) -> bool:
        return _is_column(node) or (isinstance(node, (list, tuple)) and len(node) == count and node is not value)

    pairs, _ = tree_flatten_with_path(value, is_leaf=is_leaf)
    for keys, leaf in pairs:
        part = keystr(keys).replace("]", "").replace("[", ".").replace("'", "").removeprefix(".")
        name = ".".join(each for each in (path, part) if each)
        opened = _opened(leaf) if depth and not is_leaf(leaf) else None
        if opened is None:
            yield name, leaf
        else:
            yield from _leaves(opened, name, depth - 1, count)


def _is_column(value: Any) -> bool:
    """Whether a list has an entry for each row, and no containers or arrays."""
    plain = (str, bytes, int, float, complex, np.generic, type(None))
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, plain) for each in value)


def _opened(value: Any) -> dict[str, Any] | None:
    """The fields of a mapping or object that pytree does not know."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if hasattr(value, "__array__") or isinstance(value, (str, bytes, int, float, complex, type(None))):
        return None
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        with suppress(Exception):
            return dict(to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    fields = getattr(value, "__dict__", None)
    return {name: each for name, each in fields.items() if not name.startswith("_")} if fields else None


def _entries(leaf: Any) -> Any:
    """A leaf as an array, or a list, of entries; None if it has none."""
    if isinstance(leaf, (list, tuple)):
        return leaf
    if hasattr(leaf, "detach"):
        with suppress(Exception):
            if getattr(leaf, "is_nested", False):
                return [array_of(each) for each in leaf.unbind()]
            return _entries(array_of(leaf))
        return None
    if hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
        array = np.asarray(leaf)
        return array if array.ndim else None
    return None


def hashes(column: Column) -> list[int] | None:
    """A hash of each entry; None if the entries have no content that can be hashed."""
    with suppress(Exception):
        return _hashes(column)
    return None


def _hashes(column: Column) -> list[int]:
    if isinstance(column, np.ndarray) and column.dtype != object:
        prefix = f"{column.dtype.str}{column.ndim}".encode()
        return [xxh3_64_intdigest(prefix + np.ascontiguousarray(row).tobytes()) for row in column]
    return [xxh3_64_intdigest(_bytes(entry)) for entry in column]


def _bytes(entry: Any) -> bytes:
    try:
        return bytes_of(entry)
    except AuditError:
        opened = _opened(entry)
        return bytes_of([[name, repr(each)] for name, each in opened.items()]) if opened else pickle.dumps(entry)


def ends(column: Column, *, first: bool = False) -> list[tuple[int, int, int]]:
    """Of rows that may be padded: hash of the last element, of the row without its trailing run, run length."""
    found = []
    for row in column:
        line = row[::-1] if first else row
        same = (line == line[-1]).reshape(len(line), -1).all(axis=1)
        run = len(line) if same.all() else int(np.argmin(same[::-1]))
        found.append((_hashes(line[-1:])[0], _hashes(line[None, : len(line) - run])[0], run))
    return found


def shingles_of(row: npt.NDArray[Any]) -> list[int]:
    """Hashes of every 12 consecutive tokens, of which one in 16 is kept."""
    if len(row) < _TOKENS:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(row.astype(np.uint64), _TOKENS)
    mixed = (windows * _FACTORS).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    kept: list[int] = mixed[mixed % _KEPT == 0].tolist()
    return kept


def all_ends(found: Mapping[str, Column]) -> dict[str, list[tuple[int, int, int]]]:
    """Both ends of the columns that may be padded: ``name`` and ``name<``."""
    padded = {
        name: column
        for name, column in found.items()
        if isinstance(column, np.ndarray) and column.dtype.kind in "iufb" and 2 <= column.ndim <= 3 and column.size
    }
    last = {name: ends(column) for name, column in padded.items()}
    return last | {f"{name}<": ends(column, first=True) for name, column in padded.items()}


def tokens(found: Mapping[str, Column]) -> tuple[list[int], int]:
    """Shingles and number of tokens of the integer sequences, of the most varied field if there are several."""
    best: list[npt.NDArray[Any]] = []
    for column in found.values():
        rows = [row for row in column if isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "iu"]
        long = len(rows) == len(column) and rows and max(map(len, rows)) >= 2 * _TOKENS
        if long and (not best or _variety(rows) > _variety(best)):
            best = rows
    trimmed = [row[: len(row) - run + 1] for row in best if len(row) for _, _, run in ends([row])]
    return [key for row in trimmed for key in shingles_of(row)], sum(map(len, trimmed))


def _variety(rows: Column) -> int:
    return len(np.unique(np.concatenate(rows)))


def key_at(path: str) -> Callable[[Any], Any]:
    """A function that reads what is at a path of a batch, as ``0.sample_id`` or ``meta.k``."""

    def read(batch: Any) -> Any:
        value = batch
        for part in path.split("."):
            try:
                if isinstance(value, Mapping):
                    value = value[part] if part in value else value[int(part)]
                elif isinstance(value, (list, tuple)) and value and not part.lstrip("-").isdigit():
                    value = [each[part] if isinstance(each, Mapping) else getattr(each, part) for each in value]
                elif part.lstrip("-").isdigit():
                    value = value[int(part)]
                else:
                    value = getattr(value, part)
            except (KeyError, IndexError, AttributeError, TypeError, ValueError):
                raise AuditError(
                    f"a batch has nothing at {path!r}",
                    expected="the samples' ids",
                    found=f"no {part!r} in {type(value).__name__}",
                    remedy=f"--key, one of {', '.join(columns(batch)) or 'module:function'}",
                ) from None
        return value

    return read
