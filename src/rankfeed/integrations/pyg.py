"""PyTorch Geometric: datasets prepared once; seed nodes for loaders that sample around them."""

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

import numpy as np

from rankfeed._util.imports import need
from rankfeed._util.validate import check_path, check_str, invalid
from rankfeed.errors import ArgumentError, safe_repr
from rankfeed.loading import DistributedBatchSampler
from rankfeed.plan import Tail
from rankfeed.prepare import prepare_once
from rankfeed.prepare.marker import MARKER_NAME, walk_links
from rankfeed.storage.checksum import digest_of
from rankfeed.storage.network_fs import stat_uncached
from rankfeed.topology import Topology

T = TypeVar("T")

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

    Its ``download()`` and ``process()`` run unchanged, in a private folder. The dataset has its own folder under
    ``root``, named after the class and its arguments. Existing raw files under ``root``, in folders named ``raw``
    (or ``raw_...``), are copied into it, are not changed, and are checked for changes; processed ones are not
    used, since they may be incomplete. After a build that was killed, an incomplete download or a file that was
    truncated later, the dataset is built again.

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
        ArgumentError: ``dataset`` is not a class, or an argument is a function without a unique name, or an object
            that shows no attributes.

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
            "pass the class itself, and its arguments after the root: they distinguish one dataset from another"
        )
        raise invalid("dataset", "a class of PyG, or functools.partial of one", dataset, remedy)
    root, key = check_path("root", root), check_str("key", key)
    processed = {name: value for name, value in options.items() if name not in _NOT_PROCESSED}
    keys = (f"{cls.__module__}.{cls.__qualname__}", _describe(before), _describe(arguments), _describe(processed))
    if not key and (ambiguous := _AMBIGUOUS.search(" ".join(keys[1:]))):
        raise ArgumentError(
            "an argument has no description that identifies it",
            found=ambiguous[0],
            where=keys[0],
            remedy="define functions with a name at the top of a module, or identify it with key=... "
            "(transform=... does not matter)",
        )
    top = Path(os.path.realpath(root))
    name = re.sub(r"[^A-Za-z0-9]+", "-", cls.__qualname__)
    path = top / f"{name}-{digest_of(*(text.encode() for text in keys))[:12]}"
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
        os.fsencode(f"{file.relative_to(top).as_posix()} {status.st_size} {status.st_mtime_ns}")
        for file, status in raw
    ]
    prepare_once(path, build, key=digest_of(key.encode(), *files), retries=retries, timeout=timeout)
    opened = {name: value for name, value in options.items() if name != "force_reload"}
    result: T = cls(*before, str(path), *arguments, **opened)
    return result


def _describe(value: Any, within: tuple[int, ...] = ()) -> str:
    """A description of a value without its address, the same in every process."""
    if id(value) in within:
        return "itself"
    describe = partial(_describe, within=(*within, id(value)))
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key}: {describe(part)}" for key, part in value.items())) + "}"
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
    if callable(value) and getattr(value, "__dict__", None):  # a transform, whose repr may be its class's name
        return f"{type(value).__module__} {text} {describe(vars(value))}"
    return text


def _raw_files(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Raw files under a root, in their folders, which may be links."""
    for place, folders, files in walk_links(top):
        inside = any(_RAW.match(part) for part in Path(place).relative_to(top).parts)
        folders[:] = [name for name in folders if name[0] != "." and (inside or _leads_to_raw(Path(place, name)))]
        for path in (Path(place, file) for file in files if inside):
            with suppress(OSError):  # a broken link, or removed since
                if stat.S_ISREG(path.stat().st_mode):
                    yield path, stat_uncached(path)  # another host may have changed it


def _leads_to_raw(folder: Path) -> bool:
    if folder.name == "processed" or os.path.exists(folder / MARKER_NAME):
        return False
    return bool(_RAW.match(folder.name)) or not folder.is_symlink()


class NodeSeeds(DistributedBatchSampler):
    """This rank's equal share of the seed nodes, for ``NeighborLoader(..., batch_sampler=NodeSeeds(...))``.

    Every seed is drawn once per epoch over all ranks, in the same number of steps on every rank. After the last
    step of an epoch the next one begins, in another order. ``set_epoch``, ``state_dict`` and
    ``load_state_dict`` are those of :class:`rankfeed.DistributedBatchSampler`.

    It works with every loader that has ``input_nodes`` (``NeighborLoader``, ``HGTLoader``, ``NodeLoader``), and
    runs in the process that iterates it, for any number of workers.

    Args:
        input_nodes: those of the loader: a tensor or list of indices, a boolean mask, in a heterogeneous
            graph ``(node type, indices or mask or None)`` or a node type; None for all nodes.
        batch_size: seeds of this rank's batches.
        data: the graph; needed only where ``input_nodes`` means all nodes (of a type).
        shuffle: whether to shuffle, by a keyed bijection that takes no memory.
        seed: of the order.
        tail: how an epoch ends (see :class:`rankfeed.Schedule`).
        topology: rank and world size; detected at the first ``len`` or ``iter`` if left out.

    Raises:
        ArgumentError: ``input_nodes`` is none of these.
        PlanError: no seeds (at once), or fewer seeds than ranks (at the first ``len`` or ``iter``).

    Examples:
        >>> import torch, rankfeed as rf
        >>> train_mask = torch.tensor([True, False, True, True, True])
        >>> seeds = NodeSeeds(train_mask, 2, shuffle=False, topology=rf.Topology(rank=1, world_size=2))
        >>> list(seeds)  # indices into the seeds, as the loader expects
        [[2, 3]]
        >>> seeds.nodes[[2, 3]]
        array([3, 4])
    """

    def __init__(
        self,
        input_nodes: Any,
        batch_size: int = 1,
        *,
        data: Any = None,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "even",
        topology: Topology | None = None,
    ) -> None:
        kind, nodes = _seeds(input_nodes, data)
        super().__init__(len(nodes), batch_size, shuffle=shuffle, seed=seed, tail=tail, topology=topology)
        #: The seeds, int64, in the loader's order.
        self.nodes = nodes
        # A checkpoint is valid for these seeds only.
        self._fingerprint = digest_of(str(kind or "").encode(), np.ascontiguousarray(nodes).data)


def _seeds(input_nodes: Any, data: Any) -> tuple[str | None, np.ndarray[Any, np.dtype[np.int64]]]:
    """The node type, if any, and the nodes, as PyG's loaders read them."""
    import torch

    expected = "indices, a boolean mask, or (node type, either of these)"
    kind = None
    if isinstance(input_nodes, str):
        kind, input_nodes = input_nodes, None
    elif isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2 and isinstance(input_nodes[0], str):
        kind, input_nodes = input_nodes
    if input_nodes is None:
        return kind, np.arange(_num_nodes(kind, data))
    try:
        nodes = torch.as_tensor(input_nodes)
    except Exception:
        raise invalid("input_nodes", expected, input_nodes) from None
    if nodes.dtype == torch.bool:
        nodes = nodes.nonzero().view(-1)
    if nodes.dim() != 1 or (nodes.numel() and (nodes.is_floating_point() or nodes.is_complex())):
        text = f"{nodes.dtype} of shape {tuple(nodes.shape)}"
        raise ArgumentError("input_nodes is not a selection of nodes", expected=expected, found=text)
    return kind, nodes.cpu().numpy().astype(np.int64)


def _num_nodes(kind: str | None, data: Any) -> int:
    if data is None:
        raise ArgumentError(
            "the nodes of the graph cannot be counted without the graph",
            found=f"input_nodes={kind!r}",
            remedy="pass data=, or the nodes",
        )
    get_input_nodes = need("torch_geometric.loader.utils", extra="pyg").get_input_nodes
    try:
        _, nodes, _ = get_input_nodes(data, kind)
    except Exception as error:  # AssertionError, KeyError, TypeError or AttributeError
        raise ArgumentError(
            "the graph has no such nodes", expected="a node type of the graph", found=safe_repr(kind)
        ) from error
    return int(nodes.numel())
