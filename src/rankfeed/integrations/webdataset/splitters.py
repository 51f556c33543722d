"""Shard splitters for WebDataset pipelines that check their result."""

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


def split_shards(
    shards: Iterable[_Shard], parts: int, part: int, strategy: ByRank | ByWorker, noun: str = "rank"
) -> list[_Shard]:
    """The shards that one part (a rank, or a worker of a rank) reads."""
    listed = list(islice(check_iterable("shards", shards), MAX_SHARDS + 1))
    count = len(listed)
    if count > MAX_SHARDS:
        raise ArgumentError(
            "the list of shards is endless",
            expected=f"at most {MAX_SHARDS} shards",
            remedy="leave resampled=True out: rankfeed.integrations.webdataset.Resampled draws samples over all "
            "ranks from one sequence",
        )
    excess = count % parts
    if count == 0 or (count < parts and strategy not in ("repeat", "idle")) or (excess and strategy == "even"):
        raise _split_error(count, parts, part, noun)
    own_shards = listed[part : count - excess if strategy == "drop" else count : parts]
    if strategy == "repeat" and excess and part >= excess:
        own_shards.append(listed[(part - excess) % count])
    return own_shards


def _split_error(shards: int, parts: int, part: int, noun: str) -> PlanError:
    too_few, where = shards < parts, f"{noun} {part} of {parts}"
    if shards == 0:
        return PlanError(
            f"there are no shards for {parts} {noun}s",
            where=where,
            remedy="check the list of shards: a pattern without a matching file is an empty list",
        )
    if noun == "worker":
        ways = (
            f'num_workers={shards}; or WorkerSplitter("idle") with empty_check=False'
            if too_few
            else 'a num_workers that divides the shards of a rank; or WorkerSplitter("uneven")'
        )
    elif too_few:
        ways = 'fewer ranks; or NodeSplitter("repeat") reads some of them several times'
    else:
        ways = (
            f'NodeSplitter("drop") leaves {shards % parts} of them out; or NodeSplitter("repeat") reads '
            f"{parts - shards % parts} of them twice; or "
            'NodeSplitter("uneven") lets ranks differ, which then take different numbers of steps'
        )
    available = f"{shards} shard{'s' * (shards != 1)}"
    summary = f"{available} cannot be divided {'' if too_few else 'evenly '}among {parts} {noun}s"
    return PlanError(
        f"{summary}: {parts - shards} would be empty" if too_few else summary,
        expected=f"at least {parts} shards" if too_few else f"a multiple of {parts} shards",
        found=available,
        where=where,
        remedy=f"rankfeed.integrations.webdataset.ShardedSamples divides samples, for any shards; or {ways}",
    )


class NodeSplitter:
    """This rank's shards: for ``wds.WebDataset(urls, nodesplitter=NodeSplitter("drop"))``.

    Ranks get equally many shards, and so equally many samples only if the shards are equal; `ShardedSamples`
    divides samples. The list must be in the same order on all ranks.

    Args:
        strategy: "even" (or an error), "drop" (leaves shards out), "repeat" (reads some twice) or "uneven". No
            rank is empty.
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
        topology = self.topology
        own_shards = split_shards(shards, topology.world_size, topology.rank, self.strategy)
        refuse_double_sharding(topology)
        yield from own_shards

    def __repr__(self) -> str:
        return f"NodeSplitter({self.strategy!r})"


class WorkerSplitter:
    """This worker's part of its rank's shards: for ``wds.WebDataset(urls, workersplitter=WorkerSplitter())``.

    Args:
        strategy: "even" (or an error), "uneven" or "idle" (workers may be empty). The rank reads the same shards
            with all three.

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
        yield from split_shards(shards, num_workers, worker, self.strategy, "worker")

    def __repr__(self) -> str:
        return f"WorkerSplitter({self.strategy!r})"


#: Equally many shards for each rank, or an error that names alternatives.
nodesplitter = NodeSplitter("even")
#: The shards of a rank over its workers, of which none may be empty.
workersplitter = WorkerSplitter("uneven")
