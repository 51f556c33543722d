"""Whether samples are the same, to the last bit and type; and the same said by a digest that travels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Sample = Mapping[str, Any]


def canonical(value: Any) -> Any:
    """A value as texts and lists that are equal only if type, shape and bits are."""
    if isinstance(value, (str, bytes)):
        return repr(value)
    if hasattr(value, "to_dict") and not hasattr(value, "dtype"):  # a graph
        return canonical(value.to_dict())
    if isinstance(value, Mapping):
        return [[name, canonical(value[name])] for name in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    array = np.asarray(value)
    if array.dtype == object:
        if array.ndim == 0:
            return repr(value)
        return [str(array.shape), *map(canonical, array.reshape(-1).tolist())]
    return [array.dtype.name, str(array.shape), array.tobytes().hex()]


def digest(sample: Any) -> str:
    """A short text that is the same only for the same sample."""
    return hashlib.sha256(repr(canonical(sample)).encode()).hexdigest()[:16]


def digests(samples: Sequence[Any]) -> list[str]:
    return [digest(sample) for sample in samples]


def difference(result: Any, expected: Any) -> str | None:
    """What differs between two samples, or None."""
    if digest(result) == digest(expected):
        return None
    if not isinstance(result, Mapping) or not isinstance(expected, Mapping) or result.keys() != expected.keys():
        return f"{_short(result)} instead of {_short(expected)}"
    return "; ".join(
        f"{name!r} is {_short(result[name])} instead of {_short(expected[name])}"
        for name in expected
        if canonical(result[name]) != canonical(expected[name])
    )


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(str, value))}"
    kind = f"{value.dtype}{list(value.shape)} " if hasattr(value, "dtype") else f"{type(value).__name__} "
    return kind + repr(value).replace("\n", "")[:120]


def unbatched(batch: Mapping[str, Any], id_column: str = "id") -> dict[int, dict[str, Any]]:
    """The samples of a batch by their ids: padding taken away, the loader's own columns too."""
    ids = batch[id_column].tolist()
    lengths = {name: batch[f"{name}_lengths"] for name in batch if f"{name}_lengths" in batch}
    added = {id_column, *(f"{name}_lengths" for name in lengths)}
    samples: dict[int, dict[str, Any]] = {}
    for row, sample_id in enumerate(ids):
        samples[sample_id] = {
            name: value[row][: int(lengths[name][row])] if name in lengths else value[row]
            for name, value in batch.items()
            if name not in added
        }
    return samples
