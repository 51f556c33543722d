"""What a column holds, whatever rows are in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["dense", "ragged", "bytes", "str", "object"]


@dataclass(frozen=True)
class Field:
    """The type of a column.

    Args:
        kind: "dense" (every row has the same shape; a scalar has shape ()), "ragged" (rows differ in their first
            dimension), "bytes", "str", or "object" (whatever a wrapped Dataset returns).
        dtype: numpy's name of the elements' type; empty for bytes, str and object.
        shape: of a row; for a ragged field, of an element along its first dimension.

    Examples:
        >>> Field("ragged", "float32", (64,)).row_bytes(elements=10)
        2560
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def row_bytes(self, elements: int = 1) -> int:
        """Bytes of a row (of a ragged one with that many elements)."""
        if self.kind in ("dense", "ragged"):
            size = int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))
            return size * (elements if self.kind == "ragged" else 1)
        return elements

    def __str__(self) -> str:
        dims = [*(["*"] if self.kind == "ragged" else []), *map(str, self.shape)]
        return f"{self.dtype or self.kind}[{', '.join(dims)}]" if dims else (self.dtype or self.kind)
