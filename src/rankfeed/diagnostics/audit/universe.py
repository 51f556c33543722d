"""The samples that are expected in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rankfeed._util.validate import check_int, invalid
from rankfeed.diagnostics.keys import KeyArray, key_array
from rankfeed.errors import ArgumentError, AuditError

_CHUNK = 1 << 20


class Universe:
    """Declared ids, or a number n for 0 to n - 1 (``is_number``), or nothing (not ``known``)."""

    def __init__(self, given: Any) -> None:
        self.known, self.is_number = given is not None, False
        self._values: Any = given
        if given is None:
            self._values = []
        elif isinstance(given, (str, bytes)) or not getattr(given, "ndim", hasattr(given, "__iter__")):
            try:
                self._values = range(check_int("universe", given, at_least=1, at_most=2**62))
            except ArgumentError:
                raise invalid("universe", "a number of samples, or their ids", given) from None
            self.is_number = True
        elif not isinstance(given, (Sequence, np.ndarray)):
            self._values = list(given)
        self.size = len(self._values)
        #: Of their keys: "i" for whole numbers, "S" for digests, or empty.
        self.kind = key_array(self._values[:1]).dtype.kind if self.size else ""

    def chunks(self) -> Iterator[KeyArray]:
        """The keys."""
        for start in range(0, self.size, _CHUNK):
            keys = key_array(self._values[start : start + _CHUNK])
            if keys.dtype.kind != self.kind:
                raise AuditError("some of the declared ids are whole numbers and some are not", where="universe")
            yield keys

    def check(self, kind: str) -> None:
        """Raise AuditError unless delivered keys of this kind (empty: nothing was delivered) can be expected."""
        if self.kind and kind and self.kind != kind:
            raise AuditError(
                "the declared ids are of another kind than the delivered ones",
                expected="whole numbers" if kind == "i" else "no whole numbers",
                found=repr(self._values[0]),
                remedy="key= names the field that has them",
            )

    def names(self, keys: Sequence[Any]) -> tuple[str, ...]:
        """Keys for people."""
        names: dict[Any, str] = {}
        if keys and isinstance(keys[0], bytes) and self.kind == "S":
            for start, found in zip(range(0, self.size, _CHUNK), self.chunks(), strict=True):
                for hit in np.flatnonzero(np.isin(found, np.array(keys, found.dtype))).tolist():
                    names[found[hit]] = repr(self._values[start + hit])
        return tuple(
            names.get(key, f"content {key[:8].hex()}" if isinstance(key, bytes) else str(key)) for key in keys
        )
