"""The type of a column, ``Field``: dtype and shape, of which the first dimension may vary between rows."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rankfeed.errors import ArgumentError

#: "float32[*, 64]": a dtype, and dimensions of which the first may be "*".
_SPEC = re.compile(r"(?P<dtype>[a-z]+\d*)(\[(?P<dims>(\*|\d+)(, *\d+)*)\])?")

Kind = Literal["dense", "ragged", "bytes", "str", "object"]


@dataclass(frozen=True)
class Field:
    """The type of a column.

    Args:
        kind: "dense" (all rows have one shape; that of a scalar is ()), "ragged" (rows differ in their first
            dimension), "bytes", "str", or "object" (any Python objects).
        dtype: numpy's name of the element type; empty for bytes, str and object.
        shape: of a row; for a ragged field, of an element along its first dimension.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: str | Field) -> Field:
        """A field from its text, as ``str(field)`` and `rankfeed inspect` write it.

        Args:
            spec: "str", "bytes", "object", or numpy's name of a dtype with the shape of a row: "int64",
                "float32[3, 32, 32]"; "*" for a first dimension that differs: "float32[*, 64]".

        Raises:
            ArgumentError: an invalid text.

        Examples:
            >>> Field.of("float32[*, 64]")
            Field(kind='ragged', dtype='float32', shape=(64,))
        """
        if isinstance(spec, Field):
            return spec
        if spec in ("bytes", "str", "object"):
            return cls(spec)  # type: ignore[arg-type]
        given: object = spec
        match = _SPEC.fullmatch(given) if isinstance(given, str) else None
        dtype = np.dtype(object)
        with suppress(TypeError):
            dtype = np.dtype(match["dtype"] if match else object)
        if match is None or dtype.kind not in "biufc" or dtype.itemsize > 8 << (dtype.kind == "c"):
            raise ArgumentError(
                "invalid type of a field",
                expected='"int64", "float32[3, 32]", "float32[*, 64]" (a first dimension that differs), "str"',
                found=repr(spec),
            )
        dims = [dim.strip() for dim in (match["dims"] or "").split(",") if dim.strip()]
        ragged = dims[:1] == ["*"]
        return cls("ragged" if ragged else "dense", dtype.name, tuple(map(int, dims[ragged:])))

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is a row."""
        if self.kind == "ragged":
            return len(shape) > 0 and shape[1:] == self.shape
        return self.kind == "object" or shape == self.shape

    def row_bytes(self) -> int:
        """Bytes of a row; if rows differ in length, of an element."""
        if self.kind not in ("dense", "ragged"):
            return 1
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        dims = [*(["*"] if self.kind == "ragged" else []), *map(str, self.shape)]
        return f"{self.dtype or self.kind}[{', '.join(dims)}]" if dims else (self.dtype or self.kind)
