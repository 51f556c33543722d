"""Plans: which sample is read at which step of which rank, by arithmetic on numpy arrays, without I/O or torch."""

from rankfeed.plan.coverage import Coverage, Gap, PositionOrder
from rankfeed.plan.cursor import Cursor
from rankfeed.plan.plan import Plan
from rankfeed.plan.quality import ReadingCost, ShuffleQuality, measure_quality, measure_reading
from rankfeed.plan.rng_streams import RngStreams, wants_rng
from rankfeed.plan.schedule import Schedule, Tail

__all__ = [
    "Coverage",
    "Cursor",
    "Gap",
    "Plan",
    "PositionOrder",
    "ReadingCost",
    "RngStreams",
    "Schedule",
    "ShuffleQuality",
    "Tail",
    "measure_quality",
    "measure_reading",
    "wants_rng",
]
