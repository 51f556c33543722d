"""rankfeed: the data loader for distributed PyTorch training.

Each rank, and each worker inside it, reads its own share of a dataset: every sample exactly once per epoch, in a
reproducible order, in the same number of steps on every rank.

Names are imported when they are first used, so that ``import rankfeed`` imports neither torch nor pyarrow.

Examples:
    >>> import rankfeed as rf
    >>> rf.Topology(rank=1, world_size=4).world_size
    4
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankfeed import errors

if TYPE_CHECKING:
    from rankfeed.diagnostics import AuditReport, Lockstep, audit, verify_data, verify_run, watch
    from rankfeed.loading import DistributedBatchSampler, DistributedSampler, Loader, from_iterable, split
    from rankfeed.plan import Plan, Schedule
    from rankfeed.prepare import prepare_once
    from rankfeed.sources import Source, concat, from_dataset, open, train_test_split
    from rankfeed.topology import Topology
    from rankfeed.writer import write

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "DistributedBatchSampler",
    "DistributedSampler",
    "Loader",
    "Lockstep",
    "Plan",
    "Schedule",
    "Source",
    "Topology",
    "__version__",
    "audit",
    "concat",
    "errors",
    "from_dataset",
    "from_iterable",
    "open",
    "prepare_once",
    "split",
    "train_test_split",
    "verify_data",
    "verify_run",
    "watch",
    "write",
]

#: The packages that the names are imported from; the imports above are for type checkers.
_PACKAGES = {
    "loading": "DistributedBatchSampler DistributedSampler Loader from_iterable split",
    "plan": "Plan Schedule",
    "prepare": "prepare_once",
    "diagnostics": "AuditReport Lockstep audit verify_data verify_run watch",
    "sources": "Source concat from_dataset open train_test_split",
    "topology": "Topology",
    "writer": "write",
}


def __getattr__(name: str) -> Any:
    for package, names in _PACKAGES.items():
        if name in names.split():
            value = getattr(_imported(f"rankfeed.{package}"), name)
            globals()[name] = value  # found at once the next time
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str) -> Any:
    """Import a module; nothing of it is garbage, and looking for some among the objects of torch takes 0.1 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
