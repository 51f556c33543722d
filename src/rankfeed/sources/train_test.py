"""A source split at random into parts for training and testing, the same wherever and whenever it is done.

Each sample's key is hashed to a number in [0, 2**64), and the parts are stretches of these numbers: where a sample
goes depends on its key and the seed alone, not on what other samples there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from rankfeed._util.validate import check_bool, check_float, check_int, check_str, invalid
from rankfeed.columns import Bytes, Column, Dense
from rankfeed.errors import ArgumentError, SourceError, safe_repr
from rankfeed.sources.reading import read_in_order
from rankfeed.sources.select import SelectSource, select
from rankfeed.sources.source import Int64, Source, check_columns

UInt64 = npt.NDArray[np.uint64]

#: The column that tells samples of tar shards apart.
_KEY = "__key__"
#: By how much fractions may miss 1 and still mean all samples.
_ROUNDING = 1e-9
#: Sample ids that are hashed in one go.
_CHUNK = 1 << 20


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
    """Split a source at random by its samples' keys.

    A sample stays on its side when data are appended, and is on the same side on every rank. Samples with equal
    keys go to the same side. Sides are near their fractions, not exactly: of n samples, a fraction f gets
    f n samples with a standard deviation of sqrt(f (1 - f) n).

    Args:
        source: what to split. Parts of an earlier split are split anew, also with the same seed.
        fractions: the test share, for (train, test); or fractions of up to 1 together for as many parts, by name
            if it is a dict. What is left over is in none of them.
        seed: another one, another split.
        key: the column that tells samples apart, of whole numbers, text or bytes: it alone is read. If left out,
            ``__key__`` where the source has it, and else the sample id, which nothing has to be read for but
            which is only stable where new samples come behind the old ones.
        progress: a bar on standard error while keys are read, if that is a terminal.

    Returns:
        the parts in the order of the fractions, each in the order of the source; a dict if fractions are one.

    Raises:
        ArgumentError: these are no fractions, or the key is no such column.
        SourceError: a part is empty, or the source cannot be read.

    Examples:
        >>> import rankfeed as rf
        >>> source = rf.from_dataset([{"x": number} for number in range(1000)])
        >>> train, test = train_test_split(source, 0.2, seed=1)
        >>> len(train) + len(test), 160 < len(test) < 240
        (1000, True)
    """
    if not isinstance(source, Source):
        raise invalid("source", "what rankfeed.open() or rankfeed.from_dataset() returned", source)
    progress = check_bool("progress", progress)
    names, shares = _shares(fractions)
    splits = getattr(source, "splits", 0)
    numbers = _numbers(source, _key_of(source, key), _salt(seed, splits), progress)
    part = _bounds(shares).searchsorted(numbers, side="right")
    sides = []
    for index, name in enumerate(names):
        ids = np.flatnonzero(part == index)
        if not len(ids):
            raise SourceError(
                f"part {name} of the split is empty",
                expected=f"about {shares[index]:.4g} of {len(source)} samples",
                found="none",
                remedy="take a larger fraction or another seed; samples with equal keys go to one side",
            )
        picked = select(source, ids)
        sides.append(SelectSource(picked.source, picked.picks, splits=splits + 1))
    return dict(zip(fractions, sides, strict=True)) if isinstance(fractions, Mapping) else tuple(sides)


def _shares(fractions: Any) -> tuple[list[str], list[float]]:
    """What the parts are called in errors, and their fractions."""
    if isinstance(fractions, np.ndarray):
        fractions = fractions.tolist()  # a number, where it has no dimension
    if isinstance(fractions, Mapping):
        names, shares = [repr(name) for name in fractions], list(fractions.values())
    elif isinstance(fractions, Sequence) and not isinstance(fractions, str | bytes):
        shares = list(fractions)
        names = [str(number) for number in range(len(shares))]
    else:
        test = check_float("fractions", fractions, above=0, below=1)
        names, shares = ["'train'", "'test'"], [1 - test, test]
    shares = [check_float("fractions", share, above=0, at_most=1) for share in shares]
    if not shares or math.fsum(shares) > 1 + _ROUNDING:
        raise ArgumentError(
            "fractions are of one whole", expected="fractions of up to 1 together", found=safe_repr(fractions)
        )
    return names, shares


def _bounds(shares: Sequence[float]) -> UInt64:
    """Where each part but the first begins, and where what is left over does, if there can be anything."""
    ends = [math.fsum(shares[: index + 1]) for index in range(len(shares))]
    whole = abs(ends[-1] - 1) <= _ROUNDING
    return np.array([min(int(end * 2.0**64), 2**64 - 1) for end in ends[: -1 if whole else None]], np.uint64)


def _key_of(source: Source, key: str | None) -> str | None:
    """The column that is the key, if any is.

    Raises:
        ArgumentError: there is no such column, or it cannot be a key.
    """
    if key is None and _KEY not in source.fields:
        return None
    (name,) = check_columns([_KEY if key is None else check_str("key", key)], source.fields)
    field = source.fields[name]
    whole = field.kind == "dense" and field.shape == () and np.dtype(field.dtype).kind in "biu"
    if field.kind not in ("str", "bytes") and not whole:
        raise ArgumentError(
            f"column {name!r} cannot be a key",
            expected="one whole number, text or byte string for each sample",
            found=str(field),
        )
    return name


def _salt(seed: Any, splits: int) -> int:
    seed = check_int("seed", seed)
    return xxhash.xxh3_64_intdigest(f"rankfeed split {seed} {splits}".encode())


def _numbers(source: Source, key: str | None, salt: int, progress: bool) -> UInt64:
    """Each sample's number: uint64."""
    numbers = np.empty(len(source), np.uint64)
    if key is not None:
        for ids, rows in read_in_order(source, [key], "reading keys", progress=progress):
            numbers[ids] = _hashed(rows[key], salt)
        return numbers
    origin: Callable[[Int64], Int64] = source.origin_ids if isinstance(source, SelectSource) else lambda ids: ids
    for first in range(0, len(source), _CHUNK):
        ids = np.arange(first, min(first + _CHUNK, len(source)), dtype=np.int64)
        numbers[ids] = _mixed(origin(ids).view(np.uint64), salt)
    return numbers


def _hashed(column: Column, salt: int) -> UInt64:
    """The numbers of some keys."""
    if isinstance(column, Bytes):  # text as UTF-8
        values, offsets = column.compact()
        view = values.data
        spans = pairwise(offsets.tolist())
        return np.array([xxhash.xxh3_64_intdigest(view[low:high], seed=salt) for low, high in spans], np.uint64)
    if not isinstance(column, Dense):
        raise SourceError("keys are of different lengths", found=str(column.field))
    values = column.gather()
    if values.dtype.kind != "u":  # the same number has the same hash, whatever its type
        values = values.astype(np.int64)
    return _mixed(values.astype(np.uint64), salt)


def _mixed(values: UInt64, salt: int) -> UInt64:
    """Keyed hashes of whole numbers: two rounds of the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    key = np.uint64(salt)
    for _ in range(2):
        values = (values + key) * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = values ^ (values >> np.uint64(31))
    return values
