"""A keyed bijection of [0, n), from which ``plan.py`` makes the order of an epoch.

A Feistel network is a permutation for any round function, because each round adds to one half a function of the
other half, which can be subtracted again. The halves of an index are a digit in base ``a`` (even, added modulo
``a``) and a digit of ``k`` bits (added by xor), with ``a * 2**k`` just above ``n``. Indices of n or more go
through the network again until they are below n ("cycle walking"), which keeps it a bijection of [0, n) for every
n at little cost: there are at most about ``2 * sqrt(n)`` of them.

Sources: J. Black and P. Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), for mixed radix and cycle
walking; the round function is the multiply-xorshift-multiply of S. Vigna's SplitMix64; its upper bits are
brought into range by multiplying instead of dividing (D. Lemire, "Fast random integer generation in an
interval", 2019).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rankfeed._util.native import address_of, address_or_zero, native_library

UInt64 = npt.NDArray[np.uint64]

# 0-d arrays: numpy converts Python and numpy scalars more slowly, which shows in batches of 256.
_M1 = np.array(0xBF58476D1CE4E5B9, np.uint64)
_M2 = np.array(0x94D049BB133111EB, np.uint64)
_GOLDEN = np.array(0x9E3779B97F4A7C15, np.uint64)
_30, _27, _31, _32 = (np.array(bits, np.uint64) for bits in (30, 27, 31, 32))

#: Indices per pass in numpy: work arrays of this length stay in the cache of a core.
CHUNK = 4096

#: Pairs of rounds (one per half) by minimum domain size: a small domain has few bits to mix, so that it needs more
#: rounds until all n! orders are equally likely (measured in tests/plan/test_permutation.py).
_ROUNDS = ((2**16, 3), (2**10, 4), (2**6, 6), (0, 12))

MAX_SIZE = 2**62


@dataclass(frozen=True)
class Key:
    """Round keys for :func:`permutation`, hashed from strings and integers; unrelated if any part differs."""

    rounds: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)  # the same key for all batches of an epoch
    def of(cls, *parts: str | int) -> Key:
        # repr is injective: different parts have different texts.
        digest = hashlib.shake_128(repr(parts).encode()).digest(8 * 2 * _ROUNDS[-1][1])
        return cls(tuple(int(word) for word in np.frombuffer(digest, "<u8")))


def permutation(
    indices: npt.ArrayLike, n: int, key: Key, *, tweaks: UInt64 | None = None, sizes: UInt64 | None = None
) -> npt.NDArray[np.int64]:
    """The image of each index under the keyed permutation of [0, n), n at most 2**62; for `sizes`, of [0, size).

    ``tweaks`` are a further key per index: many small permutations in one call. Sizes much smaller than ``n`` are
    slow: cycle walking takes about ``n / size`` passes.
    """
    # A copy, permuted in place.
    values = np.array(indices, dtype=np.uint64, order="C")
    if n > 1:
        tweaks, sizes = (
            None if array is None else np.ascontiguousarray(array).reshape(-1) for array in (tweaks, sizes)
        )
        _network(n, key).permute(values.reshape(-1), tweaks, sizes)
    return values.view(np.int64)


def mix(values: UInt64) -> UInt64:
    """The finaliser of SplitMix64: a bijection of 64-bit values that mixes all bits."""
    mixed = values + _GOLDEN
    mixed ^= mixed >> _30
    mixed *= _M1
    mixed ^= mixed >> _27
    mixed *= _M2
    mixed ^= mixed >> _31
    return mixed


def mix_one(value: int) -> int:
    """:func:`mix` of one value, without an array."""
    mixed = (value + int(_GOLDEN)) % 2**64
    mixed = (mixed ^ mixed >> 30) * int(_M1) % 2**64
    mixed = (mixed ^ mixed >> 27) * int(_M2) % 2**64
    return mixed ^ mixed >> 31


def _radices(n: int) -> tuple[int, int]:
    """Bits of the low digit and base of the high one, of nearly the same size."""
    # A low digit with few values would keep neighbours together: a round moves all indices that share it alike.
    # In a small domain the base is even: an odd one reaches even permutations only.
    low_bits = (n - 1).bit_length() // 2
    even = 2 if n < 2**10 else 1
    return low_bits, even * -(-n // (even << low_bits))


class _Network:
    """The Feistel network of one domain and key."""

    def __init__(self, n: int, key: Key) -> None:
        low_bits, base = _radices(n)
        rounds = 2 * next(pairs for at_least, pairs in _ROUNDS if n >= at_least)
        self.size, self.keys = np.array(n, np.uint64), np.array(key.rounds[:rounds], np.uint64)
        #: As the native function takes them.
        self.arguments = n, address_of(self.keys), rounds, base, low_bits
        self.base = np.array(base, np.uint64)
        self.low_bits = np.array(low_bits, np.uint64)
        self.low_mask = np.array((1 << low_bits) - 1, np.uint64)
        self.low_shift = np.array(64 - low_bits, np.uint64) if low_bits else None
        self.has_overhang = (base << low_bits) > n

    def permute(self, values: UInt64, tweaks: UInt64 | None, sizes: UInt64 | None) -> None:
        """Permute ``values`` in place, repeatedly if the result is not below its size; all are contiguous."""
        if (library := native_library()) is not None:
            addresses = address_of(values), len(values), address_or_zero(tweaks), address_or_zero(sizes)
            library.rankfeed_permute(*addresses, *self.arguments)
            return
        for start in range(0, len(values), CHUNK):
            part = slice(start, start + CHUNK)
            self._walk(
                values[part], None if tweaks is None else tweaks[part], self.size if sizes is None else sizes[part]
            )

    def _walk(self, values: UInt64, tweaks: UInt64 | None, sizes: UInt64) -> None:
        self._pass(values, tweaks)
        if not self.has_overhang and sizes.ndim == 0:
            return
        outside = np.flatnonzero(values >= sizes)
        while outside.size:
            again = values[outside]
            self._pass(again, None if tweaks is None else tweaks[outside])
            values[outside] = again
            limit = sizes if sizes.ndim == 0 else sizes[outside]
            outside = outside[again >= limit]

    def _pass(self, values: UInt64, tweaks: UInt64 | None) -> None:
        high = values >> self.low_bits
        low = values & self.low_mask
        hashed = np.empty_like(values)
        scratch = np.empty_like(values)
        for index in range(0, len(self.keys), 2):
            self._hash(low, self.keys[index], tweaks, hashed, scratch)
            np.right_shift(hashed, _32, out=hashed)
            np.multiply(hashed, self.base, out=hashed)
            np.right_shift(hashed, _32, out=hashed)
            np.add(high, hashed, out=high)
            # high - base wraps to a huge number where high < base, so the smaller of both is high modulo base.
            np.subtract(high, self.base, out=hashed)
            np.minimum(high, hashed, out=high)
            if self.low_shift is not None:
                self._hash(high, self.keys[index + 1], tweaks, hashed, scratch)
                np.right_shift(hashed, self.low_shift, out=hashed)
                np.bitwise_xor(low, hashed, out=low)
        np.left_shift(high, self.low_bits, out=high)
        np.bitwise_or(high, low, out=values)

    @staticmethod
    def _hash(half: UInt64, key: UInt64, tweaks: UInt64 | None, out: UInt64, scratch: UInt64) -> None:
        if tweaks is None:
            np.bitwise_xor(half, key, out=out)
        else:
            np.bitwise_xor(half, tweaks, out=out)
            np.add(out, key, out=out)
        np.multiply(out, _M1, out=out)
        np.right_shift(out, _32, out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, _M2, out=out)


_network = lru_cache(maxsize=64)(_Network)
