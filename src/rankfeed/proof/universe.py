"""The samples that should come, if anybody said which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np

from rankfeed.errors import ArgumentError, AuditError
from rankfeed.proof.counting import distinct, is_in
from rankfeed.proof.keys import Words, words_of

_CHUNK = 1 << 20


class Universe:
    """Ids, or a number n for 0 to n - 1, or nothing.

    Args:
        given: which.
        width: words of a key of what came.

    Raises:
        ArgumentError: a number below 1.
    """

    def __init__(self, given: Any, width: int) -> None:
        self.given, self.width = given, width
        self.known = given is not None
        if isinstance(given, int):
            if given < 1:
                raise ArgumentError("universe is a number of samples, or their ids", found=given)
            self.size = given
        elif self.known:
            self.given = given if isinstance(given, Sized) else list(given)
            self.size = len(self.given)
        else:
            self.size = 0

    def chunks(self) -> Iterator[Words]:
        """Their keys.

        Raises:
            AuditError: they are no whole numbers and those that came are, or the other way round.
        """
        for values in self._values():
            words = words_of(values)
            if len(words) and words.shape[1] != self.width:
                raise AuditError(
                    "the ids of the declared samples are of another kind than those that came",
                    expected="whole numbers" if self.width == 1 else "no whole numbers",
                    found=repr(values[0]),
                    remedy="key= names the field that has them",
                )
            yield words

    def _values(self) -> Iterator[Any]:
        if isinstance(self.given, int):
            for start in range(0, self.given, _CHUNK):
                yield np.arange(start, min(start + _CHUNK, self.given))
        elif isinstance(self.given, (Sequence, np.ndarray)):
            yield from (self.given[start : start + _CHUNK] for start in range(0, self.size, _CHUNK))
        elif self.known:
            yield list(self.given)

    def names(self, keys: Words) -> tuple[str, ...]:
        """Keys as people know them."""
        if self.width == 1:
            return tuple(map(str, keys[:, 0].view(np.int64).tolist()))
        wanted, _ = distinct(keys)
        names: dict[tuple[int, ...], str] = {}
        for values in self._values() if len(keys) else ():
            words = words_of(values)
            names |= {
                tuple(words[hit].tolist()): repr(values[hit]) for hit in np.flatnonzero(is_in(words, wanted))
            }
        return tuple(names.get(tuple(key), f"content {key[0]:016x}") for key in keys.tolist())
