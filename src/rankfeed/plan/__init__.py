"""Which sample is read where and when: arithmetic on numpy arrays, without I/O and without torch."""

from rankfeed.plan.cursor import Cursor
from rankfeed.plan.permutation import Key, permutation
from rankfeed.plan.plan import Plan, Shuffle
from rankfeed.plan.schedule import Schedule, Tail
from rankfeed.plan.streams import Streams, wants_rng
from rankfeed.plan.tally import Difference, Tally

__all__ = [
    "Cursor",
    "Difference",
    "Key",
    "Plan",
    "Schedule",
    "Shuffle",
    "Streams",
    "Tail",
    "Tally",
    "permutation",
    "wants_rng",
]
