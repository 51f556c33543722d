"""What Hugging Face `datasets` says about columns, beyond their Arrow types: arrays, images, recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankfeed.errors import CorruptError
from rankfeed.sources.arrow.types import ArrayShape

#: Features that are stored as a struct of the bytes of a file and its name.
_FILES = ("Image", "Audio", "Video", "Pdf", "Mesh", "Nifti")
_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")


@dataclass(frozen=True)
class Features:
    """What to do with columns.

    Args:
        shapes: of arrays; None where a dimension varies.
        files: columns of encoded files, of which the bytes are taken.
    """

    shapes: Mapping[str, ArrayShape]
    files: frozenset[str]

    def named(self, stored: str) -> str | None:
        """The name of a column by that of what is stored; None for one that is left out: a file's name.

        Examples:
            >>> features = Features({}, frozenset({"image"}))
            >>> features.named("image.bytes"), features.named("image.path"), features.named("label")
            ('image', None, 'label')
        """
        outer, _, inner = stored.rpartition(".")
        if outer not in self.files:
            return stored
        return {"bytes": outer, "bytes_valid": f"{outer}_valid"}.get(inner)


def read_features(features: Mapping[str, Any] | None, where: str) -> Features:
    """Read the description of columns that `datasets` keeps.

    Args:
        features: for each column a dict with ``_type``, or a dict or list of such; anything may be in it.
        where: it comes from, for errors.

    Raises:
        CorruptError: an array has no proper shape.
    """
    shapes: dict[str, ArrayShape] = {}
    files: set[str] = set()
    for name, feature in (features or {}).items():
        kind = feature.get("_type") if isinstance(feature, Mapping) else None
        if kind in _FILES:
            files.add(name)
        elif kind in _ARRAYS:
            shape = feature.get("shape")
            good = isinstance(shape, (list, tuple)) and len(shape) == int(kind[5])
            if not good or not all(each is None or (type(each) is int and each >= 0) for each in shape):
                raise CorruptError(
                    "an array has no proper shape", found=repr(shape)[:80], where=f"{where}, column {name!r}"
                )
            shapes[name] = tuple(shape)
    return Features(shapes, frozenset(files))
