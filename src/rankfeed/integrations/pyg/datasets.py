"""Datasets of PyTorch Geometric, downloaded and processed once for any number of processes.

Their ``download()`` and ``process()`` run unchanged, in one process and in a private folder; all processes open
the result.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeVar

from rankfeed._util.validate import check_path, check_str, invalid
from rankfeed.errors import ArgumentError
from rankfeed.prepare import prepare_once
from rankfeed.prepare.marker import MARKER_NAME, walk_links
from rankfeed.storage import digest_of, stat_uncached

T = TypeVar("T")

#: Folder of processed files: never copied from a root, where they may be incomplete.
_PROCESSED = "processed"
#: Names of folders of downloaded files.
_RAW = re.compile(r"raw(_|$)")
#: Arguments that do not change what is processed.
_NOT_PROCESSED = ("transform", "force_reload", "log")
#: Descriptions of functions that have no unique name, and of objects that show no attributes.
_AMBIGUOUS = re.compile(r"<lambda>|<function \S*<locals>|<[^<]* at \.\.\.>")


def prepare(
    dataset: Callable[..., T],
    root: str | os.PathLike[str],
    *arguments: Any,
    key: str = "",
    retries: int = 0,
    timeout: float | None = None,
    **options: Any,
) -> T:
    """A PyG dataset, downloaded and processed by one process, opened in every process that calls.

    It has its own folder under ``root``, named after the class and its arguments. Existing raw files under
    ``root``, in folders named ``raw`` (or ``raw_...``), are copied into it, are not changed, and are checked for
    changes; processed ones are not used, since they may be incomplete. After a build that was killed, an
    incomplete download or a file that was truncated later, the dataset is built again.

    Args:
        dataset: the class; called as ``dataset(root, *arguments, **options)``. A `functools.partial` of a class
            counts as the class with these arguments.
        root: folder for datasets.
        *arguments: as for the class. Their ``repr`` decides whether the processed files are still valid; for
            functions it is their name, for transforms, and objects without a ``repr``, their attributes.
        key: what else decides, such as a version of your ``process()``, or of a function without a name.
        retries: how often a failing build is repeated.
        timeout: seconds to wait for another process that builds.
        **options: as for the class, like ``arguments``.

    Raises:
        PrepareError: downloading or processing failed, on every rank alike.
        ArgumentError: this is no class, or an argument is a function without a unique name, or an object that
            shows no attributes.

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
    cls: Any = dataset
    before: tuple[Any, ...] = ()
    if isinstance(cls, partial):
        cls, before, options = cls.func, cls.args, {**cls.keywords, **options}
    if not isinstance(cls, type):
        remedy = (
            "pass the class itself, and its arguments after the root: they distinguish one data set from another"
        )
        raise invalid("dataset", "a class of PyG, or functools.partial of one", dataset, remedy)
    root, key = check_path("root", root), check_str("key", key)
    processed = {each: value for each, value in options.items() if each not in _NOT_PROCESSED}
    what = (f"{cls.__module__}.{cls.__qualname__}", _describe(before), _describe(arguments), _describe(processed))
    if not key and (ambiguous := _AMBIGUOUS.search(" ".join(what[1:]))):
        raise ArgumentError(
            "an argument has no description that identifies it",
            found=ambiguous[0],
            where=what[0],
            remedy="define functions with a name at the top of a module, or identify it with key=... "
            "(transform=... does not matter)",
        )
    top = Path(os.path.realpath(root))
    name = re.sub(r"[^A-Za-z0-9]+", "-", cls.__qualname__)
    path = top / f"{name}-{digest_of(*(text.encode() for text in what))[:12]}"
    raw = list(_raw_files(top))

    def build(staging: Path) -> None:
        for file, _ in raw:
            target = staging / file.relative_to(top)
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed since
                shutil.copy2(file, target)  # no link: a repeated download would write through it
        close = getattr(cls(*before, str(staging), *arguments, **options), "close", None)
        if callable(close):
            close()  # a database

    files = [
        f"{file.relative_to(top).as_posix()} {found.st_size} {found.st_mtime_ns}".encode(
            "utf-8", "surrogateescape"
        )
        for file, found in raw
    ]
    prepare_once(path, build, key=digest_of(key.encode(), *files), retries=retries, timeout=timeout)
    opened = {each: value for each, value in options.items() if each != "force_reload"}
    result: T = cls(*before, str(path), *arguments, **opened)
    return result


def _describe(value: Any, within: tuple[int, ...] = ()) -> str:
    """A description of a value without its address, the same in every process."""
    if id(value) in within:
        return "itself"
    describe = partial(_describe, within=(*within, id(value)))
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key}: {describe(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(describe, value)) + "]"
    if hasattr(value, "tolist"):  # an array or tensor, whose repr is abbreviated
        dtype = getattr(value, "dtype", "")
        return f"{type(value).__name__} {dtype} {digest_of(repr(value.tolist()).encode())}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return f"partial {describe((value.func, value.args, value.keywords))}"
    if isinstance(value, FunctionType):
        return f"{value.__module__} <function {value.__qualname__}>"
    if isinstance(value, MethodType):
        return f"{value.__name__} of {describe(value.__self__)}"
    text, addresses = re.subn(r" at 0x[0-9a-fA-F]+", " at ...", repr(value))
    if addresses and hasattr(value, "__dict__"):  # a repr without attributes, of it or of what it contains
        return f"a {describe(type(value))} {describe(vars(value))}"
    if callable(value) and getattr(
        value, "__dict__", None
    ):  # a transform, whose repr may be only its class's name
        return f"{type(value).__module__} {text} {describe(vars(value))}"
    return text


def _raw_files(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Raw files under a root.

    Only those in their folders, which may be links: other files, such as logs, may differ between ranks, which
    must compute the same key.
    """
    for place, folders, files in walk_links(top):
        inside = any(_RAW.match(part) for part in Path(place).relative_to(top).parts)
        folders[:] = [
            folder
            for folder in folders
            if not folder.startswith(".") and (inside or _leads_to_raw(os.path.join(place, folder)))
        ]
        for file in files if inside else ():
            path = Path(place, file)
            with suppress(OSError):  # a broken link, or removed since
                if stat.S_ISREG(path.stat().st_mode):
                    yield path, stat_uncached(path)  # another host may have changed it


def _leads_to_raw(folder: str) -> bool:
    name = os.path.basename(folder)
    if name == _PROCESSED or os.path.exists(os.path.join(folder, MARKER_NAME)):
        return False
    return bool(_RAW.match(name)) or not os.path.islink(folder)
