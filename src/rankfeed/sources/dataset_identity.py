"""Identifies the data of a torch Dataset, by the files that it names and the content of some samples.

No code of the Dataset but ``__len__`` is called for the names: only attributes of instances are looked at, those
of datasets that it wraps (``torch.utils.data.Subset``, ``ConcatDataset``) included. Content is compared where the
names do not tell which samples there are.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from rankfeed._util.signals import reraise_interrupt
from rankfeed.columns.layout import is_tensor
from rankfeed.errors import SourceError
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.data_files import SAMPLED_FILES, DataFiles, split_paths

#: Attributes by which a Dataset declares its fingerprint.
OWN = ("fingerprint", "_fingerprint")
#: Attributes that list what a Dataset reads (the first two are torchvision's), wrap another, or select from it.
_LISTS, _WRAPPED, _SELECTED = ("samples", "imgs", "paths", "files"), ("dataset", "datasets"), "indices"
#: Attributes that list labels beside names, and those that follow from names.
_LABELS = ("targets", "labels")
_DERIVED = ("classes", "class_to_idx", "extensions", "cumulative_sizes")
#: Packages whose tables may contain samples.
_TABLES = ("pandas", "polars", "pyarrow")
#: Entries of a list that are compared: all, or this number of evenly spaced ones.
_MOST_ENTRIES = 1 << 20
_CHUNK = 1 << 14
_MAX_DEPTH = 8
#: What may accompany a name in an entry.
_PLAIN = {str, int, float, bool}


class DatasetNames:
    """The names that a Dataset and those within it list, with labels, chosen indices and samples of the files.

    Names are relative to their common folder. Of at most 64 evenly spaced ones, if all are files, the size and 4
    KiB at the start, middle and end are part of the digest.
    """

    def __init__(self, dataset: Any) -> None:
        self._pieces: list[bytes] = []
        self._has_names = False
        #: Whether nothing else in Datasets may choose or contain samples: no Dataset without names, and no list
        #: with an entry for each sample that is not part of the digest.
        self.are_complete = True
        self._add(dataset, 0)
        self.digest = digest_of(*self._pieces) if self._has_names else None
        self._pieces.clear()

    def _add(self, dataset: Any, depth: int) -> None:
        attributes: Any = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict) or depth > _MAX_DEPTH:
            self.are_complete = False
            return
        for declared in [attributes.get(name) for name in OWN] if depth else []:
            if isinstance(declared, str) and declared:
                self._has_names = True
                self._pieces.append(declared.encode())
                return
        seen: list[Any] = []
        added = {*_DERIVED}
        for name in _LISTS:
            entries = attributes.get(name)
            if any(entries is other for other in seen):
                added.add(name)
            elif isinstance(entries, (list, tuple)) and entries and (digest := self._digest_of_entries(entries)):
                self._has_names = True
                self._pieces.append(digest.encode())
                seen.append(entries)
                added.add(name)
        for name in _LABELS:
            labels: Any = attributes.get(name)
            if _is_list(labels) and len(labels):
                self._pieces.append(self._digest_of_values([labels[place] for place in _places(len(labels))]))
                added.add(name)
        indices: Any = attributes.get(_SELECTED)
        if _is_list(indices) and len(indices):
            chosen = np.asarray([indices[place] for place in _places(len(indices))])
            if chosen.dtype.kind in "iu":
                self._pieces.append(str(len(indices)).encode() + chosen.astype(np.int64).tobytes())
                added.add(_SELECTED)
        wrapped = [attributes[name] for name in _WRAPPED if attributes.get(name) is not None]
        for value in wrapped:
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                self._add(inner, depth + 1)
        if not (seen or wrapped) or any(
            _may_choose(value, dataset) for name, value in attributes.items() if name not in {*added, *_WRAPPED}
        ):
            self.are_complete = False

    def _digest_of_entries(self, entries: Sequence[Any]) -> str | None:
        """Digest of names, or of tuples that begin with a name, such as (path, label); None for other entries."""
        places = _places(len(entries))
        names: list[str] = []
        state = xxhash.xxh3_128(str(len(entries)).encode())
        try:
            for start in range(0, len(places), _CHUNK):
                chunk = [entries[place] for place in places[start : start + _CHUNK]]
                first, *others = zip(*chunk, strict=True) if isinstance(chunk[0], (tuple, list)) else [chunk]
                names += map(os.fspath, first)
                for column in others:
                    state.update(self._digest_of_values(column))
            root, _ = split_paths([min(names), max(names)])
            for start in range(0, len(names), _CHUNK):
                relative = [name[len(root) :] for name in names[start : start + _CHUNK]]
                state.update("\0".join(relative).encode(errors="surrogateescape"))
        except (TypeError, ValueError):
            return None
        sampled = [
            names[place] for place in np.linspace(0, len(names) - 1, min(len(names), SAMPLED_FILES)).astype(int)
        ]
        if all(map(os.path.isfile, sampled)):
            with suppress(SourceError):  # a file may not be read
                relative = [name[len(root) :] for name in sampled]
                files = DataFiles(list(map(os.path.abspath, sampled)), relative)
                state.update(files.fingerprint.encode())
        return state.hexdigest()

    def _digest_of_values(self, values: Sequence[Any]) -> bytes:
        """Digest of labels; of objects other than numbers and text, only the types are known."""
        if not _PLAIN.issuperset(map(type, values)):
            plain = [value.item() if getattr(value, "shape", None) == () else value for value in values]
            values = [value if type(value) in _PLAIN else type(value).__name__ for value in plain]
            self.are_complete &= _PLAIN.issuperset(map(type, plain))
        return digest_of(repr(values).encode(errors="surrogateescape")).encode()


def _may_choose(value: Any, dataset: Any) -> bool:
    """Whether an attribute may choose or contain samples: another Dataset, or an entry for each sample."""
    if any(kind.__module__.startswith("torch.utils.data") for kind in type(value).__mro__):
        return True
    is_table = type(value).__module__.partition(".")[0] in _TABLES
    if not (_is_list(value) or isinstance(value, dict) or is_table):
        return False
    try:
        return 0 < len(value) >= len(dataset)
    except Exception as error:  # of the user's __len__
        reraise_interrupt(error)
        return True


def _is_list(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray) or is_tensor(value)
    return value.ndim > 0 if is_array else isinstance(value, (list, tuple, range))


def _places(size: int) -> Sequence[int]:
    """All places of a list, or evenly spaced ones."""
    if size <= _MOST_ENTRIES:
        return range(size)
    places: list[int] = (np.arange(_MOST_ENTRIES) * (size - 1) // (_MOST_ENTRIES - 1)).tolist()
    return places


def digest_of_content(read: Callable[[], Sequence[Any]]) -> str:
    """Digest of some samples, if two reads of them agree and draw no random numbers; "" if it is not known."""
    from rankfeed._util.global_rng import preserve_rng_state, rng_states  # imports torch

    with preserve_rng_state():
        before = rng_states()
        try:
            digests = [digest_of(*_content(read(), 0)) for _ in range(2)]
        except (SourceError, TypeError):
            return ""
        return digests[0] if digests[0] == digests[1] and rng_states() == before else ""


def _content(value: Any, depth: int) -> Iterator[bytes]:
    """The content of a value, the same in any process and at any mount point; a TypeError for other objects."""
    if depth > _MAX_DEPTH:
        raise TypeError("nested too deeply")
    kind = type(value)
    yield kind.__name__.encode()
    if value is None or kind in (bool, int, float, complex):
        yield repr(value).encode()
    elif isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        yield (os.path.basename(text) if os.path.isabs(text) else text).encode(errors="surrogateescape")
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _content(key, depth + 1)
            yield from _content(entry, depth + 1)
        yield b"end"
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _content(entry, depth + 1)
        yield b"end"
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"{value.dtype.str} {value.shape}".encode()
        yield value.tobytes()
    elif is_tensor(value):
        import torch

        content = value.detach().cpu().contiguous().reshape(-1)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield content.view(torch.uint8).numpy().tobytes()
    elif kind.__module__.startswith("PIL."):  # an image that is not converted yet
        yield f"{value.mode} {value.size}".encode()
        yield value.tobytes()
    else:
        raise TypeError(kind.__name__)
