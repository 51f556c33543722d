"""Keys of the samples of a batch: their ids, or a hash of their content.

A key is one or two words of 64 bits: a whole number is its own key; anything else has an XXH3 digest of 128 bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from rankfeed.errors import AuditError, listed

#: Of n samples, in the order of the batch: shape (n, 1) for whole numbers, (n, 2) for digests.
Words = npt.NDArray[np.uint64]
#: Where a batch has its ids: a field's name or place, or a function.
Key = str | int | Callable[[Any], Any]

_MOST = (1 << 63) - 1
#: The default key; batches need not have it.
USUAL = "sample_id"


def keys_of(batch: Any, key: Key = USUAL) -> tuple[Words, bool]:
    """Keys of a batch's samples, and whether they are digests of content because there are no ids."""
    values = ids_in(batch, key)
    if values is None:
        if key != USUAL:
            raise AuditError(
                f"a batch has no {key!r}", expected="the samples' ids", found=_outline(batch), remedy="key=..."
            )
        rows = list(_rows(batch))
        return _digests(rows), bool(rows)
    return words_of(values), False


def words_of(values: Any) -> Words:
    """Values as keys."""
    values = _plain(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        if len(values) and values.dtype.kind == "u" and values.max() > _MOST:
            raise _too_large(values.max())
        return values.astype(np.int64).view(np.uint64)[:, None]
    if isinstance(values, np.ndarray) and values.ndim:
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise AuditError("keys are one for each sample", expected="a sequence", found=type(values).__name__)
    values = [_plain(value) for value in values]
    if any(isinstance(value, np.ndarray) and value.ndim for value in values):
        raise AuditError(
            "these are fields of ids, and not ids",
            expected="one for each sample",
            found=_outline(values),
            remedy="key=lambda batch: ... that returns a list with one for each sample",
        )
    values = [value.item() if isinstance(value, (np.ndarray, np.generic)) else value for value in values]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        for value in values:
            if not -_MOST - 1 <= value <= _MOST:
                raise _too_large(value)
        return np.array(values, np.int64).view(np.uint64)[:, None]
    return _digests(bytes_of(value) for value in values)


def _too_large(value: int) -> AuditError:
    return AuditError(
        "an id is too large",
        expected=f"whole numbers up to {_MOST}",
        found=value,
        remedy="key=lambda batch: [str(each) for each in batch[...]]",
    )


def _plain(values: Any) -> Any:
    """A tensor as an array, an array of objects as lists."""
    if hasattr(values, "detach"):
        values = array_of(values)
    return values.tolist() if isinstance(values, np.ndarray) and values.dtype == object else values


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """A tensor's values, dense; where numpy has no such type, their bytes."""
    import torch

    tensor = tensor.detach().cpu()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    try:
        array: npt.NDArray[Any] = tensor.numpy()
    except TypeError:
        array = tensor.contiguous().view(torch.uint8).numpy()
    return array


def ids_in(batch: Any, key: Key) -> Any:
    """What a batch has where its ids should be; None if there is nothing."""
    if callable(key):
        return key(batch)
    if isinstance(batch, Mapping):
        return batch.get(key)
    if _is_samples(batch):
        within = [key in each if isinstance(each, Mapping) else _reaches(each, key) for each in batch]
        return [each[key] for each in batch] if all(within) else None
    if isinstance(key, int):
        return batch[key] if _reaches(batch, key) else None
    return getattr(batch, key, None)  # of an object, or a named tuple


def _is_samples(batch: Any) -> bool:
    """Whether it is a list of samples, which nothing has made a batch of."""
    if not isinstance(batch, list) or not batch:
        return False
    return all(isinstance(each, Mapping) for each in batch) or all(isinstance(each, tuple) for each in batch)


def _reaches(fields: Any, key: Any) -> bool:
    return isinstance(fields, (list, tuple)) and isinstance(key, int) and -len(fields) <= key < len(fields)


def _digests(rows: Iterable[bytes]) -> Words:
    together = b"".join(xxh3_128_digest(row) for row in rows)
    return np.frombuffer(together, np.uint64).reshape(-1, 2)


def bytes_of(value: Any) -> bytes:
    """Bytes that are the same for the same value, and others for a value of another type or shape."""
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"b" + value
    if hasattr(value, "detach"):
        value = array_of(value)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.ndim and array.dtype != object:
            return f"a{array.dtype.str}{array.shape}".encode() + array.tobytes()
        value = array.tolist()
        return bytes_of(value)
    if isinstance(value, Mapping):
        return b"m" + b"".join(_part(bytes_of(name)) + _part(bytes_of(each)) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return b"l" + b"".join(_part(bytes_of(each)) for each in value)
    if value is None or isinstance(value, (bool, int, float, complex)):
        return b"v" + repr(value).encode()
    raise AuditError(
        "the content of a sample cannot be hashed",
        expected="arrays, tensors, numbers, text, bytes, and lists and dicts of them",
        found=type(value).__name__,
        remedy="give key=: a field of ids, or a function of the batch that returns one for each sample",
    )


def _part(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _rows(batch: Any) -> Iterator[bytes]:
    """What each sample of a batch holds."""
    if _is_samples(batch):
        yield from map(bytes_of, batch)
        return
    fields = dict(_fields(batch))
    lengths = {len(values) for values in fields.values()}
    if len(lengths) != 1:
        raise AuditError(
            "the samples of a batch cannot be told apart",
            expected="fields with an entry for each sample",
            found=_outline(batch),
            remedy="give key=: a field of ids, or a function of the batch that returns one for each sample",
        )
    for row in range(lengths.pop()):
        parts = [_part(name.encode()) + _part(bytes_of(_entry(fields, name, row))) for name in fields]
        yield b"".join(parts)


def _fields(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Fields that have entries, by name; what is one for the whole batch is left out."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _fields(value, f"{name}/{key}")
    elif isinstance(batch, (list, tuple)) and any(_has_entries(each) for each in batch):
        for number, value in enumerate(batch):
            yield from _fields(value, f"{name}/{number}")
    elif _has_entries(batch) or isinstance(batch, (list, tuple)):
        yield name, batch


def _has_entries(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple)) or getattr(value, "ndim", 0) > 0


def _entry(fields: Mapping[str, Any], name: str, row: int) -> Any:
    """A sample's value; of a ragged column without what it is padded with."""
    column, lengths = fields[name], fields.get(f"{name}_lengths")
    if lengths is None or getattr(column, "ndim", 0) < 2 or int(max(lengths)) > column.shape[1]:
        return column[row]
    return column[row][: int(lengths[row])]


def _outline(batch: Any) -> str:
    """What a batch is, in a line."""
    if isinstance(batch, Mapping):
        return "a dict with " + listed([f"{key!r} ({_size(value)})" for key, value in batch.items()])
    if isinstance(batch, (list, tuple)):
        return f"a {type(batch).__name__} of " + listed([_size(value) for value in batch])
    return _size(batch)


def _size(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"shape {tuple(shape)}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
