"""PyTorch Geometric's data sets, downloaded and processed once however many processes want them.

Their own ``download()`` and ``process()`` run untouched, in one process and in a folder of its own; everybody
opens what came of it.
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

#: What a data set makes itself: never taken from a root that others filled, where it may be half of it.
_MADE = "processed"
#: Names of folders in which a data set looks for what was downloaded.
_RAW = re.compile(r"raw(_|$)")
#: Arguments that do not change what is processed.
_LATER = ("transform", "force_reload", "log")
#: Functions of which several go by one name, since they differ in what they close over, if in nothing else; and
#: objects of which nothing is told.
_NAMELESS = re.compile(r"<lambda>|<function \S*<locals>|<[^<]* at \.\.\.>")


def prepare(
    dataset: Callable[..., T],
    root: str | os.PathLike[str],
    *arguments: Any,
    key: str = "",
    retries: int = 0,
    timeout: float | None = None,
    **options: Any,
) -> T:
    """A PyG data set, downloaded and processed by one process, opened in every one that calls.

    It lies in a folder of its own under ``root``, named after the class and its arguments. Raw files that lie
    under ``root`` already, in folders named ``raw`` (or ``raw_...``), are copied into it, stay as they are, and
    are looked at for changes; processed ones are not, since nobody can say whether they are whole. A build that
    was killed, a half download and a file that was cut afterwards are built anew.

    Args:
        dataset: the class; called as ``dataset(root, *arguments, **options)``. A `functools.partial` of a class
            is taken for the class and these arguments.
        root: folder for data sets.
        *arguments: as for the class. What they are decides, by their ``repr``, whether what was processed still
            fits; of functions it is their name, of transforms, and objects without a ``repr``, their attributes.
        key: what else decides: a version of your ``process()``, say, or of a function without a name.
        retries: how often a failing build is tried again.
        timeout: seconds to wait for another process that builds.
        **options: as for the class, like ``arguments``.

    Raises:
        PrepareError: downloading or processing failed, on every rank alike.
        ArgumentError: this is no class with a root, or an argument is a function that has no name of its own, or
            an object of which nothing is told.

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
    made: Any = dataset
    before: tuple[Any, ...] = ()
    if isinstance(made, partial):
        made, before, options = made.func, made.args, {**made.keywords, **options}
    if not isinstance(made, type):
        remedy = (
            "pass the class itself, and its arguments after the root: they distinguish one data set from another"
        )
        raise invalid("dataset", "a class of PyG, or functools.partial of one", dataset, remedy)
    root, key = check_path("root", root), check_str("key", key)
    told = {each: value for each, value in options.items() if each not in _LATER}
    what = (f"{made.__module__}.{made.__qualname__}", _said(before), _said(arguments), _said(told))
    if not key and (nameless := _NAMELESS.search(" ".join(what[1:]))):
        raise ArgumentError(
            "an argument cannot be told from others of its kind",
            found=nameless[0],
            where=what[0],
            remedy="define functions with a name at the top of a module, or say by key=... which it is "
            "(transform=... is not looked at)",
        )
    top = Path(os.path.realpath(root))
    name = re.sub(r"[^A-Za-z0-9]+", "-", made.__qualname__)
    path = top / f"{name}-{digest_of(*(text.encode() for text in what))[:12]}"
    raw = list(_raw(top))

    def build(staging: Path) -> None:
        for file, _ in raw:
            place = staging / file.relative_to(top)
            place.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed since
                shutil.copy2(file, place)  # no link: whoever downloads anew writes through it
        close = getattr(made(*before, str(staging), *arguments, **options), "close", None)
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
    there: T = made(*before, str(path), *arguments, **opened)
    return there


def _said(value: Any, within: tuple[int, ...] = ()) -> str:
    """What a value is, without where it lies in memory: the same in every process."""
    if id(value) in within:
        return "itself"
    said = partial(_said, within=(*within, id(value)))
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key}: {said(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(said, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(said, value)) + "]"
    if hasattr(value, "tolist"):  # an array or tensor, whose repr leaves out most of a long one
        dtype = getattr(value, "dtype", "")
        return f"{type(value).__name__} {dtype} {digest_of(repr(value.tolist()).encode())}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return f"partial {said((value.func, value.args, value.keywords))}"
    if isinstance(value, FunctionType):
        return f"{value.__module__} <function {value.__qualname__}>"
    if isinstance(value, MethodType):
        return f"{value.__name__} of {said(value.__self__)}"
    text, addresses = re.subn(r" at 0x[0-9a-fA-F]+", " at ...", repr(value))
    if addresses and hasattr(value, "__dict__"):  # a repr that tells nothing of it, or of what it holds
        return f"a {said(type(value))} {said(vars(value))}"
    if callable(value) and getattr(
        value, "__dict__", None
    ):  # a transform, whose repr may be no more than its class's name
        return f"{type(value).__module__} {text} {said(vars(value))}"
    return text


def _raw(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files under a root that a data set may find there.

    Only those in folders for them, which may be links: whatever else lies under a root, a log that a rank writes,
    may look another way to each rank, and all have to come to the same key.
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
            with suppress(OSError):  # a link that leads nowhere, or gone since
                if stat.S_ISREG(path.stat().st_mode):
                    yield path, stat_uncached(path)  # another host may have changed it just now


def _leads_to_raw(folder: str) -> bool:
    name = os.path.basename(folder)
    if name == _MADE or os.path.exists(os.path.join(folder, MARKER_NAME)):
        return False
    return bool(_RAW.match(name)) or not os.path.islink(folder)
