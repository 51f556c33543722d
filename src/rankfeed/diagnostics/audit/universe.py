"""The samples that should come, if anybody said which."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np

from rankfeed._util.validate import check_int, invalid
from rankfeed.diagnostics.audit.counting import distinct, is_in
from rankfeed.diagnostics.keys import Words, words_of
from rankfeed.errors import ArgumentError, AuditError

_CHUNK = 1 << 20


class Universe:
    """Ids, or a number n for 0 to n - 1, or nothing.

    Args:
        given: which.

    Raises:
        ArgumentError: a number below 1, or nothing that can be meant.
    """

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
        #: Words of a key; 0 where there are none.
        self.width = words_of(first).shape[1] if len(first) else 0

    def chunks(self) -> Iterator[Words]:
        """Their keys.

        Raises:
            AuditError: they are no whole numbers and those that came are, or the other way round.
        """
        for values in self._values():
            words = words_of(values)
            if len(words) and words.shape[1] != self.width:
                raise AuditError("some of the declared ids are whole numbers and some are not", where="universe")
            yield words

    def check(self, width: int) -> None:
        """Raise AuditError unless the keys of what came, of so many words (0: nothing came), are of this kind."""
        if self.width and width and self.width != width:
            raise AuditError(
                "the ids of the declared samples are of another kind than those that came",
                expected="whole numbers" if width == 1 else "no whole numbers",
                found=repr(next(self._values())[0]),
                remedy="key= names the field that has them",
            )

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
        if keys.shape[1] == 1:
            return tuple(map(str, keys[:, 0].view(np.int64).tolist()))
        wanted, _ = distinct(keys)
        names: dict[tuple[int, ...], str] = {}
        for values in self._values() if len(keys) else ():
            words = words_of(values)
            names |= {
                tuple(words[hit].tolist()): repr(values[hit]) for hit in np.flatnonzero(is_in(words, wanted))
            }
        return tuple(names.get(tuple(key), f"content {key[0]:016x}") for key in keys.tolist())


def _number(given: Any) -> int:
    try:
        return check_int("universe", given, at_least=1, at_most=2**62)
    except ArgumentError:
        raise invalid("universe", "a number of samples, or their ids", given) from None
