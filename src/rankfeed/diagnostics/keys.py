"""Keys of the samples of a batch: their ids, or a hash of their content."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from rankfeed.diagnostics.batch_columns import Column, array_of, columns, fields_of
from rankfeed.errors import AuditError, listed

#: One for each sample of a batch: int64 (a whole number is its own key) or S16 (XXH3 digests of 128 bits).
KeyArray = npt.NDArray[Any]
#: Where a batch has its ids: a field's name, a path as ``meta.id`` or ``0.id``, a place, or a function.
Key = str | int | Callable[[Any], Any]

#: The default key; batches need not have it.
USUAL = "sample_id"


def keys_of(batch: Any, key: Key = USUAL) -> tuple[KeyArray, bool]:
    """Keys of a batch's samples, and whether they are digests of content because there are no ids."""
    if key == USUAL and ids_in(batch, key) is None:
        rows = _content(batch)
        return _digests(rows), bool(rows)
    return key_array(required_ids(batch, key)), False


def ids_in(batch: Any, key: Key) -> Any:
    """What a batch has where its ids should be; None if there is nothing."""
    if callable(key):
        return key(batch)
    parts: list[Any] = [key] if isinstance(batch, Mapping) and key in batch else str(key).split(".")
    try:
        for part in parts:
            is_place = str(part).lstrip("-").isdigit()
            are_tuples = isinstance(batch, list) and batch and all(isinstance(row, tuple) for row in batch)
            if isinstance(batch, Mapping):
                batch = batch[part] if part in batch else batch[int(part)]
            elif is_place:
                batch = [row[int(part)] for row in batch] if are_tuples else batch[int(part)]
            elif isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):  # a field of each sample
                batch = [row[part] if isinstance(row, Mapping) else getattr(row, part) for row in batch]
            else:
                batch = getattr(batch, part)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        return None
    return batch


def required_ids(batch: Any, key: Key) -> Any:
    """What a batch has where its ids should be; AuditError if there is nothing."""
    ids = ids_in(batch, key)
    if ids is None:
        raise AuditError(
            f"a batch has nothing at {key!r}",
            expected="the samples' ids",
            found=_outline(batch),
            remedy="key: the path of another field, or a function of the batch",
        )
    return ids


def key_array(values: Any) -> KeyArray:
    """Ids as keys."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step)
    if hasattr(values, "detach"):
        values = array_of(values)
    if isinstance(values, np.ndarray) and values.ndim:
        if values.ndim == 1 and values.dtype.kind in "iu" and values.dtype != np.uint64:
            return values.astype(np.int64)
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise AuditError("keys are one for each sample", expected="a sequence", found=type(values).__name__)
    if any(getattr(entry, "ndim", 0) for entry in values):
        raise AuditError(
            "these are fields of ids, and not ids",
            expected="one for each sample",
            found=_outline(values),
            remedy="key=lambda batch: ... that returns a list with one for each sample",
        )
    values = [entry.tolist() if hasattr(entry, "ndim") else entry for entry in values]
    if not all(type(entry) is int for entry in values):
        return _digests(map(bytes_of, values))
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise AuditError(
            "an id is too large",
            expected=f"whole numbers up to {2**63 - 1}",
            found=max(values, key=abs),
            remedy="key=lambda batch: [str(each) for each in batch[...]]",
        ) from None


def _digests(rows: Iterable[bytes]) -> KeyArray:
    return np.frombuffer(b"".join(map(xxh3_128_digest, rows)), "S16")


def hashes(column: Column) -> list[int] | None:
    """A hash of each entry; None if the entries have no content that can be hashed."""
    with suppress(Exception):
        entries = column.tolist() if getattr(column, "ndim", 0) == 1 else column
        return [xxh3_64_intdigest(_bytes(entry)) for entry in entries]
    return None


def _bytes(entry: Any) -> bytes:
    try:
        return bytes_of(entry)
    except AuditError:
        opened = fields_of(entry)
        return bytes_of([[name, repr(field)] for name, field in opened.items()]) if opened else pickle.dumps(entry)


def bytes_of(value: Any) -> bytes:
    """Bytes that are the same for the same value, and others for a value of another type or shape."""
    if value is None or (isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)):
        return b"v" + repr(value).encode()
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"b" + value
    if hasattr(value, "detach"):
        value = array_of(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.ndim and value.dtype != object:
            return f"a{value.dtype.str}{value.shape}".encode() + value.tobytes()
        return bytes_of(value.tolist())
    if isinstance(value, Mapping):
        return b"m" + b"".join(_framed(bytes_of(name)) + _framed(bytes_of(field)) for name, field in value.items())
    if isinstance(value, (list, tuple)):
        return b"l" + b"".join(_framed(bytes_of(entry)) for entry in value)
    raise AuditError(
        "the content of a sample cannot be hashed",
        expected="arrays, tensors, numbers, text, bytes, and lists and dicts of them",
        found=type(value).__name__,
        remedy="give key=: a field of ids, or a function of the batch that returns one for each sample",
    )


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _content(batch: Any) -> list[bytes]:
    """What each sample of a batch holds; of ragged columns without what they are padded with."""
    found = columns(batch)
    if not found:
        raise AuditError(
            "the samples of a batch cannot be told apart",
            expected="fields with an entry for each sample",
            found=_outline(batch),
            remedy="give key=: a field of ids, or a function of the batch that returns one for each sample",
        )
    parts = []
    for name, column in found.items():
        lengths = found.get(f"{name}_lengths")
        if lengths is not None and getattr(column, "ndim", 0) > 1 and max(lengths) <= column.shape[1]:
            column = [row[:length] for row, length in zip(column, lengths, strict=True)]
        parts.append([_framed(bytes_of(entry)) for entry in column])
    return [b"".join(row) for row in zip(*parts, strict=True)]


def _outline(batch: Any) -> str:
    fields = [f"{name!r} of {len(column)} rows" for name, column in columns(batch).items()]
    return f"{type(batch).__name__} with {listed(fields)}" if fields else type(batch).__name__
