"""PyTorch Geometric's data sets, downloaded and processed once however many processes want them.

Their own ``download()`` and ``process()`` run untouched, in one process and in a folder of its own; everybody
opens what came of it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rankfeed.building import prepare_once
from rankfeed.building.prepared import MARKER_NAME
from rankfeed.errors import ArgumentError
from rankfeed.storage import digest_of

T = TypeVar("T")

#: What a data set makes itself: never taken from a root that others filled, where it may be half of it.
_MADE = "processed"
#: Arguments that do not change what is processed.
_LATER = ("transform", "force_reload", "log")


def prepare(
    dataset: Callable[..., T],
    root: str | os.PathLike[str],
    *arguments: Any,
    key: str = "",
    retries: int = 0,
    timeout: float | None = None,
    comm: Any = None,
    **options: Any,
) -> T:
    """A PyG data set, downloaded and processed by one process, opened in every one that calls.

    It lies in a folder of its own under ``root``, named after the class and its arguments. Raw files that lie
    under ``root`` already are copied into it, stay as they are, and are looked at for changes; processed ones are
    not, since nobody can say whether they are whole. A build that was killed, a half download
    and a file that was cut afterwards are built anew.

    Args:
        dataset: the class; called as ``dataset(root, *arguments, **options)``.
        root: folder for data sets.
        *arguments: as for the class. What they are decides, by their ``repr``, whether what was processed still
            fits; of functions it is their name.
        key: what else decides: a version of your ``process()``, say.
        retries: how often a failing build is tried again.
        timeout: seconds to wait for another process that builds.
        comm: an mpi4py communicator, as for `prepare_once`.
        **options: as for the class, like ``arguments``.

    Raises:
        PrepareError: downloading or processing failed, on every rank alike.
        ArgumentError: this is no class with a root.

    Examples:
        >>> import tempfile, torch
        >>> from torch_geometric.data import Data, InMemoryDataset
        >>> class Paths(InMemoryDataset):
        ...     processed_file_names = "data.pt"
        ...     def __init__(self, root, transform=None):
        ...         super().__init__(root, transform)
        ...         self.load(self.processed_paths[0])
        ...     def process(self):
        ...         print("processing")
        ...         self.save([Data(x=torch.ones(n, 1)) for n in (2, 3)], self.processed_paths[0])
        >>> root = tempfile.mkdtemp()
        >>> len(prepare(Paths, root)), len(prepare(Paths, root))
        processing
        (2, 2)
    """
    given: tuple[Any, Any] = (dataset, root)
    if not callable(given[0]) or not isinstance(given[1], (str, os.PathLike)):
        raise ArgumentError(
            "this is no PyG data set with a root folder", expected="a class, and a path", found=given
        )
    name = getattr(dataset, "__qualname__", type(dataset).__name__)
    told = {each: value for each, value in options.items() if each not in _LATER}
    which = digest_of(
        *(text.encode() for text in (getattr(dataset, "__module__", ""), name, _said(arguments), _said(told)))
    )
    top = Path(os.path.realpath(root))
    path = top / f"{re.sub(r'[^A-Za-z0-9]+', '-', name)}-{which[:12]}"
    raw = dict(_raw(top))

    def build(staging: Path) -> None:
        for inner, file in raw.items():
            (staging / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, staging / inner)  # no link: whoever downloads anew writes through it
        made = dataset(str(staging), *arguments, **options)
        close = getattr(made, "close", None)
        if callable(close):
            close()  # a database

    files = [f"{inner} {file.stat().st_size} {file.stat().st_mtime_ns}" for inner, file in raw.items()]
    whole_key = digest_of(key.encode(), *(each.encode("utf-8", "surrogateescape") for each in files))
    prepare_once(path, build, key=whole_key, retries=retries, timeout=timeout, comm=comm)
    opened = {each: value for each, value in options.items() if each != "force_reload"}
    return dataset(str(path), *arguments, **opened)


def _said(value: Any) -> str:
    """What a value is, without where it lies in memory: the same in every process."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_said(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_said, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_said, value)) + "]"
    if hasattr(value, "tolist"):  # an array or tensor, whose repr leaves out most of a long one
        return f"{type(value).__name__} {digest_of(repr(value.tolist()).encode())}"
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _raw(top: Path) -> Iterator[tuple[str, Path]]:
    """Files under a root that a data set may find there: names relative to it, and paths."""
    for place, folders, files in os.walk(top):
        folders[:] = sorted(
            folder
            for folder in folders
            if folder != _MADE
            and not folder.startswith(".")
            and not os.path.exists(os.path.join(place, folder, MARKER_NAME))
        )
        for file in sorted(files):
            path = Path(place, file)
            if not path.is_file():
                continue  # a link that leads nowhere, a pipe
            yield path.relative_to(top).as_posix(), path
