"""Whether what the processes of a launch say of themselves can be true of all of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rankfeed.topology.topology import Topology

#: As many ranks are named in a message, then it is said how many more there are.
_NAMED = 8
_Key = TypeVar("_Key")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Seen:
    """What one process says of itself.

    Args:
        host: name of the machine, or of the container.
        pid: number of the process there.
        topology: where it takes itself to be; None where it cannot tell.
        problem: why it cannot go on, if so.
        local_told: whether its launcher said the local rank and size; else they are worked out.
        node_told: the same of the node.
        data: fingerprint of the data set that it opened, if any.
        steps: of its first epoch over these data.
        first: sample ids that it reads first.
    """

    host: str
    pid: int
    topology: Topology | None = None
    problem: str = ""
    local_told: bool = False
    node_told: bool = False
    data: str = ""
    steps: int = 0
    first: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """How a message calls it.

        Examples:
            >>> Seen("h1", 7, Topology(rank=1, world_size=2)).name, Seen("h1", 7).name
            ('rank 1 (h1, pid 7)', 'a process (h1, pid 7)')
        """
        who = "a process" if self.topology is None else f"rank {self.topology.rank}"
        return f"{who} ({self.host}, pid {self.pid})"


def contradictions(seen: Sequence[Seen]) -> list[str]:
    """What of all this cannot be, a line each; empty where all agree.

    A local rank or a node that was worked out, since the launcher does not say it, contradicts nobody: no share of
    the data depends on it.

    Args:
        seen: one for each process that came.

    Examples:
        >>> contradictions([Seen("h1", pid, Topology(rank=pid, world_size=2)) for pid in (0, 1)])
        []
        >>> contradictions([Seen("h1", pid, Topology(rank=0, world_size=2)) for pid in (8, 9)])
        ['rank 0 is there 2 times: h1, pid 8; h1, pid 9', 'rank 1 did not come']
    """
    known = [(one, one.topology) for one in seen if one.topology is not None]
    found = [f"{one.name} cannot go on: {one.problem}" for one in seen if one.problem]
    found += _differ("launchers", ((here.launcher, one) for one, here in known))
    found += _differ("world sizes", ((str(here.world_size), one) for one, here in known))
    found += _ranks(known)
    found += _local_ranks(known)
    told = [(one, here) for one, here in known if one.node_told]
    found += _differ("numbers of nodes", ((str(here.num_nodes), one) for one, here in told))
    for node, members in _grouped((here.node, one) for one, here in told):
        hosts = sorted({one.host for one in members})
        if len(hosts) > 1:
            found.append(f"node {node} is on {len(hosts)} hosts: {', '.join(hosts)}")
    found += _differ("data sets", ((one.data, one) for one in seen if one.data))
    return found


def absent(seen: Iterable[Seen], world_size: int) -> list[int]:
    """Ranks below a world size that nobody takes itself to be.

    Examples:
        >>> absent([Seen("h1", 5, Topology(rank=1, world_size=3))], 3)
        [0, 2]
    """
    there = {one.topology.rank for one in seen if one.topology is not None}
    return [rank for rank in range(world_size) if rank not in there]


def listed(ranks: Sequence[int]) -> str:
    """Ranks as a message names them.

    Examples:
        >>> listed([3]), listed([0, 2]), listed(range(100))
        ('rank 3', 'ranks 0, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _ranks(known: Sequence[tuple[Seen, Topology]]) -> list[str]:
    found = []
    for rank, members in _grouped((here.rank, one) for one, here in known):
        if len(members) > 1:
            places = "; ".join(f"{one.host}, pid {one.pid}" for one in members[:_NAMED])
            found.append(f"rank {rank} is there {len(members)} times: {places}")
    missing = absent((one for one, _ in known), max((here.world_size for _, here in known), default=0))
    return [*found, f"{listed(missing)} did not come"] if missing else found


def _local_ranks(known: Sequence[tuple[Seen, Topology]]) -> list[str]:
    """On each node each local rank once, and as many as there are said to be."""
    found = []
    told = (((here.node, one.host), here) for one, here in known if one.local_told)
    for (node, host), members in _grouped(told):
        where = f"on node {node} ({host})"
        sizes = sorted({here.local_world_size for here in members})
        if sizes != [len(members)]:
            said = " or ".join(map(str, sizes))
            found.append(f"{where} there are {len(members)} processes, which take themselves to be {said}")
        counts = Counter(here.local_rank for here in members)
        # All 0 is what `torchrun --virtual-local-rank` says.
        twice = [rank for rank, count in sorted(counts.items()) if count > 1]
        if twice and set(counts) != {0}:
            found.append(f"{where} a local rank is there more than once: {', '.join(map(str, twice[:_NAMED]))}")
    return found


def _differ(what: str, said: Iterable[tuple[str, Seen]]) -> list[str]:
    groups = _grouped(said)
    if len(groups) < 2:
        return []
    return [f"{what} differ: " + ", ".join(f"{value} says {members[0].name}" for value, members in groups)]


def _grouped(pairs: Iterable[tuple[_Key, _T]]) -> list[tuple[_Key, list[_T]]]:
    groups: dict[_Key, list[_T]] = {}
    for key, one in pairs:
        groups.setdefault(key, []).append(one)
    return list(groups.items())
