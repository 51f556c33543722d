"""The samples that are expected in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np

from rankfeed._util.validate import check_int, invalid
from rankfeed.diagnostics.keys import Words, words_of
from rankfeed.diagnostics.multiset import distinct, is_in
from rankfeed.errors import ArgumentError, AuditError

_CHUNK = 1 << 20


class Universe:
    """Declared ids, or a number n for 0 to n - 1, or nothing."""

    def __init__(self, given: Any) -> None:
        self.known, self.given = given is not None, given
        if self.known and (
            isinstance(given, (str, bytes)) or not getattr(given, "ndim", hasattr(given, "__iter__"))
        ):
            self.given = _number(given)
        elif self.known and not isinstance(given, Sized):
            self.given = list(given)
        self.size = 0 if given is None else self.given if isinstance(self.given, int) else len(self.given)
        first = next(self._values(), ())
        #: Words of a key; 0 if there are none.
        self.width = words_of(first).shape[1] if len(first) else 0

    @property
    def is_number(self) -> bool:
        """Whether only the number of samples was declared."""
        return isinstance(self.given, int)

    def chunks(self) -> Iterator[Words]:
        """The keys."""
        for values in self._values():
            words = words_of(values)
            if len(words) and words.shape[1] != self.width:
                raise AuditError("some of the declared ids are whole numbers and some are not", where="universe")
            yield words

    def check(self, width: int) -> None:
        """Raise AuditError unless delivered keys of this width (0: nothing was delivered) are of this kind."""
        if self.width and width and self.width != width:
            raise AuditError(
                "the declared ids are of another kind than the delivered ones",
                expected="whole numbers" if width == 1 else "no whole numbers",
                found=repr(next(self._values())[0]),
                remedy="key= names the field that has them",
            )

    def names(self, keys: Words) -> tuple[str, ...]:
        """Keys for people."""
        if keys.shape[1] == 1:
            return tuple(map(str, keys[:, 0].view(np.int64).tolist()))
        wanted, _ = distinct(keys)
        names: dict[tuple[int, ...], str] = {}
        for values in self._values() if len(keys) and not self.is_number else ():
            words = words_of(values)
            names |= {
                tuple(words[hit].tolist()): repr(values[hit]) for hit in np.flatnonzero(is_in(words, wanted))
            }
        return tuple(names.get(tuple(key), f"content {key[0]:016x}") for key in keys.tolist())

    def _values(self) -> Iterator[Any]:
        if isinstance(self.given, int):
            for start in range(0, self.given, _CHUNK):
                yield np.arange(start, min(start + _CHUNK, self.given))
        elif isinstance(self.given, (Sequence, np.ndarray)):
            yield from (self.given[start : start + _CHUNK] for start in range(0, self.size, _CHUNK))
        elif self.known:
            yield list(self.given)


def _number(given: Any) -> int:
    try:
        return check_int("universe", given, at_least=1, at_most=2**62)
    except ArgumentError:
        raise invalid("universe", "a number of samples, or their ids", given) from None
