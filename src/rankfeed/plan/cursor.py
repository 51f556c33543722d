"""The position of a job in its data, as integers in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from rankfeed._util.validate import check_int
from rankfeed.plan.schedule import SampleOrder, Schedule, ScheduleTail
from rankfeed.topology import Topology


@dataclass(frozen=True)
class Cursor:
    """A position between two steps, the same on every rank: any number of ranks can continue from it."""

    epoch: int = 0
    position: int = 0  # samples consumed in this epoch
    steps: int = 0  # steps taken in this epoch, by any topology

    def __post_init__(self) -> None:
        for name in ("epoch", "position", "steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                object.__setattr__(self, name, check_int(name, value, at_least=0))

    def after(self, schedule: Schedule, steps: int) -> Cursor:
        """The cursor after some steps of its schedule."""
        position = schedule.position_after(steps - 1) if steps else self.position
        cursor = object.__new__(Cursor)  # these numbers need no check
        cursor.__dict__.update(epoch=self.epoch, position=position, steps=self.steps + steps)
        return cursor

    def next_epoch(self) -> Cursor:
        """The start of the next epoch."""
        return Cursor(self.epoch + 1)

    def schedule(self, plan: SampleOrder, batch_size: int, topology: Topology, tail: ScheduleTail) -> Schedule:
        """The steps from here to the end of the epoch."""
        epoch, start = self.epoch, self.position
        return Schedule(plan, batch_size=batch_size, topology=topology, epoch=epoch, start=start, tail=tail)
