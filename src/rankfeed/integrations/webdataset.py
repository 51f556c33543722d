"""Drop-ins for WebDataset pipelines: checked shard splitters, and stages that deal samples instead of shards.

A splitter stands where WebDataset's own stood and deals whole shards. A stage (:class:`ShardedSamples`,
:class:`Resampled`) stands where the shard list and the tar reader stood, and deals the samples in them. Both take
the rank in the process that makes the DataLoader, so that workers have it however they are started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, TypeVar, get_args

from rankfeed._util.validate import check_choice, check_iterable
from rankfeed.errors import ArgumentError, PlanError
from rankfeed.integrations.sharded_samples import Resampled, ShardedSamples
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.topology import Topology

__all__ = ["NodeSplitter", "Resampled", "ShardedSamples", "WorkerSplitter", "nodesplitter", "workersplitter"]

ByRank = Literal["even", "drop", "repeat", "uneven"]
ByWorker = Literal["even", "uneven", "idle"]
_Shard = TypeVar("_Shard")

#: More shards than anybody has: a list that is longer does not end (WebDataset's own resampling).
MAX_SHARDS = 2**20


def deal(shards: int, parts: int, part: int, strategy: ByRank | ByWorker, what: str = "rank") -> list[int]:
    """Which of some shards one part (a rank, or a worker of a rank) reads.

    Args:
        shards: how many there are.
        parts: how many ranks or workers share them.
        part: which one asks.
        strategy: "even" (each part has equally many, or an error), "drop" (the last ones that cannot be dealt
            evenly are left out), "repeat" (the first ones are dealt once more to make it even), "uneven" (parts
            differ by at most one, none is empty) or "idle" (the same, but parts may be empty).
        what: "rank" or "worker", for the error.

    Returns:
        indices of the shards, ascending (but for those repeated, which are last).

    Raises:
        PlanError: the shards cannot be dealt like this; says how they can.

    Examples:
        >>> [deal(5, 2, part, "uneven") for part in range(2)]
        [[0, 2, 4], [1, 3]]
        >>> [deal(5, 2, part, "repeat") for part in range(2)]
        [[0, 2, 4], [1, 3, 0]]
    """
    over = shards % parts
    if shards == 0 or (shards < parts and strategy not in ("repeat", "idle")) or (over and strategy == "even"):
        raise _cannot(shards, parts, part, what)
    if strategy == "drop":
        shards -= over
    mine = list(range(part, shards, parts))
    if strategy == "repeat" and over and part >= over:
        mine.append((part - over) % shards)
    return mine


def _cannot(shards: int, parts: int, part: int, what: str) -> PlanError:
    """Why shards cannot be dealt, and what can be done."""
    found, where = f"{shards} shard{'s' * (shards != 1)}", f"{what} {part} of {parts}"
    if shards == 0:
        return PlanError(
            f"there are no shards to deal to {parts} {what}s",
            where=where,
            remedy="check the list of shards: a pattern that fits no file is an empty list",
        )
    few = shards < parts
    if what == "worker":
        ways = [
            f"num_workers={shards}" if few else "a num_workers that divides the shards of a rank",
            'WorkerSplitter("idle") with empty_check=False' if few else 'WorkerSplitter("uneven")',
        ]
    elif few:
        ways = ["fewer ranks", 'NodeSplitter("repeat") reads some of them several times']
    else:
        ways = [
            f'NodeSplitter("drop") leaves {shards % parts} of them out',
            f'NodeSplitter("repeat") reads {parts - shards % parts} of them twice',
            'NodeSplitter("uneven") lets ranks differ, who then take different numbers of steps',
        ]
    return PlanError(
        f"{found} cannot be dealt {'' if few else 'evenly '}to {parts} {what}s"
        + (f": {parts - shards} would be empty" if few else ""),
        expected=f"at least {parts} shards" if few else f"a multiple of {parts} shards",
        found=found,
        where=where,
        remedy="rankfeed.integrations.webdataset.ShardedSamples deals samples, whatever the shards; or else "
        + "; ".join(ways),
    )


def _listed(shards: Iterable[_Shard]) -> list[_Shard]:
    """All shards of a list that ends."""
    listed = list(islice(check_iterable("shards", shards), MAX_SHARDS + 1))
    if len(listed) > MAX_SHARDS:
        raise ArgumentError(
            "the list of shards does not end",
            expected=f"at most {MAX_SHARDS} shards",
            remedy="leave resampled=True out: rankfeed.integrations.webdataset.Resampled draws samples over all "
            "ranks from one stream",
        )
    return listed


class NodeSplitter:
    """This rank's shards: for ``wds.WebDataset(urls, nodesplitter=NodeSplitter("drop"))``.

    Ranks get equally many shards, which are equally many samples only where the shards are equal;
    :class:`ShardedSamples` deals samples. The list must be in the same order on all ranks.

    Args:
        strategy: "even", "drop", "repeat" or "uneven", see :func:`deal`. No rank is ever left empty.
        topology: rank and world size; found when iteration starts, or when it is pickled, if left out.

    Raises:
        ArgumentError: no such strategy.
        PlanError: when iteration starts, if the shards cannot be dealt like this.

    Examples:
        >>> import rankfeed as rf
        >>> splitter = NodeSplitter("drop", topology=rf.Topology(rank=1, world_size=2))
        >>> list(splitter(["a.tar", "b.tar", "c.tar"]))
        ['b.tar']
    """

    def __init__(self, strategy: ByRank = "even", *, topology: Topology | None = None) -> None:
        self.strategy: ByRank = check_choice("strategy", strategy, get_args(ByRank))
        self._topology = LazyTopology(topology)

    @property
    def topology(self) -> Topology:
        """Rank and world size, asked anew each time: one splitter may serve a whole process."""
        return self._topology.peek()

    def __call__(self, shards: Iterable[_Shard]) -> Iterator[_Shard]:
        here, listed = self.topology, _listed(shards)
        refuse_double_sharding(here)
        yield from (listed[each] for each in deal(len(listed), here.world_size, here.rank, self.strategy))

    def __repr__(self) -> str:
        return f"NodeSplitter({self.strategy!r})"


class WorkerSplitter:
    """This worker's shards of those of its rank: for ``wds.WebDataset(urls, workersplitter=WorkerSplitter())``.

    Args:
        strategy: "even", "uneven" or "idle", see :func:`deal`. What the rank reads is the same under all three.

    Raises:
        ArgumentError: no such strategy.
        PlanError: when iteration starts, if the shards cannot be dealt like this.

    Examples:
        >>> list(WorkerSplitter()(["a.tar", "b.tar"]))
        ['a.tar', 'b.tar']
    """

    def __init__(self, strategy: ByWorker = "uneven") -> None:
        self.strategy: ByWorker = check_choice("strategy", strategy, get_args(ByWorker))

    def __call__(self, shards: Iterable[_Shard]) -> Iterator[_Shard]:
        worker, num_workers = Topology.worker()
        listed = _listed(shards)
        yield from (listed[each] for each in deal(len(listed), num_workers, worker, self.strategy, "worker"))

    def __repr__(self) -> str:
        return f"WorkerSplitter({self.strategy!r})"


#: Ready-made: equally many shards a rank, or an error that says what can be done.
nodesplitter = NodeSplitter("even")
#: Ready-made: the shards of a rank over its workers, of whom none may be without.
workersplitter = WorkerSplitter("uneven")
