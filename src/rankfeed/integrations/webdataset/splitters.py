"""Shard splitters for WebDataset pipelines that check their result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, TypeVar, get_args

from rankfeed._util.validate import check_choice, check_iterable
from rankfeed.errors import ArgumentError, PlanError
from rankfeed.loading._compat import refuse_double_sharding
from rankfeed.loading.lazy_topology import LazyTopology
from rankfeed.topology import Topology

ByRank = Literal["even", "drop", "repeat", "uneven"]
ByWorker = Literal["even", "uneven", "idle"]
_Shard = TypeVar("_Shard")

#: A longer list is endless, as of WebDataset's own resampling.
MAX_SHARDS = 2**20


def split_shards(shards: int, parts: int, part: int, strategy: ByRank | ByWorker, what: str = "rank") -> list[int]:
    """The shards that one part (a rank, or a worker of a rank) reads.

    Examples:
        >>> [split_shards(5, 2, part, "uneven") for part in range(2)]
        [[0, 2, 4], [1, 3]]
        >>> [split_shards(5, 2, part, "repeat") for part in range(2)]
        [[0, 2, 4], [1, 3, 0]]
    """
    over = shards % parts
    if shards == 0 or (shards < parts and strategy not in ("repeat", "idle")) or (over and strategy == "even"):
        raise _split_error(shards, parts, part, what)
    if strategy == "drop":
        shards -= over
    mine = list(range(part, shards, parts))
    if strategy == "repeat" and over and part >= over:
        mine.append((part - over) % shards)
    return mine


def _split_error(shards: int, parts: int, part: int, what: str) -> PlanError:
    found, where = f"{shards} shard{'s' * (shards != 1)}", f"{what} {part} of {parts}"
    if shards == 0:
        return PlanError(
            f"there are no shards for {parts} {what}s",
            where=where,
            remedy="check the list of shards: a pattern without a matching file is an empty list",
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
            'NodeSplitter("uneven") lets ranks differ, which then take different numbers of steps',
        ]
    return PlanError(
        f"{found} cannot be divided {'' if few else 'evenly '}among {parts} {what}s"
        + (f": {parts - shards} would be empty" if few else ""),
        expected=f"at least {parts} shards" if few else f"a multiple of {parts} shards",
        found=found,
        where=where,
        remedy="rankfeed.integrations.webdataset.ShardedSamples divides samples, for any shards; or "
        + "; ".join(ways),
    )


def _as_list(shards: Iterable[_Shard]) -> list[_Shard]:
    """All shards of a finite list."""
    listed = list(islice(check_iterable("shards", shards), MAX_SHARDS + 1))
    if len(listed) > MAX_SHARDS:
        raise ArgumentError(
            "the list of shards is endless",
            expected=f"at most {MAX_SHARDS} shards",
            remedy="leave resampled=True out: rankfeed.integrations.webdataset.Resampled draws samples over all "
            "ranks from one sequence",
        )
    return listed


class NodeSplitter:
    """This rank's shards: for ``wds.WebDataset(urls, nodesplitter=NodeSplitter("drop"))``.

    Ranks get equally many shards, and so equally many samples only if the shards are equal; `ShardedSamples`
    divides samples. The list must be in the same order on all ranks.

    Args:
        strategy: "even", "drop", "repeat" or "uneven", see :func:`split_shards`. No rank is empty.
        topology: rank and world size; found when iteration starts, or when it is pickled, if left out.

    Raises:
        ArgumentError: no such strategy.
        PlanError: when iteration starts, if the shards cannot be divided like this.

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
        """Rank and world size, detected each time: one splitter may serve a whole process."""
        return self._topology.peek()

    def __call__(self, shards: Iterable[_Shard]) -> Iterator[_Shard]:
        here, listed = self.topology, _as_list(shards)
        refuse_double_sharding(here)
        yield from (listed[each] for each in split_shards(len(listed), here.world_size, here.rank, self.strategy))

    def __repr__(self) -> str:
        return f"NodeSplitter({self.strategy!r})"


class WorkerSplitter:
    """This worker's part of its rank's shards: for ``wds.WebDataset(urls, workersplitter=WorkerSplitter())``.

    Args:
        strategy: "even", "uneven" or "idle", see :func:`split_shards`. The rank reads the same shards with all
            three.

    Raises:
        ArgumentError: no such strategy.
        PlanError: when iteration starts, if the shards cannot be divided like this.

    Examples:
        >>> list(WorkerSplitter()(["a.tar", "b.tar"]))
        ['a.tar', 'b.tar']
    """

    def __init__(self, strategy: ByWorker = "uneven") -> None:
        self.strategy: ByWorker = check_choice("strategy", strategy, get_args(ByWorker))

    def __call__(self, shards: Iterable[_Shard]) -> Iterator[_Shard]:
        worker, num_workers = Topology.worker()
        listed = _as_list(shards)
        yield from (
            listed[each] for each in split_shards(len(listed), num_workers, worker, self.strategy, "worker")
        )

    def __repr__(self) -> str:
        return f"WorkerSplitter({self.strategy!r})"


#: Equally many shards for each rank, or an error that names alternatives.
nodesplitter = NodeSplitter("even")
#: The shards of a rank over its workers, of which none may be empty.
workersplitter = WorkerSplitter("uneven")
