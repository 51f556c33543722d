"""Random splits into training and test parts that depend on the samples' keys and a seed alone.

Each key is hashed to a number in [0, 2**64), and each part owns a range of these numbers, so the part of a sample
does not depend on the other samples.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from rankfeed._util.validate import check_bool, check_float, check_instance, check_int, check_str
from rankfeed.columns.columns import Bytes, Column, Dense
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.source import SelectSource, Source, SourceView, check_columns, indices_of, scan

UInt64 = npt.NDArray[np.uint64]

#: The key column of tar shards.
_KEY = "__key__"
#: Fractions whose sum differs from 1 by less cover all samples.
_ROUNDING = 1e-9
_IDS_AT_ONCE = 1 << 20


@overload
def train_test_split(
    source: Source, fractions: Mapping[str, float], seed: int = 0, *, key: str | None = None, progress: bool = True
) -> dict[str, SelectSource]: ...
@overload
def train_test_split(
    source: Source,
    fractions: float | Sequence[float],
    seed: int = 0,
    *,
    key: str | None = None,
    progress: bool = True,
) -> tuple[SelectSource, ...]: ...
def train_test_split(
    source: Source,
    fractions: float | Sequence[float] | Mapping[str, float],
    seed: int = 0,
    *,
    key: str | None = None,
    progress: bool = True,
) -> tuple[SelectSource, ...] | dict[str, SelectSource]:
    """Split a source at random by the samples' keys.

    A sample stays in its part when data are appended, and is in the same part on every rank. Samples with equal
    keys are in the same part. Part sizes are approximate: of n samples, a fraction f gets f n samples with a
    standard deviation of sqrt(f (1 - f) n).

    Args:
        source: what to split. Splitting a part of an earlier split again is independent of it, also with the same
            seed.
        fractions: the test share, for (train, test); or fractions with a sum of up to 1 for as many parts, by name
            if it is a dict. The rest is in no part.
        seed: selects the split.
        key: the column that identifies samples, of integers, text or bytes; only this column is read. If omitted,
            ``__key__`` if the source has it, otherwise the sample id, which needs no reading but is stable only if
            new samples follow the old ones.
        progress: show a progress bar on standard error while keys are read, if it is a terminal.

    Returns:
        the parts in the order of the fractions, each in the order of the source; a dict if fractions is one.

    Raises:
        ArgumentError: invalid fractions, or the key is not a suitable column.
        SourceError: a part is empty, or the source cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": number} for number in range(1000)])
        >>> train, test = train_test_split(source, 0.2, seed=1)
        >>> len(train) + len(test), 160 < len(test) < 240
        (1000, True)
    """
    check_instance("source", source, Source, "what rankfeed.open() or rankfeed.from_dataset() returned")
    progress = check_bool("progress", progress)
    names, shares = _check_fractions(fractions)
    splits = source.splits if isinstance(source, SourceView) else 0
    salt = xxhash.xxh3_64_intdigest(f"rankfeed split {check_int('seed', seed)} {splits}".encode())
    ends = [math.fsum(shares[: index + 1]) for index in range(len(shares))]
    if abs(ends[-1] - 1) <= _ROUNDING:
        ends.pop()  # otherwise the rest is in no part
    edges = np.array([min(int(end * 2.0**64), 2**64 - 1) for end in ends], np.uint64)
    part = edges.searchsorted(_hashes(source, _key_column(source, key), salt, progress), side="right")
    parts = []
    for index, name in enumerate(names):
        ids = np.flatnonzero(part == index)
        if not len(ids):
            raise SourceError(
                f"part {name} of the split is empty",
                expected=f"about {shares[index]:.4g} of {len(source)} samples",
                found="none",
                remedy="take a larger fraction or another seed; samples with equal keys are in the same part",
            )
        parts.append(SelectSource(source, indices_of(ids), splits + 1))
    return dict(zip(fractions, parts, strict=True)) if isinstance(fractions, Mapping) else tuple(parts)


def _check_fractions(fractions: Any) -> tuple[list[str], list[float]]:
    """Names of the parts for error messages, and their fractions."""
    if isinstance(fractions, np.ndarray):
        fractions = fractions.tolist()  # a number without dimensions
    if isinstance(fractions, Mapping):
        names, shares = [repr(name) for name in fractions], list(fractions.values())
    elif isinstance(fractions, Sequence) and not isinstance(fractions, str | bytes):
        names, shares = [str(index) for index in range(len(fractions))], list(fractions)
    else:
        test = check_float("fractions", fractions, above=0, below=1)
        names, shares = ["'train'", "'test'"], [1 - test, test]
    shares = [check_float("fractions", share, above=0, at_most=1) for share in shares]
    if not shares or math.fsum(shares) > 1 + _ROUNDING:
        raise ArgumentError(
            "the sum of fractions is larger than 1, or there are none",
            expected="fractions with a sum of up to 1",
            found=safe_repr(fractions),
        )
    return names, shares


def _key_column(source: Source, key: str | None) -> str | None:
    if key is None and _KEY not in source.fields:
        return None
    (name,) = check_columns([_KEY if key is None else check_str("key", key)], source.fields)
    field = source.fields[name]
    is_integer = field.kind == "dense" and field.shape == () and np.dtype(field.dtype).kind in "biu"
    if field.kind not in ("str", "bytes") and not is_integer:
        raise ArgumentError(
            f"column {name!r} cannot be a key",
            expected="one integer, text or byte string for each sample",
            found=str(field),
        )
    return name


def _hashes(source: Source, key: str | None, salt: int, progress: bool) -> UInt64:
    hashes = np.empty(len(source), np.uint64)
    if key is not None:
        for ids, rows in scan(source, [key], "reading keys", progress=progress):
            hashes[ids] = _hash_column(rows[key], salt)
        return hashes
    for first in range(0, len(source), _IDS_AT_ONCE):
        ids = np.arange(first, min(first + _IDS_AT_ONCE, len(source)), dtype=np.int64)
        origin = source.origin_ids(ids) if isinstance(source, SelectSource) else ids
        hashes[ids] = _hash_integers(origin.view(np.uint64), salt)
    return hashes


def _hash_column(column: Column, salt: int) -> UInt64:
    if isinstance(column, Bytes):  # text as UTF-8
        values, offsets = column.compact()
        view = values.data
        spans = pairwise(offsets.tolist())
        return np.array([xxhash.xxh3_64_intdigest(view[low:high], seed=salt) for low, high in spans], np.uint64)
    if not isinstance(column, Dense):
        raise SourceError("keys are of different lengths", found=str(column.field))
    # The hash depends on the number, not on its type: negative ones of any width become the same integer.
    return _hash_integers(column.gather().astype(np.uint64), salt)


def _hash_integers(values: UInt64, salt: int) -> UInt64:
    """Keyed hashes: two rounds of the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    key = np.uint64(salt)
    for _ in range(2):
        values = (values + key) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = values ^ (values >> np.uint64(31))
    return values
