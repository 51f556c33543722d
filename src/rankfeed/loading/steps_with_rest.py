"""The steps of an epoch for consumers that divide a stream of ids into batches themselves."""

from __future__ import annotations

import numpy as np

from rankfeed.plan import Schedule, Tail
from rankfeed.plan.plan import Int64
from rankfeed.plan.schedule import Order, Ranks


class StepsWithRest:
    """Full steps, and with tail="even" the rest of the epoch as one smaller step: only the last batch is smaller.

    Attributes:
        full: the full steps (with tail="pad" the last one is padded).
        rest: the rest, one step; None if there is none.
        rest_size: samples of the rest, over all ranks.
    """

    def __init__(
        self, plan: Order, *, batch_size: int, topology: Ranks, epoch: int, start: int = 0, tail: Tail
    ) -> None:
        def schedule(start: int, tail: Tail) -> Schedule:
            return Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)

        self.full = schedule(start, "drop" if tail == "even" else tail)
        self.rest_size = plan.num_samples - self.full.end if tail == "even" else 0
        self.rest = schedule(self.full.end, "even") if self.rest_size else None

    def rest_ids(self) -> Int64:
        """Sample ids of this rank in the rest; a rank without one gets none."""
        return np.empty(0, np.int64) if self.rest is None else self.rest.batch(0)[self.rest.valid(0)]
