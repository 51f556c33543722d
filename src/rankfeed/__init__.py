"""rankfeed feeds the ranks of a PyTorch training job.

Every rank, and every data-loading worker under it, reads its own share of a data set: each sample exactly
once an epoch, in an order that can be repeated, in the same number of steps on every rank.

Names are loaded when they are first asked for, so that ``import rankfeed`` brings in neither torch nor Arrow.

Examples:
    >>> import rankfeed as rf
    >>> rf.Topology(rank=1, world_size=4).world_size
    4
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankfeed import errors

if TYPE_CHECKING:
    from rankfeed.loading import DistributedBatchSampler, DistributedSampler, Loader, from_iterable, split
    from rankfeed.plan import Plan, Schedule
    from rankfeed.prepare import prepare_once
    from rankfeed.proof import AuditReport, Lockstep, audit, watch
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
    "watch",
    "write",
]

# Public name -> the room that holds it; the same as the imports above, which only type checkers follow.
_ROOMS = {
    "AuditReport": "rankfeed.proof",
    "DistributedBatchSampler": "rankfeed.loading",
    "DistributedSampler": "rankfeed.loading",
    "Loader": "rankfeed.loading",
    "Lockstep": "rankfeed.proof",
    "Plan": "rankfeed.plan",
    "Schedule": "rankfeed.plan",
    "Source": "rankfeed.sources",
    "Topology": "rankfeed.topology",
    "audit": "rankfeed.proof",
    "concat": "rankfeed.sources",
    "from_dataset": "rankfeed.sources",
    "from_iterable": "rankfeed.loading",
    "open": "rankfeed.sources",
    "prepare_once": "rankfeed.prepare",
    "split": "rankfeed.loading",
    "train_test_split": "rankfeed.sources",
    "watch": "rankfeed.proof",
    "write": "rankfeed.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ROOMS[name]), name)
    globals()[name] = value  # found at once the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
