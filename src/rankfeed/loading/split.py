"""This rank's and worker's share of any stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch.utils.data import IterableDataset

from rankfeed._util.validate import check_iterable
from rankfeed.loading.options import check_topology
from rankfeed.loading.placed import Placed
from rankfeed.loading.sharded_twice import refuse_second_sharding
from rankfeed.topology import Topology

_Item = TypeVar("_Item")


class _Split(Placed, IterableDataset[_Item]):
    def __init__(self, iterable: Iterable[_Item], topology: Topology | None) -> None:
        self.iterable = check_iterable("iterable", iterable)
        self._topology = check_topology(topology)

    def __iter__(self) -> Iterator[_Item]:
        refuse_second_sharding(self.topology)
        worker, num_workers = Topology.worker()
        # Ranks first: cut the other way round, the totals of ranks would differ by as much as there are workers.
        first = self.topology.rank + worker * self.topology.world_size
        return islice(iter(self.iterable), first, None, self.topology.world_size * num_workers)


def split(iterable: Iterable[_Item], *, topology: Topology | None = None) -> IterableDataset[_Item]:
    """This (rank, worker)'s share of a stream, decided when iteration starts.

    Every item goes to one worker of one rank, and the totals of ranks differ by at most one. Equal steps are
    not promised: nobody knows how long the stream is.

    Args:
        iterable: the same stream on every rank and worker.
        topology: rank and world size; found at the first ``iter`` if left out.

    Returns:
        an ``IterableDataset``, for a DataLoader or to be iterated as it is.

    Examples:
        >>> import rankfeed as rf
        >>> list(split(range(7), topology=rf.Topology(rank=1, world_size=3)))
        [1, 4]
    """
    return _Split(iterable, topology)
